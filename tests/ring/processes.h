// Ranks that are processes, forked by a test that has used neither threads nor GPUs before.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace longspan::testing {

inline std::string ring_name() {
  static int count = 0;
  return fmt::format("test-{}-{}", getpid(), count++);
}

/// body(rank) in a process for each rank; whether each ended well, by rank.
inline std::vector<bool> in_processes(int ranks, const std::function<void(int)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
      std::fflush(nullptr);
      _exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(child);
  }
  std::vector<bool> well;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    well.push_back(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  return well;
}

inline void expect_all_well(int ranks, const std::function<void(int)>& body) {
  EXPECT_EQ(in_processes(ranks, body), std::vector<bool>(static_cast<std::size_t>(ranks), true));
}

}  // namespace longspan::testing
