// Block-sparse attention on every GPU kernel, and what only a GPU has: split lists, graphs, lists that stay there.
#include "gpu/device_case.h"
#include "kernels/cuda/adaptive.h"
#include "kernels/cuda/call.h"
#include "kernels/cuda/mask_lists.h"
#include "kernels/cuda/prepare.h"
#include "longspan/memory.h"
#include "support/block_sparse_suite.h"

namespace longspan::testing {
namespace {

struct GpuEngine {
  static constexpr std::int64_t kTokens = 400, kHeadDims[2] = {64, 128};
  static std::string missing() { return cuda::devices().empty() ? "no GPU: " + cuda::why_none() : std::string(); }
  static void expect_matches(const Case& c) { expect_gpu_matches(c); }
  static Results run(const Case& c, bool gradients = true) {
    DeviceCase device(c);
    const Attention attention(c.pattern, c.options);
    Call call = device.call();
    call.lengths = c.call().lengths;  // on the host, where random blocks are drawn
    device.forward(attention, call);
    if (gradients) device.backward(attention, call);
    return device.download();
  }
  static BlockMask adaptive(const Case& c) {
    const DeviceCase device(c);
    return adaptive_mask(Attention(c.pattern, c.options), device.q.view(), device.k.view(), device.call());
  }
  static AttentionBlocks blocks(const Case& c, int size) {
    const DeviceCase device(c);
    return attention_blocks(Attention(c.pattern, c.options), device.q.view(), device.k.view(), device.call(), size);
  }
  static Tensor received(const Case& c) {
    const DeviceCase device(c);
    Tensor host = Tensor::lse(DType::f32, c.shape.batch, c.shape.tokens, c.shape.heads);
    const DeviceTensor received(std::as_const(host).view());
    received.poison();
    attention_received(Attention(c.pattern, c.options), device.q.view(), device.k.view(), received.output(),
                       device.call());
    cudaDeviceSynchronize();
    received.download(host);
    return host;
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Gpu, BlockSparse, GpuEngine);

/// Head dims and types of every instantiation, aligned and not, over blocks smaller and larger than tiles.
TEST(GpuBlockSparse, EveryInstantiation) {
  LONGSPAN_NEEDS_GPU();
  std::mt19937 engine(5);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t head_dim : {40, 64, 96, 128, 256}) {
      for (const int b : {16, 32, 64, 128}) {
        Options options = causal_if(engine() % 2);
        options.deterministic = engine() % 4 == 0;
        options.allow_tf32 = engine() % 3 == 0;
        const std::int64_t tokens = 5 * 64 + 21, blocks = (tokens + b - 1) / b, heads = 2;
        const Pattern pattern = Pattern::block_sparse(random_mask(engine, b, heads, blocks, 2));
        expect_gpu_matches(Case(pattern, options, {1, tokens, heads, heads, head_dim}, dtype,
                                engine() % 3 ? Layout::bnhd : Layout::padded));
      }
    }
  }
}

/// A key block that all queries see, among blocks that few see: its list is several items.
TEST(GpuBlockSparse, LongColumnsAreSplit) {
  LONGSPAN_NEEDS_GPU();
  for (const bool causal : {false, true}) {
    for (const int b : {64, 128}) {
      const Case c(Pattern::block_sparse(BlockPattern::global_local(b, b, b)), causal_if(causal), {1, 5000, 1, 1, 64},
                   DType::bf16);
      expect_gpu_matches(c);
      Case same = c;
      same.options.deterministic = true;
      const Results once = GpuEngine::run(same), again = GpuEngine::run(same);
      EXPECT_TRUE(same_bits(once.dk, again.dk) && same_bits(once.dq, again.dq) && same_bits(once.dv, again.dv));
    }
  }
  Case hot(Pattern::block_sparse(BlockPattern::adaptive(0.05, 64)), {}, {1, 5000, 1, 1, 64}, DType::bf16);
  hot.q.for_each([&](auto e, auto row, auto head, auto column) {
    hot.q.set(e, row, head, column, hot.q.at(e, row, head, column) + 1.0);
  });
  for (std::int64_t row = 640; row < 704; ++row) {  // every query looks at this block
    for (std::int64_t column = 0; column < 64; ++column) hot.k.set(0, row, 0, column, 0.05);
  }
  const Results got = GpuEngine::run(hot);
  hot.pattern = Pattern::block_sparse(GpuEngine::adaptive(hot));
  const reference::Expectation want = hot.expected();
  for (const auto& [tensor, expected] :
       {std::pair{&got.out, &want.out}, {&got.dq, &want.dq}, {&got.dk, &want.dk}, {&got.dv, &want.dv}}) {
    const auto comparison = reference::compare(tensor->view(), *expected);
    EXPECT_TRUE(comparison.ok()) << comparison.worst;
  }
}

/// Captured before anything else has run it, replayed after inputs changed and the pattern was forgotten.
TEST(GpuBlockSparse, GraphsReplay) {
  LONGSPAN_NEEDS_GPU();
  for (const BlockPattern& blocks : {BlockPattern::bigbird(64, 96, 0.1, 3, 32), BlockPattern::adaptive(0.2, 32)}) {
    Case c(Pattern::block_sparse(blocks), {}, {1, 700, 2, 2, 64}, DType::bf16);
    DeviceCase device(c);
    cudaStream_t stream = nullptr;
    cudaStreamCreate(&stream);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    DeviceBuffer space;
    {
      const Attention attention(c.pattern, c.options);
      Call call = device.call();
      call.stream = stream;
      const auto plan = attention.plan(device.problem());
      call.workspace_size = std::max(plan->workspace_bytes(Pass::forward), plan->workspace_bytes(Pass::backward));
      space = DeviceBuffer(call.workspace_size);
      call.workspace = space.data();
      expect_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
      device.forward(attention, call);
      device.backward(attention, call);
      expect_success(cudaStreamEndCapture(stream, &graph));
    }
    plan_cache::clear();
    expect_success(cudaGraphInstantiate(&replay, graph, 0));
    for (int turn = 0; turn < 2; ++turn) {
      for (const DeviceTensor* output : {&device.out, &device.lse, &device.dq, &device.dk, &device.dv})
        output->poison();
      c.q.fill_random(100u + static_cast<unsigned>(turn));  // other rows, so other blocks are chosen
      c.k.fill_random(200u + static_cast<unsigned>(turn));
      device.q.upload(c.q);
      device.k.upload(c.k);
      expect_success(cudaGraphLaunch(replay, stream));
      Case fixed = c;
      if (blocks.adaptive_density() > 0) fixed.pattern = Pattern::block_sparse(GpuEngine::adaptive(c));
      const reference::Expectation want = fixed.expected();
      const Results& got = device.download();
      for (const auto& [tensor, expected] :
           {std::pair{&got.out, &want.out}, {&got.dq, &want.dq}, {&got.dk, &want.dk}, {&got.dv, &want.dv}}) {
        const auto comparison = reference::compare(tensor->view(), *expected);
        EXPECT_TRUE(comparison.ok()) << blocks.to_string() << comparison.worst;
      }
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

/// Two adaptive branches and nothing before them: their memory begins with the workspace and ends in it.
TEST(GpuBlockSparse, AdaptiveBranchesStayInTheWorkspace) {
  const Pattern pattern = Pattern::dilated({kWholeSequence, kWholeSequence}, {1, 1})
                              .with_mask(0, BlockPattern::adaptive(0.1, 16))
                              .with_mask(1, BlockPattern::adaptive(0.3, 16));
  Problem problem;
  problem.device = kGpu;
  problem.tokens = problem.query_rows = 400;
  problem.heads = problem.kv_heads = 2;
  for (const bool lengths : {false, true}) {
    problem.has_lengths = lengths;
    const Plan plan(pattern, {}, problem);
    std::vector<std::byte> memory(cuda::layout(plan, Pass::forward, false).total);
    const cuda::Workspace space = cuda::layout(plan, Pass::forward, false, memory.data());
    const auto begin = static_cast<std::size_t>(space.adaptive - memory.data());
    std::size_t end = begin;
    for (const BranchPlan& branch : plan.branches())
      end += cuda::AdaptivePlaces(cuda::adaptive_shape(plan, branch)).total;
    EXPECT_EQ(begin, lengths ? 256u : 0u);
    EXPECT_EQ(space.total, end);
  }
}

/// Blocks smaller than a tile: rows without keys beside rows that see NaN are zeros.
TEST(GpuBlockSparse, NaNReachesNoRowWithoutKeys) {
  LONGSPAN_NEEDS_GPU();
  constexpr std::int64_t kBlock = 16, kBlocks = 12, kEmpty = 1;
  std::vector<std::vector<std::int32_t>> rows(kBlocks, {0, 3, 7});
  for (std::int64_t row = kEmpty; row < kBlocks; row += 4) rows[static_cast<std::size_t>(row)] = {};
  const Pattern pattern = Pattern::block_sparse(BlockMask::from_rows(kBlock, 1, kBlocks, rows));
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      for (const Layout layout : {Layout::bnhd, Layout::padded}) {
        Case c(pattern, {}, {1, kBlock * kBlocks, 2, 2, head_dim}, dtype, layout);
        for (std::int64_t row = 3 * kBlock; row < 4 * kBlock; ++row) {
          for (std::int64_t head = 0; head < 2; ++head) c.v.set(0, row, head, 5, std::nan(""));
        }
        for (const std::string& kernel : gpu_kernels_for(c, false)) {
          Options options;
          options.kernel = kernel;
          DeviceCase device(c);
          device.forward(Attention(pattern, options), device.call());
          const Results& got = device.download();
          got.out.for_each([&](auto entry, auto row, auto head, auto column) {
            if (row / kBlock % 4 != kEmpty) return;
            ASSERT_EQ(got.out.at(entry, row, head, column), 0) << kernel << " row " << row << " column " << column;
            ASSERT_EQ(got.lse.at(entry, row, head), -INFINITY) << kernel << " row " << row;
          });
        }
      }
    }
  }
}

/// What no kernel computes in float64 is inspected in float32, as on the CPU.
TEST(GpuBlockSparse, ReceivedOfFloat64) {
  LONGSPAN_NEEDS_GPU();
  for (const Pattern& pattern : {Pattern::dense(), Pattern::block_sparse(BlockPattern::bigbird(16, 48, 0.2, 3, 16))}) {
    const Case narrow(pattern, {}, {2, 110, 4, 2, 16});
    Case wide(pattern, {}, narrow.shape, DType::f64);
    wide.q.for_each([&](auto... at) { wide.q.set(at..., narrow.q.at(at...)); });
    wide.k.for_each([&](auto... at) { wide.k.set(at..., narrow.k.at(at...)); });
    const Tensor want = GpuEngine::received(narrow), got = GpuEngine::received(wide);
    want.for_each([&](auto... at) { ASSERT_NEAR(got.at(at...), want.at(at...), 1e-4); });
  }
}

/// Random blocks of entries whose lengths differ: the plan asks for as much workspace as the call's own masks need.
TEST(GpuBlockSparse, WorkspaceOfThePlanIsEnough) {
  const auto with_lengths = [](bool given) {
    Problem problem;
    problem.device = kGpu;
    problem.batch = 2;
    problem.tokens = problem.query_rows = 8192;
    problem.has_lengths = given;
    return problem;
  };
  const Pattern pattern = Pattern::block_sparse(BlockPattern::random(0.3, 1, 64));
  // One entry's queries all see its first block.
  std::vector<std::vector<std::int32_t>> rows(2 * 128);
  for (std::size_t row = 0; row < 128; ++row) rows[row] = {0};
  const Plan plan(pattern, {}, with_lengths(true));
  const Plan call = plan.with_mask(0, BlockMask::from_rows(64, 2, 128, rows));
  EXPECT_TRUE(cuda::splits_lists(Plan(pattern, {}, with_lengths(false)).with_mask(0, *call.branches()[0].mask)));
  for (const bool matrix : {false, true})
    EXPECT_GE(cuda::layout(plan, Pass::backward, matrix).total, cuda::layout(call, Pass::backward, matrix).total);
}

/// After the first calls nothing is made, copied or taken from the driver.
TEST(GpuBlockSparse, SteadyStateMakesNothing) {
  LONGSPAN_NEEDS_GPU();
  for (const BlockPattern& blocks : {BlockPattern::bigbird(64, 96, 0.1, 3, 32), BlockPattern::adaptive(0.2, 32)}) {
    const Case c(Pattern::block_sparse(blocks), {}, {1, 700, 2, 2, 64}, DType::bf16);
    const DeviceCase device(c);
    const Attention attention(c.pattern, c.options);
    plan_cache::clear();  // else an earlier test may have left the lists of this mask
    const std::uint64_t before = cuda::lists_uploaded();
    std::uint64_t allocations = 0, uploads = 0;
    for (int step = 0; step < 20; ++step) {
      device.forward(attention, device.call());
      device.backward(attention, device.call());
      cudaDeviceSynchronize();
      if (step == 2) allocations = device_memory::statistics(0).allocations, uploads = cuda::lists_uploaded();
    }
    EXPECT_EQ(device_memory::statistics(0).allocations, allocations);
    EXPECT_EQ(cuda::lists_uploaded(), uploads);
    EXPECT_EQ(uploads > before, blocks.adaptive_density() == 0);
    const BlockMask mask = *attention.plan(device.problem())->branches()[0].mask, copy = mask;
    const cuda::ListShape shape{64};
    EXPECT_EQ(cuda::lists_of(mask, shape, 0, false).places, cuda::lists_of(copy, shape, 0, false).places);
  }
}

TEST(GpuBlockSparse, RefusesAdaptiveMasksOfMoreEntriesThanAGridHolds) {
  LONGSPAN_NEEDS_GPU();
  const auto verdict = [](std::int64_t batch) {
    Problem problem;
    problem.device = kGpu;
    problem.batch = batch;
    problem.tokens = problem.query_rows = 64;
    return cuda::fits(Plan(Pattern::block_sparse(BlockPattern::adaptive(0.5, 16)), {}, problem));
  };
  EXPECT_TRUE(verdict(65535).ok);
  EXPECT_NE(verdict(65536).reason.find("up to 65535 batch entries"), std::string::npos);
}

TEST(GpuBlockSparse, RefusesRandomBlocksWithLengthsOnTheDevice) {
  LONGSPAN_NEEDS_GPU();
  Case c(Pattern::block_sparse(BlockPattern::random(0.3, 1, 16)), {}, {2, 100, 2, 2, 16});
  c.lengths = {100, 60};
  const DeviceCase device(c);
  EXPECT_THROW(device.forward(Attention(c.pattern), device.call()), Unsupported);
}

}  // namespace
}  // namespace longspan::testing
