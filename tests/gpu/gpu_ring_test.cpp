// Several ranks on one GPU: the bits of one GPU with the same kernel, gradients to rounding, bytes to the last one;
// in rounds everything to rounding; messages from GPU to GPU and by way of the host; what goes wrong on the way.
#include <gtest/gtest.h>

#include "gpu/gpu_place.h"
#include "longspan/memory.h"

namespace longspan::testing {
namespace {

class GpuRing : public ::testing::TestWithParam<std::tuple<int, DType>> {};

TEST_P(GpuRing, EqualsOneGpu) {
  LONGSPAN_NEEDS_GPU();
  const auto [ranks, dtype] = GetParam();
  int ran = 0;
  for (const RingCase& one : ring_cases(dtype)) {
    const Case& c = one.problem;
    for (const std::string& kernel : kernels_for_rings(c)) {
      ++ran;
      const Results want = run_on_gpu(c, kernel);
      const Shards shards = ranks == 13 ? Shards::even(c.shape.tokens, ranks) : uneven(c.shape.tokens, ranks);
      RingRun run;
      run.keep_halo = ranks % 2 == 0;
      run.kernel = kernel;
      const auto got = run_local<GpuPlace>(c, shards, run, static_cast<std::uint64_t>(ranks));
      for (int rank = 0; rank < ranks; ++rank) {
        const RankResults& r = got[static_cast<std::size_t>(rank)];
        expect_same(r, want, shards.ranges(rank), ring_tolerance(dtype), true, true,
                    fmt::format("{} {} rank {} of {}", kernel, one.name, rank, ranks));
        expect_planned_bytes(r, c, shards, rank, run);
      }
    }
  }
  EXPECT_GT(ran, 10);
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuRing,
                         ::testing::Combine(::testing::Values(2, 3, 4, 8), ::testing::Values(DType::f32, DType::bf16)),
                         [](const auto& one) {
                           return fmt::format("{}_{}", std::get<0>(one.param), name_of(std::get<1>(one.param)));
                         });
INSTANTIATE_TEST_SUITE_P(Others, GpuRing, ::testing::Values(std::tuple{4, DType::f16}, std::tuple{13, DType::bf16}),
                         [](const auto& one) {
                           return fmt::format("{}_{}", std::get<0>(one.param), name_of(std::get<1>(one.param)));
                         });

class GpuRounds : public ::testing::TestWithParam<DType> {};

TEST_P(GpuRounds, AgreeToRoundingAndStayWithinTheLimit) {
  LONGSPAN_NEEDS_GPU();
  int ran = 0;
  for (const RingCase& one : ring_cases(GetParam())) {
    if (one.problem.options.detached_mix) continue;
    for (const std::string& kernel : kernels_for_pieces(one.problem)) {
      ++ran;
      const Results want = run_on_gpu(one.problem, kernel);
      for (const auto& [ranks, limit] : {std::pair{2, 12000}, {3, 40000}, {8, 12000}})
        expect_rounds<GpuPlace>(one, want, ranks, limit, kernel);
    }
  }
  EXPECT_GT(ran, 10);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, GpuRounds, ::testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& one) { return std::string(name_of(one.param)); });

TEST(GpuRounds, OfOneRowEach) {
  LONGSPAN_NEEDS_GPU();
  const RingCase one = one_row_case();
  for (const std::string& kernel : kernels_for_pieces(one.problem))
    expect_rounds<GpuPlace>(one, run_on_gpu(one.problem, kernel), 3, kOneRowLimit, kernel);
}

/// Exchanges at once, and in rounds.
constexpr std::size_t kLimits[] = {0, 40000};

RingRun within(std::size_t limit) {
  RingRun run;
  run.options.halo_limit_bytes = limit;
  return run;
}

Case small_case() {
  return Case(Pattern::longnet({40, 160, 400}, {1, 3, 6}), {}, {2, kRingTokens, 4, 2, 64}, DType::bf16);
}

/// What each rank says went wrong.
template <class Kind = CommError>
std::vector<std::string> errors_of(const Case& c, const Shards& shards, const RingRun& run,
                                   std::vector<std::shared_ptr<Communicator>> ring) {
  return texts_of<Kind>(on_ranks(std::move(ring), [&](int, std::shared_ptr<Communicator> communicator) {
    run_rank<GpuPlace>(c, shards, std::move(communicator), run);
  }));
}

/// Another ring that only moves the CPU's memory, and cannot take messages back, as MPI and gloo.
class ByHost final : public Communicator {
 public:
  explicit ByHost(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}
  bool keeps_buffers() const override { return true; }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void begin(std::span<const SendBuffer> sends, std::span<const ReceiveBuffer> receives) override {
    for (const SendBuffer& send : sends) EXPECT_EQ(send.device.type, DeviceType::cpu);
    inner_->begin(sends, receives);
  }
  void wait(Deadline deadline) override { inner_->wait(deadline); }
  void abort() noexcept override { inner_->abort(); }

 private:
  std::shared_ptr<Communicator> inner_;
};

std::vector<std::shared_ptr<Communicator>> by_host(int ranks, std::vector<LocalFault> faults = {}) {
  auto ring = local_ring(ranks, std::move(faults));
  for (auto& one : ring) one = std::make_shared<ByHost>(one);
  return ring;
}

TEST(GpuRing, ByWayOfTheHostAndZigzag) {
  LONGSPAN_NEEDS_GPU();
  Case c = small_case();
  c.options.causal = true;
  const Shards shards = Shards::zigzag(c.shape.tokens, 3);
  for (const std::size_t limit : kLimits) {
    const Results want = run_on_gpu(c, limit == 0 ? "" : "cuda-mma");
    for (const bool staged : {false, true}) {
      const auto got = run_ranks<GpuPlace>(c, shards, within(limit), staged ? by_host(3) : local_ring(3));
      for (int rank = 0; rank < 3; ++rank) {
        const RankResults& r = got[static_cast<std::size_t>(rank)];
        EXPECT_EQ(r.forward.rounds > 0, limit > 0);
        expect_same(r, want, shards.ranges(rank), ring_tolerance(c.dtype), limit == 0, true,
                    fmt::format("{} limit {}", staged ? "by host" : "zigzag", limit));
      }
    }
  }
}

TEST(GpuRing, StrandsOfManyTiles) {
  LONGSPAN_NEEDS_GPU();
  for (const std::int64_t head_dim : {48, 64, 128}) {
    for (const bool causal : {false, true}) {
      Options options;
      options.causal = causal;
      const Case c(Pattern::longnet({500, 1700}, {1, 2}), options, {1, 1700, 4, 2, head_dim}, DType::bf16);
      const Shards shards = uneven(c.shape.tokens, 3);
      for (const std::size_t limit : {std::size_t{0}, 10 * kLimits[1]}) {
        const Results want = limit == 0 ? run_on_gpu(c, "") : run_on_gpu(c, "cuda-mma", true);
        const auto got = run_local<GpuPlace>(c, shards, within(limit));
        for (int rank = 0; rank < 3; ++rank)
          expect_same(got[static_cast<std::size_t>(rank)], want, shards.ranges(rank), ring_tolerance(c.dtype),
                      limit == 0, true, fmt::format("head_dim {} limit {}", head_dim, limit));
      }
    }
  }
}

TEST(GpuRing, DeterministicGradientsHaveOneSetOfBits) {
  LONGSPAN_NEEDS_GPU();
  Case c = small_case();
  c.options.deterministic = true;
  const Shards shards = uneven(c.shape.tokens, 4);
  for (const std::size_t limit : kLimits) {
    const auto first = run_local<GpuPlace>(c, shards, within(limit));
    for (std::uint64_t shuffle = 1; shuffle <= 3; ++shuffle) {
      const auto again = run_local<GpuPlace>(c, shards, within(limit), shuffle);
      for (std::size_t rank = 0; rank < first.size(); ++rank) {
        for (const auto member : {&Results::out, &Results::dq, &Results::dk, &Results::dv})
          EXPECT_EQ(bits_differ(again[rank].results.*member, first[rank].results.*member), "")
              << "shuffle " << shuffle << " limit " << limit;
      }
    }
  }
}

TEST(GpuRing, WhatGoesWrongIsAnErrorOrMakesNoDifference) {
  LONGSPAN_NEEDS_GPU();
  const Case c = small_case();
  const Results want = run_on_gpu(c, "");
  const Shards shards = uneven(c.shape.tokens, 3);
  using Kind = LocalFault::Kind;
  for (const bool staged : {false, true}) {
    for (const int exchange : {1, 2}) {  // 0 compares ranks
      for (const Kind kind : {Kind::lose, Kind::corrupt, Kind::die, Kind::stall, Kind::delay, Kind::duplicate}) {
        const LocalFault fault{kind, 1, -1, exchange, std::chrono::milliseconds(kind == Kind::stall ? 1500 : 20)};
        RingRun run;
        run.options.deadline = std::chrono::milliseconds(400);
        const auto make = [&] { return staged ? by_host(3, {fault}) : local_ring(3, {fault}); };
        if (kind == Kind::delay || kind == Kind::duplicate) {
          const auto got = run_ranks<GpuPlace>(c, shards, run, make());
          for (int rank = 0; rank < 3; ++rank)
            expect_same(got[static_cast<std::size_t>(rank)], want, shards.ranges(rank), ring_tolerance(c.dtype), true,
                        true, "fault");
          continue;
        }
        // Whoever hears of it first gives up, which the other may hear of before it misses rank 1.
        const auto errors = errors_of(c, shards, run, make());
        bool named = false;
        for (const std::size_t rank : {0u, 2u}) {
          EXPECT_NE(errors[rank], "") << "fault " << static_cast<int>(kind) << " in exchange " << exchange;
          named = named || errors[rank].find(": rank 1 ") != std::string::npos;
        }
        EXPECT_TRUE(named) << errors[0] << "\n" << errors[2];
      }
    }
  }
  // In the same process, afterwards.
  const auto got = run_local<GpuPlace>(c, shards);
  expect_same(got[0], want, shards.ranges(0), ring_tolerance(c.dtype), true, true, "after errors");
}

/// All ranks of a local ring on rows of tensors on the GPU, in the order of one stream.
class RanksOfOneThread {
 public:
  RanksOfOneThread(const Case& c, const Shards& shards, cudaStream_t stream)
      : device(c),
        shards_(shards),
        communicators_(local_ring(shards.ranks())),
        stream_(stream),
        halos_(communicators_.size()) {
    for (const auto& one : communicators_)
      rings_.push_back(std::make_unique<Ring>(Attention(c.pattern, c.options), one, shards));
  }
  std::vector<RingForward> forwards() {
    std::vector<RingForward> calls;
    for (std::size_t r = 0; r < rings_.size(); ++r) {
      RingForward& call = calls.emplace_back();
      call.ring = rings_[r].get();
      call.q = rows(device.q.view(), r), call.k = rows(device.k.view(), r), call.v = rows(device.v.view(), r);
      call.out = rows(device.out.output(), r), call.lse = rows(device.lse.output(), r);
      call.call.stream = stream_;
      call.keep = &halos_[r];
    }
    return calls;
  }
  std::vector<RingBackward> backwards() {
    std::vector<RingBackward> calls;
    for (std::size_t r = 0; r < rings_.size(); ++r) {
      RingBackward& call = calls.emplace_back();
      call.ring = rings_[r].get();
      call.q = rows(device.q.view(), r), call.k = rows(device.k.view(), r), call.v = rows(device.v.view(), r);
      call.out = rows(device.out.view(), r), call.lse = rows(device.lse.view(), r);
      call.dout = rows(device.dout.view(), r);
      call.dq = rows(device.dq.output(), r), call.dk = rows(device.dk.output(), r),
      call.dv = rows(device.dv.output(), r);
      call.call.stream = stream_;
      call.kept = &halos_[r];
    }
    return calls;
  }
  /// A thread for each rank, as in the first call.
  void run_apart() {
    const auto calls = forwards();
    const auto gradients = backwards();
    const auto errors = texts_of<std::exception>(on_ranks(communicators_, [&](int rank, std::shared_ptr<Communicator>) {
      const RingForward& f = calls[static_cast<std::size_t>(rank)];
      f.ring->forward(f.q, f.k, f.v, f.out, f.lse, f.call, f.keep);
      const RingBackward& b = gradients[static_cast<std::size_t>(rank)];
      b.ring->backward(b.q, b.k, b.v, b.out, b.lse, b.dout, b.dq, b.dk, b.dv, b.call, b.kept);
    }));
    for (const std::string& text : errors) EXPECT_EQ(text, "");
  }
  void expect(const Results& want, const char* what) {
    for (const auto& ring : rings_) ring->check(std::chrono::seconds(20));
    const Results& got = device.download();
    EXPECT_EQ(bits_differ(got.out, want.out), "") << what;
    EXPECT_EQ(bits_differ(got.lse, want.lse), "") << what;
    EXPECT_EQ(bits_differ(got.dk, want.dk), "") << what;
    EXPECT_EQ(bits_differ(got.dq, want.dq), "") << what;
    for (const DeviceTensor* tensor : {&device.out, &device.lse, &device.dq, &device.dk, &device.dv}) tensor->poison();
  }
  DeviceCase device;

 private:
  template <class View>
  View rows(View view, std::size_t rank) const {
    const RowRange range = shards_.ranges(static_cast<int>(rank))[0];
    view.data = view.bytes_at(0, range.start, 0);
    view.sizes[1] = range.count;
    return view;
  }
  const Shards& shards_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
  cudaStream_t stream_;
  std::vector<RingHalo> halos_;
  std::vector<std::unique_ptr<Ring>> rings_;
};

TEST(GpuRing, OneThreadRunsAllRanksAndGraphsReplayThem) {
  LONGSPAN_NEEDS_GPU();
  Case c = small_case();
  c.options.deterministic = true;
  const Shards shards = Shards::even(c.shape.tokens, 4);
  cudaStream_t stream = nullptr;
  expect_success(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  {
    RanksOfOneThread ranks(c, shards, stream);
    const auto forwards = ranks.forwards();
    const auto backwards = ranks.backwards();
    EXPECT_FALSE(Ring::forward_together(forwards)) << "the first call compares ranks";
    ranks.run_apart();
    expect_success(cudaStreamSynchronize(stream));
    const Results want = ranks.device.download();
    EXPECT_EQ(bits_differ(want.out, run_on_gpu(c, "").out), "");
    if (!Ring::forward_together(forwards)) GTEST_SKIP() << "no kernel here takes packed strands";
    ASSERT_TRUE(Ring::backward_together(backwards));
    ranks.expect(want, "one thread");
    const auto allocations = device_memory::statistics(0).allocations;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    expect_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    ASSERT_TRUE(Ring::forward_together(forwards));
    ASSERT_TRUE(Ring::backward_together(backwards));
    expect_success(cudaStreamEndCapture(stream, &graph));
    EXPECT_EQ(device_memory::statistics(0).allocations, allocations);
    expect_success(cudaGraphInstantiate(&replay, graph, 0));
    for (int i = 0; i < 2; ++i) {
      expect_success(cudaGraphLaunch(replay, stream));
      ranks.expect(want, "replay");
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

/// Rows are exchanged again: a rank must not send gradients before all have taken its rows.
TEST(GpuRing, OneThreadRunsBackwardsWithoutKeptRows) {
  LONGSPAN_NEEDS_GPU();
  cudaStream_t stream = nullptr;
  expect_success(cudaStreamCreate(&stream));
  {
    Case c = small_case();
    c.options.deterministic = true;
    const Shards shards = uneven(c.shape.tokens, 4);
    RanksOfOneThread ranks(c, shards, stream);
    ranks.run_apart();
    expect_success(cudaStreamSynchronize(stream));
    const Results want = ranks.device.download();
    auto backwards = ranks.backwards();
    backwards[1].kept = nullptr;
    if (!Ring::forward_together(ranks.forwards())) GTEST_SKIP() << "no kernel here takes packed strands";
    EXPECT_THROW(Ring::backward_together(backwards), InvalidArgument);
    for (RingBackward& call : backwards) call.kept = nullptr;
    ASSERT_TRUE(Ring::backward_together(backwards));
    ranks.expect(want, "rows exchanged again");
  }
  cudaStreamDestroy(stream);
}

TEST(GpuRing, MemoryGoesBack) {
  LONGSPAN_NEEDS_GPU();
  const Case c = small_case();
  const Shards shards = uneven(c.shape.tokens, 4);
  run_local<GpuPlace>(c, shards);
  cudaDeviceSynchronize();
  const auto before = device_memory::statistics(0);
  for (int i = 0; i < 3; ++i) {
    for (const std::size_t limit : kLimits) run_local<GpuPlace>(c, shards, within(limit));
  }
  // Nor do failures keep any, though their messages on the host are kept.
  RingRun run;
  run.options.deadline = std::chrono::milliseconds(400);
  const auto errors = errors_of(c, shards, run, by_host(4, {{LocalFault::Kind::lose, 1, -1, 1}}));
  EXPECT_NE(errors[0], "");
  cudaDeviceSynchronize();
  EXPECT_EQ(device_memory::statistics(0).used_bytes, before.used_bytes);
}

}  // namespace
}  // namespace longspan::testing
