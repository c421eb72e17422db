// Processes that share a GPU as ranks of a ring: rows go from one's memory to the other's by CUDA IPC handles.
#include <gtest/gtest.h>

#include <csignal>

#include "gpu/gpu_place.h"
#include "longspan/error.h"
#include "ring/processes.h"

namespace longspan::testing {
namespace {

/// In a process of its own: the test's must not have used the GPU when it forks.
bool there_is_a_gpu() {
  return in_processes(1, [](int) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) _exit(2);
  })[0];
}

TEST(NodeRingOnGpu, HasTheBitsOfOneGpu) {
  if (!there_is_a_gpu()) GTEST_SKIP() << "no GPU here";
  for (const int ranks : {2, 4}) {
    const std::string name = ring_name();
    expect_all_well(ranks, [&](int rank) {
      const auto communicator = node_ring(name, rank, ranks);
      int ran = 0;
      for (const RingCase& one : ring_cases(DType::bf16)) {
        const Case& c = one.problem;
        for (const std::string& kernel : kernels_for_pieces(c)) {
          ++ran;
          const Results want = run_on_gpu(c, kernel);
          const Shards shards = Shards::even(c.shape.tokens, ranks);
          RingRun run;
          run.kernel = kernel;
          const RankResults results = run_rank<GpuPlace>(c, shards, communicator, run);
          expect_same(results, want, shards.ranges(rank), ring_tolerance(DType::bf16), true, true,
                      fmt::format("{} {} rank {} of {}", kernel, one.name, rank, ranks));
        }
      }
      EXPECT_GT(ran, 10);
    });
  }
}

TEST(NodeRingOnGpu, NamesAKilledRank) {
  if (!there_is_a_gpu()) GTEST_SKIP() << "no GPU here";
  const std::string name = ring_name();
  const std::vector<bool> well = in_processes(3, [&](int rank) {
    const Case c(Pattern::longnet({16, 120}, {1, 3}), {}, {1, 120, 3, 3, 16}, DType::bf16);
    const auto communicator = node_ring(name, rank, 3);
    const Shards shards = Shards::even(120, 3);
    run_rank<GpuPlace>(c, shards, communicator, {});
    if (rank == 1) raise(SIGKILL);
    try {
      run_rank<GpuPlace>(c, shards, communicator, {});
      ADD_FAILURE() << "rank " << rank << " did not miss rank 1";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 "), std::string::npos) << error.what();
    }
  });
  EXPECT_EQ(well, (std::vector<bool>{true, false, true}));
}

}  // namespace
}  // namespace longspan::testing
