// Plans attention over a billion tokens: a plan is a closed form, so this takes no time and no memory.
#include <longspan/longspan.h>

#include <cstdio>

int main() {
  using namespace longspan;
  const auto pattern = Pattern::dilated({2048, 65536, 1'000'000'000}, {1, 32, 488'281});
  const Attention attention(pattern);
  const Problem problem{.tokens = 1'000'000'000, .query_rows = 1'000'000'000, .heads = 6, .kv_heads = 6};
  const auto plan = attention.plan(problem);
  std::printf("%s\n", plan->to_string().c_str());
  std::printf("%.3g pairs; dense attention would have %.3g\n", plan->totals().pairs, 6e18);
}
