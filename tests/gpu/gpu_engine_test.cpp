// What the GPU engine promises besides results: one launch, no allocation, graphs, streams, bits, and errors that say
// what to do. The host part of each runs everywhere; the rest skips aloud without a GPU.
#include <cstring>
#include <memory>
#include <thread>

#include "gpu/device_case.h"
#include "longspan/error.h"
#include "longspan/memory.h"

namespace longspan::testing {
namespace {

const Pattern kGroups = Pattern::dilated({64, 128}, {1, 2});
const Pattern kMixed = Pattern::longnet({64, 256}, {1, 3});

Case small(const Pattern& pattern = kGroups, DType dtype = DType::bf16) {
  return Case(pattern, {}, {1, 256, 4, 4, 64}, dtype);
}

class Stream {
 public:
  Stream() { cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking); }
  ~Stream() { cudaStreamDestroy(handle_); }
  cudaStream_t get() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

/// Captures what `body` puts on a stream.
template <class Body>
cudaGraph_t capture(cudaStream_t stream, Body&& body) {
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  body();
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  return graph;
}

int kernels_in(cudaGraph_t graph) {
  std::size_t count = 0;
  cudaGraphGetNodes(graph, nullptr, &count);
  std::vector<cudaGraphNode_t> nodes(count);
  cudaGraphGetNodes(graph, nodes.data(), &count);
  int kernels = 0;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    cudaGraphNodeGetType(node, &type);
    kernels += type == cudaGraphNodeTypeKernel;
  }
  return kernels;
}

/// Workspace of the caller's own, for both passes.
struct OwnWorkspace {
  OwnWorkspace(const Attention& attention, const Problem& problem) {
    const auto plan = attention.plan(problem);
    size = std::max(plan->workspace_bytes(Pass::forward), plan->workspace_bytes(Pass::backward));
    buffer = DeviceBuffer(size, 0xA5);
  }
  void lend(Call& call) const {
    call.workspace = buffer.data();
    call.workspace_size = size;
  }
  std::size_t size = 0;
  DeviceBuffer buffer;
};

/// What both 16-bit kernels promise.
class GpuKernels : public ::testing::TestWithParam<const char*> {
 protected:
  static Options with_kernel() {
    Options options;
    options.kernel = GetParam();
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Each, GpuKernels, ::testing::Values("", "cuda-mma"),
                         [](const auto& test) { return std::string(*test.param ? "portable" : "chosen"); });

TEST_P(GpuKernels, ForwardIsOneLaunchAndGraphsReplay) {
  LONGSPAN_NEEDS_GPU();
  for (const Pattern& pattern : {Pattern::dense(), kGroups, kMixed}) {
    const Case c = small(pattern);
    const Attention attention(pattern, with_kernel());
    DeviceCase eager(c), replayed(c);
    eager.forward(attention, eager.call());
    eager.backward(attention, eager.call());
    const Results& want = eager.download();
    const Stream stream;
    const OwnWorkspace workspace(attention, replayed.problem());
    Call call = replayed.call();
    call.stream = stream.get();
    workspace.lend(call);
    cudaGraph_t forward = capture(stream.get(), [&] { replayed.forward(attention, call); });
    EXPECT_EQ(kernels_in(forward), 1) << pattern.to_string();
    cudaGraph_t backward = capture(stream.get(), [&] { replayed.backward(attention, call); });
    EXPECT_LE(kernels_in(backward), 3) << pattern.to_string();
    for (cudaGraph_t graph : {forward, backward}) {
      cudaGraphExec_t executable = nullptr;
      expect_success(cudaGraphInstantiate(&executable, graph, 0));
      for (int i = 0; i < 3; ++i) expect_success(cudaGraphLaunch(executable, stream.get()));
      expect_success(cudaStreamSynchronize(stream.get()));
      cudaGraphExecDestroy(executable);
      cudaGraphDestroy(graph);
    }
    const Results& got = replayed.download();
    EXPECT_EQ(got.out, want.out);
    EXPECT_EQ(got.lse, want.lse);
    EXPECT_EQ(got.dk, want.dk);
  }
}

TEST(GpuEngine, CaptureWithoutWorkspaceIsRefused) {
  LONGSPAN_NEEDS_GPU();
  const Case c = small(kMixed);
  const Attention attention(kMixed, {});
  DeviceCase device(c);
  const Stream stream;
  Call call = device.call();
  call.stream = stream.get();
  cudaGraph_t graph = capture(stream.get(), [&] { EXPECT_THROW(device.forward(attention, call), InvalidArgument); });
  cudaGraphDestroy(graph);
}

TEST(GpuEngine, CaptureWithLengthsOnTheHostIsRefused) {
  LONGSPAN_NEEDS_GPU();
  Case c = small();
  c.lengths = {100};
  const Attention attention(kGroups, {});
  DeviceCase device(c);
  const OwnWorkspace workspace(attention, device.problem());
  const Stream stream;
  Call call = device.call();
  call.lengths = c.call().lengths;
  call.stream = stream.get();
  workspace.lend(call);
  cudaGraph_t graph = capture(stream.get(), [&] {
    for (const bool forward : {true, false}) {
      try {
        if (forward) device.forward(attention, call);
        else device.backward(attention, call);
        FAIL() << "a graph would read lengths where they no longer are";
      } catch (const InvalidArgument& error) {
        EXPECT_EQ(error.argument(), "lengths");
      }
    }
  });
  cudaGraphDestroy(graph);
}

/// Lengths on the host: one number for all entries, backwards, of 32 bits, and changed as soon as the call returns.
TEST(GpuEngine, LengthsOnTheHostOfAnyStride) {
  LONGSPAN_NEEDS_GPU();
  const Attention attention(kGroups, {});
  for (const std::int64_t stride : {0, -1, 2}) {
    Case c(kGroups, {}, {300, 64, 2, 2, 8}, DType::bf16);  // more entries than one copy holds
    void* memory = nullptr;
    expect_success(cudaMallocHost(&memory, 600 * sizeof(std::int32_t)));
    std::int32_t* const pinned = static_cast<std::int32_t*>(memory);
    for (std::int32_t i = 0; i < 600; ++i) pinned[i] = i * 7 % 65;
    const std::int32_t* const first = pinned + (stride < 0 ? 299 : 0);
    for (std::int64_t entry = 0; entry < 300; ++entry) c.lengths.push_back(first[entry * stride]);
    DeviceCase want(c), got(c);
    want.forward(attention, want.call());
    Call call = got.call();
    call.lengths = ConstTensorView::per_batch(first, DType::i32, 300);
    call.lengths.strides[0] = stride;
    got.forward(attention, call);
    std::fill(pinned, pinned + 600, 0);
    EXPECT_EQ(got.download().out, want.download().out) << "stride " << stride;
    cudaFreeHost(pinned);
  }
}

/// Ranges without rows change nothing, even where they fall into launches of their own (12 branches: one range each).
TEST(GpuEngine, EmptyRangesChangeNothing) {
  LONGSPAN_NEEDS_GPU();
  Options options;
  options.deterministic = true;
  const Pattern pattern =
      Pattern::longnet({64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64}, {2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14});
  const Attention attention(pattern, options);
  const auto run = [&](std::vector<RowRange> ranges) {
    const Case c(pattern, options, {1, 200, 2, 2, 64}, DType::bf16, Layout::bnhd, std::move(ranges));
    DeviceCase device(c);
    const OwnWorkspace workspace(attention, device.problem());
    Call call = device.call();
    workspace.lend(call);
    device.forward(attention, call);
    device.backward(attention, call);
    return device.download();
  };
  const Results want = run({{20, 150}});
  for (const std::vector<RowRange>& ranges :
       {std::vector<RowRange>{{20, 150}, {0, 0}}, std::vector<RowRange>{{0, 0}, {20, 150}, {199, 0}}}) {
    const Results got = run(ranges);
    EXPECT_EQ(got.out, want.out);
    EXPECT_EQ(got.dq, want.dq);
    EXPECT_EQ(got.dk, want.dk);
    EXPECT_EQ(got.dv, want.dv);
  }
}

TEST_P(GpuKernels, SteadyStateAllocatesNothing) {
  LONGSPAN_NEEDS_GPU();
  for (const Pattern& pattern : {kGroups, kMixed}) {
    const Case c = small(pattern);
    const Attention attention(pattern, with_kernel());
    DeviceCase device(c);
    const Call call = device.call();
    const auto step = [&] {
      device.forward(attention, call);
      device.backward(attention, call);
      expect_success(cudaDeviceSynchronize());
    };
    step();
    const MemoryStatistics before = device_memory::statistics();
    const auto cache = plan_cache::statistics();
    for (int i = 0; i < 5; ++i) step();
    const MemoryStatistics after = device_memory::statistics();
    EXPECT_EQ(after.allocations, before.allocations);
    EXPECT_EQ(after.reserved_bytes, before.reserved_bytes);
    EXPECT_EQ(after.used_bytes, 0u);
    EXPECT_GT(after.peak_used_bytes, 0u);
    EXPECT_EQ(plan_cache::statistics().misses, cache.misses);
  }
}

TEST_P(GpuKernels, EightThreadsOnEightStreams) {
  LONGSPAN_NEEDS_GPU();
  const Case c = small(kMixed);
  Options options = with_kernel();
  options.deterministic = true;
  const Attention attention(kMixed, options);
  DeviceCase alone(c);
  alone.forward(attention, alone.call());
  alone.backward(attention, alone.call());
  const Results& want = alone.download();
  std::vector<Results> results(8);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] {
      DeviceCase device(c);
      const Stream stream;
      Call call = device.call();
      call.stream = stream.get();
      for (int repeat = 0; repeat < 10; ++repeat) {
        device.forward(attention, call);
        device.backward(attention, call);
      }
      cudaStreamSynchronize(stream.get());
      results[i] = device.download();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Results& got : results) {
    EXPECT_EQ(got.out, want.out);
    EXPECT_EQ(got.dq, want.dq);
    EXPECT_EQ(got.dv, want.dv);
  }
}

/// Blocks take items off counters that launches of one stream share: causal tiles, branches that wait for one another,
/// and lists of blocks, two items side by side. More streams than have counters, and a graph, whose replays use others.
TEST(GpuEngine, ManyStreamsAtOnceAndGraphsBetween) {
  LONGSPAN_NEEDS_GPU();
  constexpr std::size_t kStreams = 140;
  const std::vector<Stream> streams(kStreams);
  for (const Pattern& pattern : {Pattern::longnet({512, 2048}, {1, 2}), Pattern::dense(),
                                 Pattern::block_sparse(BlockPattern::local_window(300, 64))}) {
    Options options;
    options.causal = true;
    const Case c(pattern, options, {1, 2048, 32, 32, 8}, DType::bf16);
    const Attention attention(pattern, options);
    DeviceCase alone(c);
    alone.forward(attention, alone.call());
    const Results want = alone.download();
    std::vector<std::unique_ptr<DeviceCase>> cases;
    for (std::size_t i = 0; i < kStreams; ++i) cases.push_back(std::make_unique<DeviceCase>(c));
    const OwnWorkspace workspace(attention, cases[0]->problem());
    Call captured = cases[0]->call();
    captured.stream = streams[0].get();
    workspace.lend(captured);
    cudaGraph_t graph = capture(streams[0].get(), [&] { cases[0]->forward(attention, captured); });
    cudaGraphExec_t executable = nullptr;
    expect_success(cudaGraphInstantiate(&executable, graph, 0));
    for (int repeat = 0; repeat < 4; ++repeat) {
      for (const auto& device : cases) device->out.poison(), device->lse.poison();
      expect_success(cudaDeviceSynchronize());
      for (std::size_t i = 0; i < kStreams; ++i) {
        Call call = cases[i]->call();
        call.stream = streams[i].get();
        if (i == 0 && repeat % 2 == 1) expect_success(cudaGraphLaunch(executable, streams[i].get()));
        else cases[i]->forward(attention, call);
      }
      for (std::size_t i = 0; i < kStreams; ++i) {
        const Results& got = cases[i]->download();
        EXPECT_TRUE(got.out == want.out && got.lse == want.lse)
            << pattern.to_string() << ", stream " << i << ", repeat " << repeat;
      }
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
}

/// Bits of a row do not depend on the rows computed with it.
TEST_P(GpuKernels, ForwardBitsOfARowAreItsOwn) {
  LONGSPAN_NEEDS_GPU();
  for (const bool causal : {false, true}) {
    for (const Pattern& pattern : {Pattern::dense(), kGroups, kMixed}) {
      Options options = with_kernel();
      options.causal = causal;
      const Case whole(pattern, options, {1, 777, 4, 4, 64}, DType::bf16);
      Case part(pattern, options, {1, 777, 4, 4, 64}, DType::bf16, Layout::bnhd, {{333, 300}});
      part.k = whole.k;
      part.v = whole.v;
      for (std::int64_t row = 0; row < 300; ++row)
        for (std::int64_t head = 0; head < 4; ++head)
          for (std::int64_t d = 0; d < 64; ++d) part.q.set(0, row, head, d, whole.q.at(0, row + 333, head, d));
      const Attention attention(pattern, options);
      DeviceCase all(whole), some(part);
      all.forward(attention, all.call());
      some.forward(attention, some.call());
      const Results &a = all.download(), &b = some.download();
      bool equal = true;
      b.out.for_each([&](auto e, auto row, auto head, auto d) {
        equal = equal && b.out.at(e, row, head, d) == a.out.at(e, row + 333, head, d);
      });
      b.lse.for_each([&](auto e, auto row, auto head, auto) {
        equal = equal && b.lse.at(e, row, head) == a.lse.at(e, row + 333, head);
      });
      EXPECT_TRUE(equal) << pattern.to_string() << (causal ? " causal" : "");
    }
  }
}

/// Grouped queries, shared rows and several ranges: everything that adds to one row from several places.
TEST(GpuEngine, DeterministicGradientsRepeat) {
  LONGSPAN_NEEDS_GPU();
  Options options;
  options.deterministic = true;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      const Case c(kMixed, options, {1, 1200, 4, 2, head_dim}, dtype, Layout::bnhd, {{0, 700}, {700, 500}});
      const Attention attention(kMixed, options);
      DeviceCase first(c);
      first.forward(attention, first.call());
      first.backward(attention, first.call());
      first.download();
      for (int repeat = 0; repeat < 3; ++repeat) {
        DeviceCase again(c);
        again.forward(attention, again.call());
        again.backward(attention, again.call());
        again.download();
        EXPECT_EQ(first.results.dq, again.results.dq) << name_of(dtype) << " " << head_dim;
        EXPECT_EQ(first.results.dk, again.results.dk) << name_of(dtype) << " " << head_dim;
        EXPECT_EQ(first.results.dv, again.results.dv) << name_of(dtype) << " " << head_dim;
      }
    }
  }
}

TEST(GpuEngine, SeedFromTheDevice) {
  LONGSPAN_NEEDS_GPU();
  Options options;
  options.dropout = 0.4;
  Case c(kGroups, options, {1, 256, 4, 4, 64}, DType::bf16);
  c.seed = 99;
  const Attention attention(kGroups, options);
  DeviceCase by_value(c), by_pointer(c);
  by_value.forward(attention, by_value.call());
  const DeviceBuffer seed(8);
  expect_success(cudaMemcpy(seed.data(), &c.seed, 8, cudaMemcpyHostToDevice));
  settle();
  Call call = by_pointer.call();
  call.dropout_seed = 1;
  call.dropout_seed_pointer = reinterpret_cast<const std::uint64_t*>(seed.data());
  by_pointer.forward(attention, call);
  EXPECT_EQ(by_value.download().out, by_pointer.download().out);
}

/// A captured graph reads the seed where it lies: new seeds need no new graph.
TEST(GpuEngine, GraphsReplayWithNewSeeds) {
  LONGSPAN_NEEDS_GPU();
  Options options;
  options.dropout = 0.4;
  Case c(kMixed, options, {1, 256, 4, 4, 64}, DType::bf16);
  const Attention attention(kMixed, options);
  DeviceCase replayed(c);
  const OwnWorkspace workspace(attention, replayed.problem());
  const DeviceBuffer seed(8);
  const Stream stream;
  Call call = replayed.call();
  call.stream = stream.get();
  call.dropout_seed_pointer = reinterpret_cast<const std::uint64_t*>(seed.data());
  workspace.lend(call);
  cudaGraph_t graph = capture(stream.get(), [&] {
    replayed.forward(attention, call);
    replayed.backward(attention, call);
  });
  cudaGraphExec_t executable = nullptr;
  expect_success(cudaGraphInstantiate(&executable, graph, 0));
  for (const std::uint64_t value : {std::uint64_t{5}, std::uint64_t{0x1234567890abcdef}}) {
    c.seed = value;
    DeviceCase eager(c);
    eager.forward(attention, eager.call());
    eager.backward(attention, eager.call());
    expect_success(cudaMemcpy(seed.data(), &value, 8, cudaMemcpyHostToDevice));
    settle();
    expect_success(cudaGraphLaunch(executable, stream.get()));
    expect_success(cudaStreamSynchronize(stream.get()));
    const Results &want = eager.download(), &got = replayed.download();
    EXPECT_EQ(got.out, want.out);
    EXPECT_EQ(got.lse, want.lse);
    // Gradients may differ in their last bits here, so another seed's would be far off.
    double difference = 0, size = 0;
    want.dv.for_each([&](auto e, auto row, auto head, auto d) {
      difference += std::pow(got.dv.at(e, row, head, d) - want.dv.at(e, row, head, d), 2);
      size += std::pow(want.dv.at(e, row, head, d), 2);
    });
    EXPECT_LT(difference, 1e-4 * size);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST(GpuEngine, EmptyProblems) {
  LONGSPAN_NEEDS_GPU();
  for (const Shape& shape : {Shape{0, 16, 2, 2, 64}, Shape{1, 0, 2, 2, 64}}) {
    const Case c(Pattern::dense(), {}, shape, DType::bf16);
    DeviceCase device(c);
    const Attention attention(c.pattern, {});
    EXPECT_NO_THROW(device.forward(attention, device.call()));
    EXPECT_NO_THROW(device.backward(attention, device.call()));
    expect_success(cudaDeviceSynchronize());
  }
}

TEST(GpuErrors, EarlierErrorsAreReportedAsSuchAndNotSwallowed) {
  LONGSPAN_NEEDS_GPU();
  for (const Pattern& pattern : {kGroups, kMixed}) {
    const Case c = small(pattern);
    const Attention attention(pattern, {});
    DeviceCase device(c);
    const auto expect_refused = [&](const auto& pass) {
      EXPECT_EQ(cudaSetDevice(1 << 20), cudaErrorInvalidDevice);  // nobody looks at it
      try {
        pass();
        ADD_FAILURE() << "an error of earlier work was swallowed";
      } catch (const CudaError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("an earlier CUDA call of this thread failed"), std::string::npos) << text;
        EXPECT_NE(text.find("cudaErrorInvalidDevice"), std::string::npos) << text;
      }
      EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice) << "it is the caller's to look at";
      EXPECT_NO_THROW(pass());
    };
    expect_refused([&] { device.forward(attention, device.call()); });
    expect_refused([&] { device.backward(attention, device.call()); });
  }
}

TEST(GpuErrors, HostPointersAreNamed) {
  LONGSPAN_NEEDS_GPU();
  const Case c = small();
  DeviceCase device(c);
  ConstTensorView host = c.k.view();
  host.device = kGpu;
  try {
    Attention(kGroups, {}).forward(device.q.view(), host, device.v.view(), device.out.output(), device.lse.output());
    FAIL() << "host memory was taken for a CUDA tensor";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), "k");
    EXPECT_NE(std::string(error.what()).find("host memory"), std::string::npos) << error.what();
  }
}

TEST(GpuErrors, HostMemoryForSeedOrWorkspaceIsNamed) {
  LONGSPAN_NEEDS_GPU();
  Options options;
  options.dropout = 0.5;
  const Case c(kMixed, options, {1, 256, 4, 4, 64}, DType::bf16);
  const Attention attention(kMixed, options);
  DeviceCase device(c);
  const auto refused = [&](const Call& call) -> std::string {
    try {
      device.forward(attention, call);
    } catch (const InvalidArgument& error) {
      return error.argument();
    }
    return "nothing";
  };
  const std::uint64_t seed = 1;
  Call call = device.call();
  call.dropout_seed_pointer = &seed;
  EXPECT_EQ(refused(call), "dropout_seed_pointer");
  call = device.call();
  std::vector<std::byte> memory;
  call.allocate = [&](std::size_t bytes) -> void* {
    memory.resize(bytes + 64);
    return memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
  };
  EXPECT_EQ(refused(call), "allocate");
}

TEST(GpuErrors, LimitGivesOutOfMemoryAndLeavesTheLibraryUsable) {
  LONGSPAN_NEEDS_GPU();
  const Case c = small(kMixed);
  const Attention attention(kMixed, {});
  DeviceCase device(c);
  device_memory::set_limit_bytes(0, 1);
  EXPECT_THROW(device.forward(attention, device.call()), OutOfMemory);
  device_memory::set_limit_bytes(0, 0);
  EXPECT_NO_THROW(device.forward(attention, device.call()));
  expect_success(cudaDeviceSynchronize());
  EXPECT_EQ(device_memory::statistics().used_bytes, 0u);
}

TEST(GpuErrors, OutOfMemoryIsTyped) {
  LONGSPAN_NEEDS_GPU();
  EXPECT_THROW(
      {
        Problem problem;
        problem.device = kGpu;
        problem.dtype = DType::bf16;
        problem.tokens = problem.query_rows = std::int64_t{1} << 29;
        problem.heads = problem.kv_heads = 16;
        problem.batch = 64;
        const Attention attention(kMixed, {});
        const auto bytes = attention.plan(problem)->workspace_bytes(Pass::forward);
        ASSERT_GT(bytes, cuda::devices()[0].memory_bytes);
        ConstTensorView q = ConstTensorView::bnhd(nullptr, DType::bf16, 64, problem.tokens, 16, 64, kGpu);
        const DeviceBuffer memory(1024);
        q.data = memory.data();
        TensorView out = TensorView::bnhd(reinterpret_cast<void*>(std::uintptr_t{1} << 60), DType::bf16, 64,
                                          problem.tokens, 16, 64, kGpu);
        attention.forward(q, q, q, out);
      },
      OutOfMemory);
  const Case c = small(kMixed);
  DeviceCase device(c);
  EXPECT_NO_THROW(device.forward(Attention(kMixed, {}), device.call()));
  expect_success(cudaDeviceSynchronize());
}

/// What is refused is refused by name, GPU or not.
TEST(GpuErrors, RefusalsSayWhy) {
  Problem problem;
  problem.device = kGpu;
  problem.dtype = DType::bf16;
  problem.tokens = problem.query_rows = 64;
  problem.head_dim = 100;
  const auto why = [&](const Pattern& pattern = Pattern::dense()) {
    return Attention(pattern, {}).plan(problem)->why_no_kernel(Pass::forward);
  };
  if (cuda::devices().empty()) {
    EXPECT_NE(why().find(cuda::why_none()), std::string::npos) << why();
    return;
  }
  EXPECT_NE(why().find("use 104 with zero columns"), std::string::npos) << why();
  problem.head_dim = 64;
  EXPECT_EQ(why(), "");
  problem.device.index = 1000;
  EXPECT_NE(why().find("cuda:1000"), std::string::npos) << why();
  problem.device.index = 0;
  problem.tokens = problem.query_rows = std::int64_t{1} << 24;
  const Pattern many = Pattern::block_sparse(BlockPattern::adaptive(0.1, 16));
  EXPECT_NE(why(many).find("use larger blocks"), std::string::npos) << why(many);
}

TEST(GpuErrors, CpuProblemsDoNotTouchTheGpu) {
  Problem problem;
  problem.tokens = problem.query_rows = 64;
  const Plan plan(Pattern::dense(), {}, problem);
  for (const Kernel* kernel : cuda::kernels()) {
    const Verdict verdict = kernel->can_run(plan, Pass::forward);
    EXPECT_FALSE(verdict.ok);
    EXPECT_NE(verdict.reason.find("tensors are on cpu"), std::string::npos) << verdict.reason;
  }
}

}  // namespace
}  // namespace longspan::testing
