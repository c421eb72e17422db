// The longspan command. Everything but main() is a library, so that tests can link it.
#include "command.h"
#include "interrupt.h"

int main(int count, char** values) {
  longspan::cli::handle_signals();
  return longspan::cli::run_command_line(count, values);
}
