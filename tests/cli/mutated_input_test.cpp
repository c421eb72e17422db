// Whatever bytes are in a file or a pattern's text, the command ends with an exit code and at most one line on stderr.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "command.h"
#include "files/npy.h"
#include "files/safetensors.h"

namespace longspan::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kMutations = 1000;  // of each kind of input

/// Runs commands in a folder of their own, with stdout thrown away and stderr in a file.
class MutatedInput : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("longspan_mutated_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const char* name) const { return (folder_ / name).string(); }

  /// Expects exit code 0, 2 or 3, and one line of printable text for the last two. Returns the code.
  int run(std::vector<std::string> arguments, const std::string& what) {
    arguments.insert(arguments.begin(), "longspan");
    std::vector<const char*> values;
    for (const std::string& argument : arguments) values.push_back(argument.c_str());
    const int kept[] = {dup(STDOUT_FILENO), dup(STDERR_FILENO)};
    const int nowhere = open("/dev/null", O_WRONLY);
    const int messages = open(path("stderr").c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    dup2(nowhere, STDOUT_FILENO);
    dup2(messages, STDERR_FILENO);
    const int code = run_command_line(static_cast<int>(values.size()), values.data());
    std::fflush(stderr);
    dup2(kept[0], STDOUT_FILENO);
    dup2(kept[1], STDERR_FILENO);
    for (const int descriptor : {kept[0], kept[1], nowhere, messages}) close(descriptor);
    std::stringstream text;
    text << std::ifstream(path("stderr")).rdbuf();
    const std::string said = text.str();
    EXPECT_TRUE(code == 0 || code == 2 || code == 3) << code << " for " << what;
    if (code != 0) {
      EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said << " for " << what;
      EXPECT_TRUE(said.starts_with("longspan: ")) << said << " for " << what;
      EXPECT_TRUE(std::all_of(said.begin(), said.end() - 1,
                              [](char c) { return static_cast<unsigned char>(c) >= 0x20 && c != 0x7F; }))
          << said << " for " << what;
    }
    return code;
  }

  fs::path folder_;
  std::mt19937_64 random_{20260707};

  std::size_t below(std::size_t bound) { return random_() % bound; }

  /// A few bytes changed, inserted, removed, repeated, or replaced by what readers find hard.
  std::string mutated(std::string text) {
    static const std::string kHard[] = {"-1",
                                        "0",
                                        "99999999999999999999",
                                        "9223372036854775807",
                                        "1e300",
                                        "(",
                                        "}",
                                        "\"",
                                        "'",
                                        ",",
                                        "nan",
                                        std::string(1, '\0'),
                                        "\xff",
                                        "\x1b[2J",
                                        "\n"};
    for (std::size_t change = 1 + below(3); change > 0; --change) {
      const std::size_t at = below(text.size() + 1);
      switch (below(6)) {
        case 0:
          if (at < text.size()) text[at] = static_cast<char>(below(256));
          break;
        case 1:
          text.erase(at, 1 + below(4));
          break;
        case 2:
          text.insert(at, kHard[below(std::size(kHard))]);
          break;
        case 3:
          text.insert(at, text.substr(below(text.size() + 1), below(20)));
          break;
        case 4:
          if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
          break;
        default:
          if (below(8) == 0) text.resize(at);
      }
    }
    return text;
  }

  static void write(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
};

/// Headers are changed more often than data, which may hold anything.
TEST_F(MutatedInput, ArrayFilesNeverCrashAttend) {
  const std::string data(1 * 16 * 2 * 8 * 4, '\0');
  const std::string npy = npy_header(DType::f32, {1, 16, 2, 8});
  const std::string safe = safetensors_header({{"q", DType::f32, {1, 16, 2, 8}}});
  write(path("good.npy"), npy + data);
  const std::string good = path("good.npy"), out = path("out.npy");
  int refused = 0;
  for (int i = 0; i < kMutations; ++i) {
    const bool numpy = i % 2 == 0;
    const std::string header = mutated(numpy ? npy : safe), file = path(numpy ? "bad.npy" : "bad.safetensors");
    write(file, header + (below(8) == 0 ? mutated(data) : data));
    const std::string location = file + (numpy ? "" : "#q");
    const std::vector<std::string> use[] = {
        {"--q", location, "--k", good, "--v", good},
        {"--q", location, "--k", location, "--v", location},
        {"--q", good, "--k", good, "--v", good, "--lengths", location},
        {"--q", good, "--k", good, "--v", good, "--mask", location, "--block-size", "16"}};
    std::vector<std::string> arguments = {"attend", "--out", out};
    const auto& files = use[below(std::size(use))];
    arguments.insert(arguments.end(), files.begin(), files.end());
    refused += run(arguments, header) != 0;
  }
  EXPECT_GT(refused, kMutations / 2);
  EXPECT_LT(refused, kMutations);  // some changes leave a valid file
}

TEST_F(MutatedInput, PatternTextsNeverCrashPlan) {
  const std::string texts[] = {"longspan/1 dilated 2048/1 4096/2 8192/4",
                               "longnet phase=torchscale pad_keys long=skip scale=0.5 64/1 128/4",
                               "block=32 local_window(512)+random(0.1,7)",
                               "bigbird",
                               "block=16 global_local(16,64)+dilated_sparse(1,2,4)",
                               "block_sparse block=64 heads=1 blocks=2 rows=0;0,1",
                               "hierarchical((64,256),(256,1024),(1024,-1)) block=64"};
  int accepted = 0;
  for (int i = 0; i < kMutations; ++i) {
    std::string text = mutated(texts[below(std::size(texts))]);
    text = text.substr(0, text.find('\0'));  // an argument ends there
    accepted += run({"plan", "--tokens", "512", "--heads", "4", "--json", "--pattern", text}, text) == 0;
  }
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, kMutations);
}

TEST_F(MutatedInput, NumbersNeverCrashPlan) {
  const char* const options[] = {"--tokens", "--heads", "--kv-heads", "--head-dim", "--segments", "--dilations",
                                 "--scale",  "--seed",  "--batch",    "--dropout",  "--threads",  "--block-size"};
  for (int i = 0; i < kMutations; ++i) {
    std::string number = mutated(below(2) == 0 ? "4096,128K" : "12");
    number = number.substr(0, number.find('\0'));
    std::vector<std::string> arguments = {"plan", "--json", options[below(std::size(options))], number};
    run(arguments, arguments[2] + " " + number);
  }
}

}  // namespace
}  // namespace longspan::cli
