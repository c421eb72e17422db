// The cases of the local ring, run by processes under mpirun. Every rank compares its own rows; rank 0 prints.
#include <gtest/gtest.h>

#include <unistd.h>
#include <csignal>

#include "longspan/error.h"
#include "ring/ring_cases.h"

namespace longspan::testing {
namespace {

TEST(MpiRing, EqualsOneDevice) {
  const auto communicator = mpi_ring();
  const int ranks = communicator->size(), rank = communicator->rank();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const RingCase& one : ring_cases(dtype)) {
      const Case& c = one.problem;
      const Shards shards = uneven(c.shape.tokens, ranks);
      RingRun run;
      run.keep_halo = ranks % 2 == 0;
      const RankResults got = run_rank(c, shards, communicator, run);
      expect_same(got, c.run(), shards.ranges(rank), ring_tolerance(dtype), true, true,
                  fmt::format("{} rank {} of {}", one.name, rank, ranks));
      expect_planned_bytes(got, c, shards, rank, run);
    }
  }
}

TEST(MpiRing, RoundsAgreeToRounding) {
  const auto communicator = mpi_ring();
  const Case c(Pattern::dense(), {}, {1, kRingTokens, 2, 2, 16});
  const Shards shards = Shards::even(c.shape.tokens, communicator->size());
  RingRun run;
  run.options.halo_limit_bytes = 6000;
  const RankResults got = run_rank(c, shards, communicator, run);
  EXPECT_GT(got.forward.rounds, 0);
  expect_same(got, c.run(), shards.ranges(communicator->rank()), ring_tolerance(DType::f32), false, true, "rounds");
}

/// `mpi_test kill|stop|disagree`: after a good call rank 1 kills or stops itself, or computes something else; the
/// others (there: all) must raise in time, naming a rank. A failed MPI is not finalised, so this is no test of gtest's.
int survive(const std::string& fate) {
  const auto communicator = mpi_ring();
  const int rank = communicator->rank();
  Case c(Pattern::dense(), {}, {1, 90, 2, 2, 16});
  const Shards shards = Shards::even(90, communicator->size());
  RingRun run;
  run.options.deadline = std::chrono::seconds(2);
  run_rank(c, shards, communicator, run);
  if (rank == 1 && fate == "disagree") {
    c.options.scale = 0.5;
  } else if (rank == 1) {
    std::raise(fate == "kill" ? SIGKILL : SIGSTOP);
  }
  const Tensor before = c.q;
  const auto begin = std::chrono::steady_clock::now();
  try {
    run_rank(c, shards, communicator, run);
    fmt::print("rank {}: no error\n", rank);
  } catch (const CommError& error) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    fmt::print("rank {}: {} after {:.1f} s, inputs {}\n", rank, error.what(), seconds,
               before == c.q ? "untouched" : "CHANGED");
  }
  std::fflush(stdout);
  _exit(0);  // as a survivor ends: MPI_Finalize would wait for the lost rank
}

}  // namespace
}  // namespace longspan::testing

int main(int count, char** values) {
  if (count > 1 && values[1][0] != '-') return longspan::testing::survive(values[1]);
  ::testing::InitGoogleTest(&count, values);
  const auto communicator = longspan::mpi_ring();
  if (communicator->rank() != 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    struct FailuresOnly : ::testing::EmptyTestEventListener {
      void OnTestPartResult(const ::testing::TestPartResult& result) override {
        if (result.failed())
          fmt::print(stderr, "{}:{}: {}\n", result.file_name() ? result.file_name() : "", result.line_number(),
                     result.message());
      }
    };
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly);
  }
  return RUN_ALL_TESTS();
}
