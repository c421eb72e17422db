// What the Hopper backward promises besides matching the reference on small problems (which gpu_matches_reference_test
// checks for every kernel): long strands and ragged ends, errors no larger than the portable kernel's, bits that
// repeat, NaN that stays where it is, workspace that suffices whatever the query ranges.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>

#include "gpu/hopper_case.h"
#include "kernels/cuda/prepare.h"
#include "kernels/hopper/backward_launch.h"
#include "kernels/hopper/hopper_backward.h"

namespace longspan::testing {
namespace {

/// Several tiles of keys and of queries, ends in the middle of both, two kinds of phases, several entries.
std::vector<Setting> settings() {
  const auto [groups, ragged, slide] = several_strands();
  std::vector<RowRange> many;  // more than one launch holds
  for (std::int64_t i = 0; i < 12; ++i) many.push_back({(i * 7 % 12) * 125, 30 + 5 * i});
  return {{"dense", Pattern::dense(), {1, 768, 2, 2, 64}, {}, {}},
          {"dense_wide", Pattern::dense(), {1, 650, 2, 2, 128}, {}, {}},
          {"dense_ragged", Pattern::dense(), {2, 701, 1, 1, 64}, {}, {}},
          {"dense_grouped", Pattern::dense(), {2, 350, 6, 2, 64}, {}, {}, true},
          {"grouped_wide", groups, {1, 1024, 6, 3, 128}, {}, {}, true},
          {"short_strands", Pattern::dilated({100, 512}, {1, 4}), {2, 1111, 4, 4, 64}, {}, {}},
          {"short_wide", Pattern::dilated({61, 122}, {1, 2}), {1, 1111, 4, 4, 128}, {}, {}},
          {"many_items", Pattern::dilated({33}, {1}), {1, 8192, 8, 8, 16}, {}, {}},
          {"many_items_wide", Pattern::dilated({33}, {1}), {1, 8192, 8, 8, 72}, {}, {}},
          {"groups", groups, {1, 2048, 3, 3, 64}, {}, {}},
          {"groups_wide", groups, {1, 2048, 3, 3, 128}, {}, {}},
          {"groups_ragged", ragged, {2, 2999, 2, 2, 64}, {}, {}},
          {"groups_d96", ragged, {1, 2999, 2, 2, 96}, {}, {}},
          {"dense_d256", Pattern::dense(), {1, 650, 2, 2, 256}, {}, {}},
          {"groups_d136", ragged, {1, 1999, 2, 2, 136}, {}, {}},
          {"groups_d192", groups, {2, 1024, 3, 3, 192}, {}, {}},
          {"grouped_d256", groups, {1, 700, 6, 3, 256}, {}, {}, true},
          {"slide_d160", slide, {1, 1201, 4, 2, 160}, {}, {}, true},
          {"groups_d72", ragged, {1, 1999, 2, 2, 72}, {}, {}},
          {"groups_d40", ragged, {1, 2999, 2, 2, 40}, {}, {}},
          {"groups_d8", groups, {1, 1000, 3, 3, 8}, {}, {}},
          {"lengths", groups, {3, 2048, 3, 3, 64}, {1777, 0, 300}, {}},
          {"ranges", ragged, {1, 2999, 2, 2, 64}, {}, {{700, 900}, {2900, 99}}, true},
          {"slide", slide, {1, 1501, 4, 4, 48}, {}, {}, true},
          {"slide_lengths", slide, {2, 1201, 4, 4, 64}, {1200, 77}, {}, true},
          {"slide_wide", slide, {1, 1201, 4, 2, 128}, {}, {}, true},
          {"slide_ranges", slide, {1, 2001, 4, 4, 48}, {}, {{1000, 1001}, {5, 300}}, true},
          {"slide_d40", slide, {2, 1501, 4, 4, 40}, {}, {}, true},
          {"slide_d72", slide, {2, 1201, 4, 2, 72}, {900, 1201}, {}, true},
          {"slide_d96", slide, {1, 1201, 4, 4, 96}, {}, {}, true},
          {"slide_d256", slide, {2, 1001, 4, 2, 256}, {1001, 640}, {}, true},
          {"slide_grouped_ranges", slide, {2, 2001, 6, 2, 64}, {2001, 1200}, {{1000, 1001}, {5, 300}}, true},
          {"slide_wide_ranges", slide, {2, 2001, 4, 4, 136}, {}, {{1000, 1001}, {5, 300}}, true},
          {"slide_many_ranges", slide, {1, 1501, 4, 4, 64}, {}, many, true},
          {"slide_short", Pattern::longnet({33, 100}, {1, 3}), {2, 1111, 4, 4, 64}, {}, {}, true},
          {"slide_uncovered", Pattern::longnet({300, 900}, {2, 3}), {2, 1501, 4, 4, 48}, {}, {}, true},
          {"slide_far", Pattern::longnet({64, 1300}, {1, 2048}), {1, 1201, 4, 4, 64}, {}, {}, true}};
}

using Parameters = std::tuple<Setting, DType, bool>;
class HopperBackward : public ::testing::TestWithParam<Parameters> {
 protected:
  Case make(double deviation = 1.0) const {
    const auto& [setting, dtype, causal] = GetParam();
    Case c(setting.pattern, with(causal), setting.shape, dtype, causal ? Layout::bhnd : Layout::bnhd, setting.ranges,
           deviation);
    c.lengths = setting.lengths;
    return c;
  }
  /// Whether to ask for deterministic gradients.
  std::vector<bool> modes() const {
    if (std::get<0>(GetParam()).shape.head_dim > 128) return {false};
    return {false, true};
  }
};

/// Beside the portable kernel from the same out and lse, and in its own company. Half of the cases have scores of a
/// standard deviation of 4 (2 of q and 2 of k), where few keys have all the weight.
TEST_P(HopperBackward, MatchesWithNoMoreErrorThanThePortableKernel) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  const auto& [setting, dtype, causal] = GetParam();
  const Case c = make(causal == (dtype == DType::bf16) ? 1.0 : 2.0);
  const reference::Expectation want = c.expected(true);
  DeviceCase portable(c);
  const Attention portable_attention(c.pattern, with(causal, false, "cuda-mma"));
  portable.forward(portable_attention, portable.call());
  portable.backward(portable_attention, portable.call());
  const Results& other = portable.download();
  for (const bool deterministic : modes()) {
    const Attention attention(c.pattern, with(causal, deterministic));
    DeviceCase alone(c), device(c);
    alone.forward(attention, alone.call());
    for (const DeviceCase* of : {&alone, &device})
      for (const DeviceTensor* gradient : {&of->dq, &of->dk, &of->dv}) gradient->poison();
    alone.backward(attention, alone.call());
    attention.backward(device.q.view(), device.k.view(), device.v.view(), portable.out.view(), portable.lse.view(),
                       device.dout.view(), device.dq.output(), device.dk.output(), device.dv.output(), device.call());
    const Results &own = alone.download(), &got = device.download();
    const auto check = [&](const char* name, const Tensor& in_company, const Tensor& actual, const Tensor& beside,
                           const reference::ExpectedTensor& expected) {
      const auto company = reference::compare(in_company.view(), expected);
      EXPECT_TRUE(company.ok()) << name << " " << company.worst << " " << company.rms_over_model;
      const auto ours = reference::compare(actual.view(), expected),
                 theirs = reference::compare(beside.view(), expected);
      EXPECT_LE(ours.over_tolerance, 1) << name << " " << ours.worst;
      EXPECT_LE(ours.rms_over_model, 1.1 * theirs.rms_over_model) << name;
    };
    check("dq", own.dq, got.dq, other.dq, want.dq);
    check("dk", own.dk, got.dk, other.dk, want.dk);
    check("dv", own.dv, got.dv, other.dv, want.dv);
  }
}

TEST_P(HopperBackward, Repeats) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  const auto& [setting, dtype, causal] = GetParam();
  if (dtype != DType::bf16) return;  // the same work
  const Case c = make();
  for (const bool deterministic : modes()) {
    const Attention attention(c.pattern, with(causal, deterministic));
    DeviceCase device(c);
    device.forward(attention, device.call());
    device.backward(attention, device.call());
    const Results first = device.download();
    for (int i = 0; i < 200; ++i) {
      for (const DeviceTensor* gradient : {&device.dq, &device.dk, &device.dv}) gradient->poison();
      device.backward(attention, device.call());
      expect_success(cudaDeviceSynchronize());
      if (i % 10 != 0) continue;
      device.dq.download(device.results.dq);
      device.dk.download(device.results.dk);
      device.dv.download(device.results.dv);
      if (deterministic) {
        ASSERT_EQ(device.results.dq, first.dq) << "repeat " << i;
      }
      if (deterministic || !setting.shares_keys) {
        ASSERT_EQ(device.results.dk, first.dk) << "repeat " << i;
        ASSERT_EQ(device.results.dv, first.dv) << "repeat " << i;
      }
    }
  }
}

std::string name_of_case(const ::testing::TestParamInfo<Parameters>& parameters) {
  const auto& [setting, dtype, causal] = parameters.param;
  return std::string(setting.name) + "_" + std::string(name_of(dtype)) + (causal ? "_causal" : "");
}

INSTANTIATE_TEST_SUITE_P(Hopper, HopperBackward,
                         ::testing::Combine(::testing::ValuesIn(settings()), ::testing::Values(DType::bf16, DType::f16),
                                            ::testing::Bool()),
                         name_of_case);

/// NaN in rows beyond `lengths`, or in one strand, reaches no other strand, although tiles end between strands, and
/// tiles of dq that branches share are added past a strand's end.
class HopperNaN : public ::testing::TestWithParam<std::tuple<bool, std::int64_t>> {};
TEST_P(HopperNaN, StaysInItsStrand) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  const auto [merges, head_dim] = GetParam();
  for (const bool deterministic : {false, true}) {
    if (deterministic && head_dim > 128) continue;
    const Pattern pattern = merges ? Pattern::longnet({200, 400}, {1, 2}) : Pattern::dilated({200, 400}, {1, 2});
    Case c(pattern, with(false, deterministic), {2, 1000, 2, 2, head_dim}, DType::bf16);
    c.lengths = {1000, 333};
    for (std::int64_t column = 0; column < head_dim; ++column) {
      for (std::int64_t head = 0; head < 2; ++head) {
        for (Tensor* tensor : {&c.q, &c.k, &c.v, &c.dout}) {
          for (std::int64_t row = 333; row < 1000; ++row) tensor->set(1, row, head, column, std::nan(""));
          for (std::int64_t row = 400; row < 600; ++row) tensor->set(0, row, head, column, std::nan(""));
        }
      }
    }
    DeviceCase device(c);
    const Attention attention(c.pattern, c.options);
    device.forward(attention, device.call());
    device.backward(attention, device.call());
    const Results& got = device.download();
    for (const Tensor* tensor : {&got.dq, &got.dk, &got.dv}) {
      tensor->for_each([&](auto entry, auto row, auto head, auto column) {
        // By groups head 0 has segments of 200 and head 1 those of 400, at odd rows; else both have both, head 0 at
        // even rows, and queries that see NaN hand it on to the keys of their segment of 200.
        const bool near = row >= 400 && row < 600, far = row >= 400 && row < 800;
        const bool reached =
            merges ? near || (far && (tensor != &got.dq || row % 2 == head)) : (head == 0 ? near : far && row % 2 == 1);
        ASSERT_EQ(std::isnan(tensor->at(entry, row, head, column)), entry == 0 && reached)
            << "entry " << entry << " row " << row << " head " << head << " of "
            << (tensor == &got.dq   ? "dq"
                : tensor == &got.dk ? "dk"
                                    : "dv");
      });
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Hopper, HopperNaN,
                         ::testing::Combine(::testing::Bool(), ::testing::Values<std::int64_t>(40, 64, 128, 256)),
                         [](const auto& parameters) {
                           return std::string(std::get<0>(parameters.param) ? "slide" : "groups") + "_d" +
                                  std::to_string(std::get<1>(parameters.param));
                         });

/// Scores far below 0 make weights of keys that do not exist overflow, if these are not masked.
TEST(HopperGradients, VeryNegativeScores) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  for (const std::int64_t head_dim : {64, 128, 256}) {
    Case c(Pattern::dense(), with(false), {1, 200, 2, 2, head_dim}, DType::bf16);
    c.q.for_each([&](auto entry, auto row, auto head, auto column) {
      c.q.set(entry, row, head, column, 6.0 + 0.1 * c.q.at(entry, row, head, column));
      c.k.set(entry, row, head, column, -6.0 + 0.1 * c.k.at(entry, row, head, column));
    });
    expect_gpu_matches(c);
  }
}

/// A gradient whose rows or entries repeat (strides of 0, as torch's sum gives) is computed too.
TEST(HopperGradients, ExpandedGradient) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  Case c(Pattern::dilated({128, 300}, {1, 2}), with(false), {1, 300, 2, 2, 64}, DType::bf16);
  c.dout.for_each([&](auto entry, auto row, auto head, auto column) {
    c.dout.set(entry, row, head, column, c.dout.at(entry, 0, head, column));
  });
  const reference::Expectation want = c.expected(true);
  DeviceCase device(c);
  const Attention attention(c.pattern, c.options);
  device.forward(attention, device.call());
  ConstTensorView expanded = device.dout.view();
  expanded.strides[1] = 0;
  CallReport report;
  const auto run = [&](const std::string& kernel) {
    Options options = c.options;
    options.kernel = kernel;
    Call call = device.call();
    call.report = &report;
    Attention(c.pattern, options)
        .backward(device.q.view(), device.k.view(), device.v.view(), device.out.view(), device.lse.view(), expanded,
                  device.dq.output(), device.dk.output(), device.dv.output(), call);
  };
  run("");
  EXPECT_EQ(report.kernel, "cuda-mma");
  EXPECT_THROW(run("hopper-wgmma"), Unsupported);
  const Results& got = device.download();
  for (const auto& [name, actual, expected] :
       {std::tuple{"dq", &got.dq, &want.dq}, {"dk", &got.dk, &want.dk}, {"dv", &got.dv, &want.dv}}) {
    const auto comparison = reference::compare(actual->view(), *expected);
    EXPECT_TRUE(comparison.ok()) << name << " " << comparison.worst;
  }
}

/// A training step in a graph: the same bits as outside.
TEST(HopperGradients, TrainingStepInAGraph) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  for (const Pattern& pattern : {Pattern::dilated({256, 600}, {1, 2}), Pattern::longnet({256, 600}, {1, 2})}) {
    const Case c(pattern, with(true, true), {2, 1000, 4, 2, 64}, DType::bf16);
    const Attention attention(c.pattern, c.options);
    DeviceCase eager(c), replayed(c);
    eager.forward(attention, eager.call());
    eager.backward(attention, eager.call());
    const Results& want = eager.download();
    const auto plan = attention.plan(replayed.problem());
    const std::size_t bytes = std::max(plan->workspace_bytes(Pass::forward), plan->workspace_bytes(Pass::backward));
    const DeviceBuffer workspace(bytes);
    Call call = replayed.call();
    call.workspace = workspace.data();
    call.workspace_size = bytes;
    cudaStream_t stream = nullptr;
    expect_success(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    call.stream = stream;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    expect_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    replayed.forward(attention, call);
    replayed.backward(attention, call);
    expect_success(cudaStreamEndCapture(stream, &graph));
    expect_success(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 5; ++i) expect_success(cudaGraphLaunch(executable, stream));
    expect_success(cudaStreamSynchronize(stream));
    const Results& got = replayed.download();
    EXPECT_EQ(got.out, want.out);
    EXPECT_EQ(got.dq, want.dq);
    EXPECT_EQ(got.dk, want.dk);
    EXPECT_EQ(got.dv, want.dv);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

/// Blocks that wait for one another go through many items here; a pair of tiles that is not handed on hangs.
TEST(HopperGradients, LongStrandsInOrder) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  const std::vector<std::tuple<Pattern, std::int64_t>> problems = {
      {Pattern::dense(), 64}, {Pattern::dense(), 128}, {Pattern::longnet({1024, 5792}, {1, 2}), 48}};
  for (const auto& [pattern, head_dim] : problems) {
    for (const bool causal : {false, true}) {
      const Case c(pattern, with(causal, true), {1, 8192, 8, 8, head_dim}, DType::bf16);
      const Attention attention(c.pattern, c.options);
      DeviceCase device(c);
      device.forward(attention, device.call());
      device.backward(attention, device.call());
      const Results first = device.download();
      for (int i = 0; i < 20; ++i) device.backward(attention, device.call());
      const Results& again = device.download();
      EXPECT_EQ(again.dq, first.dq) << head_dim << " " << causal;
      EXPECT_EQ(again.dk, first.dk) << head_dim << " " << causal;
      EXPECT_EQ(again.dv, first.dv) << head_dim << " " << causal;
    }
  }
}

/// What it refuses it refuses by name, and the portable kernel takes it.
TEST(HopperGradients, RefusalsSayWhy) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  const auto why = [](Problem problem, Options options = {}, const Pattern& pattern = Pattern::dense()) {
    const auto plan = Attention(pattern, options).plan(problem);
    const Verdict verdict = hopper::kKernel.can_run(*plan, Pass::backward);
    EXPECT_FALSE(verdict.ok);
    EXPECT_NE(plan->kernel_name(Pass::backward), "") << plan->why_no_kernel(Pass::backward);
    return verdict.reason;
  };
  const auto names = [](const std::string& reason, const char* words) {
    EXPECT_NE(reason.find(words), std::string::npos) << reason;
  };
  Options in_order;
  in_order.deterministic = true;
  names(why(problem_of(300, 4, 136), in_order), "deterministic gradients of head dims up to 128, here it is 136");
  Options options;
  options.detached_mix = true;
  names(why(problem_of(300, 4, 64), options, Pattern::parse("longnet 256/1{block=64 local_window(64)} 512/2")),
        "detached_mix with block masks");
  names(why(problem_of(1'048'576, 8, 64), {}, Pattern::dilated({16}, {1})), "4.0 times the rows of dq, 3 at most");
  names(why(problem_of(262'144, 8, 16), {}, Pattern::longnet({1, 2}, {1, 1})), "times the rows of dq, 3 at most");
  EXPECT_EQ(Attention(Pattern::dense(), {}).plan(problem_of(300, 4, 64))->kernel_name(Pass::backward), kHopper);
}

/// Needs no GPU: a tile of keys waits for as many as came to its tiles of queries before it, or deterministic calls
/// would hang. Wherever queries begin and end, for both groups, told of by one or by two tiles.
TEST(HopperWork, TurnsCountThoseBefore) {
  constexpr int kKeys = hopper::kKeyTileRows;
  const auto check = [&](int tile_queries, bool causal, int begin, int queries, int group, int step) {
    const int key_tiles = (begin + queries + kKeys - 1) / kKeys;
    std::map<int, int> came;
    for (int i = 0; i < key_tiles; ++i) {
      hopper::BackwardTask task{};
      task.key_tile = causal ? key_tiles - 1 - i : i;
      task.last_key_tile = key_tiles - 1;
      task.queries = queries;
      task.tiles = (queries + tile_queries - 1) / tile_queries;
      task.diagonal = task.key_tile * kKeys - begin;
      task.first_tile = causal ? std::max(0, task.diagonal) / tile_queries : 0;
      const int own = task.tiles_of(group, tile_queries);
      for (int tile = task.first_tile; tile < own; tile = task.told_end(tile, own, step)) {
        ASSERT_EQ(task.turn(task.told_end(tile, own, step) * tile_queries, causal), came[tile / step]++)
            << tile_queries << " " << causal << " " << begin << " " << queries << " " << task.key_tile << " " << step;
      }
    }
  };
  for (const int tile_queries : {64, 128})
    for (const bool causal : {false, true})
      for (const int begin : {0, 1, 63, 127, 128, 300})
        for (int queries = 1; queries < 900; queries += 7)
          for (const int group : {0, 1})
            for (const int step : {1, 2}) check(tile_queries, causal, begin, queries, group, step);
}

/// Needs no GPU: where strands of all branches are taken together, each item comes once, and tiles of keys of a strand
/// in the order in which deterministic calls add them; what one waits for has been taken before it. Tiles of all
/// strands take turns: none is ahead by two.
TEST(HopperWork, StrandsTogetherKeepTheirOrder) {
  std::mt19937 engine(6);
  const auto draw = [&](int least, int most) { return std::uniform_int_distribution<int>(least, most)(engine); };
  for (int trial = 0; trial < 200; ++trial) {
    hopper::BackwardLaunch launch{};
    cuda::Launch& base = launch.parts.base;
    base.schedule.descending = trial % 2;
    base.schedule.work_count = draw(1, 5);
    unsigned most_tiles = 0, items = 0;
    for (int w = 0; w < base.schedule.work_count; ++w) {
      const int segments = draw(1, 4), heads = draw(1, 3), tiles = trial % 4 < 2 ? 9 : draw(1, 9);
      const unsigned strands = static_cast<unsigned>(2 * segments * heads);
      base.schedule.work[w] = {.first_item = items,
                               .strands = strands,
                               .chunk = strands,
                               .branch = w,
                               .head_count = heads,
                               .segments = segments,
                               .tiles = tiles};
      items += base.schedule.work[w].strands * static_cast<unsigned>(tiles);
      most_tiles = std::max(most_tiles, static_cast<unsigned>(tiles));
      launch.together += base.schedule.work[w].strands;
    }
    std::map<std::tuple<int, int, int, int>, int> taken;
    unsigned found = 0;
    for (unsigned place = 0; place < launch.together * most_tiles; ++place) {
      const std::int64_t flat = launch.item_at(place);
      if (flat < 0) continue;
      ++found;
      const cuda::Item item = base.schedule.decode(static_cast<unsigned>(flat));
      int& before = taken[{item.branch, item.entry, item.head, item.segment}];
      ASSERT_EQ(item.tile, base.schedule.descending ? base.schedule.work[item.branch].tiles - 1 - before : before);
      ASSERT_EQ(before++, static_cast<int>(place / launch.together));
    }
    ASSERT_EQ(found, items);
    ASSERT_EQ(taken.size(), launch.together);
  }
}

/// Needs no GPU: one float32 accumulator for each gradient, two row values, and nothing else, however many branches
/// share rows; where they share none, sums of dq go by strands, rounded up.
TEST(HopperWork, OneAccumulatorForEachGradient) {
  const Pattern slide = Pattern::longnet({1024, 5792, 32768, 185363, 1048576}, {1, 2, 4, 8, 16}, PhaseRule::torchscale);
  for (const std::int64_t head_dim : {40, 48, 64, 96, 128, 136, 256}) {
    for (const bool deterministic : {false, true}) {
      if (deterministic && head_dim > 128) continue;
      Problem problem = problem_of(10'001, 16, head_dim);
      problem.batch = 2;
      problem.kv_heads = 8;
      Options options;
      options.deterministic = deterministic;
      const Plan plan(slide, options, problem);
      const std::size_t columns =
          static_cast<std::size_t>(head_dim <= 128 ? (head_dim + 15) / 16 * 16 : (head_dim + 63) / 64 * 64);
      const std::size_t dq = sizeof(float) * 2 * 16 * 10'001 * columns;
      const std::size_t keys = 2 * sizeof(float) * 2 * 8 * 10'001 * static_cast<std::size_t>(head_dim);
      const std::size_t rows = static_cast<std::size_t>(hopper::sum_rows(plan));
      const std::size_t counters = deterministic ? rows / hopper::kSumTileRows * 2 * sizeof(unsigned) : 0;
      const std::size_t marks = rows / hopper::kSumTileRows;
      const std::size_t bytes = hopper::backward_workspace_bytes(plan),
                        least = dq + keys + 2 * rows * sizeof(float) + marks;
      EXPECT_GE(bytes, least + counters) << head_dim;
      EXPECT_LE(bytes, least + counters + 4096) << head_dim;
      EXPECT_EQ(sizeof(float) * static_cast<std::size_t>(hopper::sum_count(plan)), dq) << head_dim;
      EXPECT_LT(rows, 2 * 2 * 16 * 10'001u);
    }
  }
  const Plan groups(Pattern::dilated({512, 1024}, {1, 2}), {}, problem_of(1024, 2, 64));
  EXPECT_EQ(hopper::sum_count(groups), (2 * 512 + 512) * 64);
}

/// Needs no GPU: strands have places of their own, within what the plan said, whatever the query ranges.
TEST(HopperWork, PlacesOfStrandsFitTheWorkspace) {
  std::mt19937 engine(5);
  const auto draw = [&](int least, int most) { return std::uniform_int_distribution<int>(least, most)(engine); };
  for (int trial = 0; trial < 500; ++trial) {
    const std::int64_t tokens = draw(1, 3000);
    std::vector<std::int64_t> segments, dilations;
    for (int b = draw(1, 4); b > 0; --b) {
      segments.push_back(draw(1, 1500));
      dilations.push_back(draw(1, 9));
    }
    const bool longnet = draw(0, 1) == 1;
    const Pattern pattern = longnet ? Pattern::longnet(segments, dilations) : Pattern::dilated(segments, dilations);
    std::vector<RowRange> ranges = {{0, tokens}};
    if (trial % 4 != 0) {
      ranges.clear();
      for (int r = draw(1, 6); r > 0; --r) {
        const int start = draw(0, static_cast<int>(tokens) - 1);
        ranges.push_back({start, draw(1, static_cast<int>(tokens) - start)});
      }
    }
    Problem problem = problem_of(tokens, 4, 64);
    problem.batch = 2;
    problem.query_rows = 0;
    for (const RowRange& range : ranges) problem.query_rows += range.count;
    if (trial % 4 != 0 && problem.query_rows == tokens) continue;  // taken for the whole sequence: another kernel's
    const Plan plan(pattern, {}, problem);
    std::byte workspace[64];
    const Call call;
    const BackwardArguments backward{plan, call, ranges, {}, {}, {}, {}, {}, {}, {}, {}, {}, 1, workspace};
    const std::int64_t most = hopper::sum_rows(plan);
    cuda::for_each_launch(
        backward, {.rows = hopper::kKeyTileRows, .by_keys = true, .fills = false}, true, [&](cuda::Launch& launch) {
          std::vector<bool> taken(static_cast<std::size_t>(most), false);
          std::int64_t next = 0;
          for (int r = 0; r < launch.schedule.range_count; ++r) {
            for (int b = 0; b < launch.schedule.branch_count; ++b) {
              const cuda::DeviceBranch& branch = launch.schedule.branches[b];
              hopper::StrandPlaces places = hopper::places_of(branch, launch.schedule.ranges[r], launch.tensors.tokens);
              places.first = next;
              next += places.per_head * branch.head_count * launch.tensors.batch;
              const int last = (launch.schedule.ranges[r].start + launch.schedule.ranges[r].count - 1) / branch.segment;
              for (int entry = 0; entry < launch.tensors.batch; ++entry) {
                for (int head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
                  for (int segment = places.first_segment; segment <= last; ++segment) {
                    const auto queries =
                        launch.schedule.ranges[r].of(branch.strand(head, segment, launch.tensors.tokens));
                    const std::int64_t first = places.row(branch, entry, head, segment);
                    ASSERT_EQ(first % hopper::kSumTileRows, 0);
                    const std::int64_t tiles = (queries.count + hopper::kSumTileRows - 1) / hopper::kSumTileRows;
                    for (std::int64_t row = first; row < first + tiles * hopper::kSumTileRows; ++row) {
                      ASSERT_LT(row, most) << pattern.to_string() << " trial " << trial;
                      ASSERT_FALSE(taken[static_cast<std::size_t>(row)]) << pattern.to_string() << " trial " << trial;
                      taken[static_cast<std::size_t>(row)] = true;
                    }
                  }
                }
              }
            }
          }
        });
  }
}

}  // namespace
}  // namespace longspan::testing
