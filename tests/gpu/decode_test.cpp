// Forward of few query rows: its grid, on the host; results with every option; and bits, which are those of the row
// alone whatever else the call holds.
#include <algorithm>
#include <map>
#include <random>

#include "gpu/device_case.h"
#include "gpu/gpu_place.h"
#include "kernels/cuda/decode.h"
#include "kernels/cuda/prepare.h"
#include "longspan/error.h"

namespace longspan::testing {
namespace {

constexpr const char* kName = "cuda-decode";

Options forced(bool causal = false) {
  Options options;
  options.causal = causal;
  options.kernel = kName;
  return options;
}

// ---- the grid

struct GridSetting {
  Pattern pattern;
  std::int64_t heads, kv_heads;
};

std::vector<GridSetting> grid_settings() {
  return {{Pattern::dense(), 8, 2},
          {Pattern::dense(), 24, 1},
          {Pattern::dilated({700, 3000, 9000}, {1, 3, 5}), 12, 3},
          {Pattern::dilated({40, 9000}, {4, 1}), 5, 5},
          {Pattern::dilated({1}, {1}), 2, 1},
          {Pattern::longnet({50, 4000, 9500}, {1, 3, 40}), 12, 3},
          {Pattern::longnet({50, 4000, 20000}, {2, 3, 5}, PhaseRule::torchscale), 9, 3},
          {Pattern::longnet({64, 20000}, {1, 2}).with_long_segments(LongSegments::skip), 4, 4},
          {Pattern::dilated({20000}, {1}).with_long_segments(LongSegments::skip), 4, 2}};
}

std::vector<std::vector<RowRange>> few_rows() {
  std::vector<RowRange> apart;
  for (std::int64_t i = 0; i < 8; ++i) apart.push_back({i * 1177 % 9001, 2});
  return {{{9000, 1}}, {{0, 1}}, {{4990, 16}}, {{8985, 16}}, apart, {{3, 2}, {3, 2}}};
}

/// Every pair of a row and a head is in one tile of one place, and its keys in chunks of which there is a warp each.
TEST(DecodeGrid, EveryKeyOfEveryRowIsOneWarps) {
  using namespace cuda;
  std::int64_t grouped = 0, several_strands = 0, shared = 0;
  for (const GridSetting& setting : grid_settings()) {
    for (const auto& ranges : few_rows()) {
      for (const bool causal : {false, true}) {
        Problem problem;
        problem.dtype = DType::bf16;
        problem.tokens = 9001;
        problem.batch = 2;
        problem.heads = setting.heads, problem.kv_heads = setting.kv_heads;
        for (const RowRange& range : ranges) problem.query_rows += range.count;
        Options options;
        options.causal = causal;
        const Plan plan(setting.pattern, options, problem);
        const Call call;
        for_each_launch(ForwardArguments{plan, call, ranges, {}, {}, {}, {}, {}}, {}, false, [&](Launch& launch) {
          const int warps = static_cast<int>(1 << ranges.size() % 3);
          const DecodeGrid grid = decode_grid(launch, warps);
          shared += grid.shares;
          const DecodeBounds bounds = decode_bounds(plan);
          EXPECT_LE(grid.blocks, bounds.blocks);
          EXPECT_LE(static_cast<double>(grid.records), bounds.records);
          const int lengths[2] = {9001, 5003};
          std::map<std::tuple<int, int, int, int>, std::vector<int>> chunks;  // branch, entry, head, row
          std::map<std::int64_t, int> records;
          for (unsigned index = 0; index < grid.blocks * static_cast<unsigned>(warps); ++index) {
            const DecodePlace p = grid.place(index / static_cast<unsigned>(warps), static_cast<int>(index) % warps);
            ASSERT_LT(p.entry, 2);
            ASSERT_LT(p.kv_head, setting.kv_heads);
            grouped += p.chunk >= kDecodeFan;
            if (!grid.leads(p)) continue;
            several_strands += p.segment > 0 || p.variant > 0;
            const StrandRows strand = grid.strand(p, lengths[p.entry]);
            int found = 0;
            for (int pair = 0; pair < grid.rows * grid.group; ++pair) {
              const int own = grid.find(p, strand, pair);
              if (own < 0) continue;
              if (found++ / 16 != p.tile) continue;
              const int row = grid.row_of(pair), head = p.kv_head * grid.group + grid.head_of(pair);
              const Strand want = plan.branches()[static_cast<std::size_t>(p.branch)].strand(
                  head, grid.positions[row] / grid.rules[p.branch].segment, lengths[p.entry]);
              ASSERT_EQ(strand.start + own * strand.stride, grid.positions[row]);
              ASSERT_EQ(strand.start, want.start);
              ASSERT_EQ(strand.count, want.count);
              if (chunk_begin(p.chunk) >= grid.keys(strand, own)) continue;
              chunks[{p.branch, p.entry, head, row}].push_back(p.chunk);
              ++records[grid.record(p.branch, p.entry, head, row, p.chunk)];
            }
          }
          for (int b = 0; b < grid.branch_count; ++b)
            for (int entry = 0; entry < 2; ++entry)
              for (int head = 0; head < grid.heads; ++head)
                for (int row = 0; row < grid.rows; ++row) {
                  const BranchPlan& branch = plan.branches()[static_cast<std::size_t>(b)];
                  const int position = grid.positions[row], length = lengths[entry];
                  std::vector<int> want;
                  if (branch.owns(head) && position < length && branch.active(length) &&
                      branch.covers(head, position)) {
                    const Strand strand = branch.strand(head, position / branch.segment, length);
                    const std::int64_t keys = causal ? (position - strand.start) / strand.stride + 1 : strand.count;
                    for (std::int64_t key = 0; key < keys; key += key < 2048 ? 64 : key < 8192 ? 128 : 256)
                      want.push_back(static_cast<int>(want.size()));
                  }
                  std::vector<int>& found = chunks[{b, entry, head, row}];
                  std::ranges::sort(found);
                  ASSERT_EQ(found, want) << setting.pattern.to_string() << " branch " << b << " head " << head
                                         << " position " << position;
                }
          for (const auto& [record, count] : records) {
            ASSERT_EQ(count, 1);
            ASSERT_LT(record, grid.records);
          }
        });
      }
    }
  }
  EXPECT_GT(grouped, 0);
  EXPECT_GT(shared, 0);
  EXPECT_GT(several_strands, 0);
}

// ---- results

class Decode : public ::testing::TestWithParam<std::tuple<DType, std::int64_t>> {
 protected:
  DType dtype() const { return std::get<0>(GetParam()); }
  std::int64_t head_dim() const { return std::get<1>(GetParam()); }
};

void expect_forward_matches(const Case& c, const std::string& what, const Call* changed = nullptr) {
  const reference::Expectation want = c.expected(false);
  DeviceCase device(c);
  Call call = changed ? *changed : device.call();
  CallReport report;
  call.report = &report;
  device.forward(Attention(c.pattern, c.options), call);
  EXPECT_EQ(report.kernel, kName) << what;
  const Results& got = device.download();
  for (const auto& [name, actual, expected] :
       {std::tuple("out", &got.out, &want.out), std::tuple("lse", &got.lse, &want.lse)}) {
    const auto comparison = reference::compare(std::as_const(*actual).view(), *expected);
    EXPECT_LE(comparison.over_tolerance, 1) << name << " " << comparison.worst << "\n" << what;
    EXPECT_LE(comparison.rms_over_model, 2) << name << "\n" << what;
  }
}

ConstTensorView part_of(const Tensor& tensor, std::int64_t first, std::int64_t step, std::int64_t count) {
  ConstTensorView view = tensor.view();
  view.data = static_cast<const std::byte*>(view.data) + view.offset(0, first, 0) * size_of(view.dtype);
  view.sizes[1] = count;
  view.strides[1] *= step;
  return view;
}

/// Options drawn at random, so that all pairs of them meet; the kernel is the one that calls get.
TEST_P(Decode, MatchesReferenceWithAnyOptions) {
  LONGSPAN_NEEDS_GPU();
  std::mt19937 engine(static_cast<unsigned>(head_dim()) * 7 + static_cast<unsigned>(dtype()));
  const auto one_in = [&](int n) { return engine() % static_cast<unsigned>(n) == 0; };
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(engine() % static_cast<unsigned>(n)); };
  for (int turn = 0; turn < 60; ++turn) {
    const std::int64_t tokens = std::array{1, 17, 256, 257, 700, 1300}[static_cast<std::size_t>(below(6))];
    const std::int64_t kv_heads = 1 + below(3),
                       heads = kv_heads * std::array{1, 2, 4, 6}[static_cast<std::size_t>(below(4))];
    const auto segment = [&] { return 1 + below(tokens * 3 / 2); };
    std::vector<std::int64_t> segments, dilations;
    const std::int64_t branches = 1 + below(std::min<std::int64_t>(heads, 4));
    for (std::int64_t b = 0; b < branches; ++b)
      segments.push_back(segment()), dilations.push_back(1 + below(7) * below(2));
    Pattern pattern = Pattern::dense();
    if (one_in(3)) pattern = Pattern::dilated(segments, dilations);
    else if (!one_in(3))
      pattern = Pattern::longnet(segments, dilations, one_in(2) ? PhaseRule::paper : PhaseRule::torchscale);
    if (!(pattern == Pattern::dense())) {
      if (one_in(3)) pattern = pattern.with_pad_keys();
      if (one_in(4)) pattern = pattern.with_long_segments(LongSegments::skip);
    }
    Options options;
    options.causal = one_in(2);
    if (one_in(4)) options.scale = std::array{-0.2, 0.0, 0.5, 3.0}[static_cast<std::size_t>(below(4))];
    if (one_in(4)) options.output_scale = 0.25;
    std::vector<RowRange> ranges;
    for (std::int64_t left = 1 + below(16), i = 0; left > 0 && i < 12; ++i) {
      const std::int64_t start = one_in(3) ? tokens - 1 : below(tokens);
      const std::int64_t count = std::min({left, tokens - start, 1 + below(one_in(2) ? 2 : 16)});
      ranges.push_back({start, count});
      left -= count;
    }
    const std::int64_t batch = 1 + below(3);
    Case c(pattern, options, {batch, tokens, heads, kv_heads, head_dim()}, dtype(),
           std::array{Layout::bnhd, Layout::bhnd, Layout::padded}[static_cast<std::size_t>(below(3))], ranges);
    if (one_in(3))
      for (std::int64_t entry = 0; entry < batch; ++entry) c.lengths.push_back(one_in(5) ? 0 : 1 + below(tokens));
    if (one_in(3)) {
      const unsigned kept = engine() % 4;
      for (std::int64_t i = 0; i < batch * tokens; ++i) c.key_mask.push_back(engine() % 4 >= kept ? 1 : 0);
    }
    if (one_in(3))
      for (std::int64_t head = 0; head < heads; ++head) c.alibi_slopes.push_back(0.05f * static_cast<float>(head - 1));
    if (one_in(3)) {  // odd and even rows, in two pieces; the even ones first
      c.pieces = {{0, 2, part_of(c.k, 0, 2, (tokens + 1) / 2), part_of(c.v, 0, 2, (tokens + 1) / 2)}};
      if (tokens > 1) c.pieces.push_back({1, 2, part_of(c.k, 1, 2, tokens / 2), part_of(c.v, 1, 2, tokens / 2)});
    }
    std::string what = fmt::format("turn {} {} tokens {} batch {} heads {}/{} causal {} rows", turn,
                                   pattern.to_string(), tokens, batch, heads, kv_heads, options.causal);
    for (const RowRange& range : ranges) what += fmt::format(" {}+{}", range.start, range.count);
    what += fmt::format(" lengths {} mask {} alibi {} pieces {}", c.lengths.size(), c.key_mask.size(),
                        c.alibi_slopes.size(), c.pieces.size());
    expect_forward_matches(c, what);
    if (HasFailure()) return;
  }
}

/// More chunks than one merge takes, and more groups than one merge takes.
TEST_P(Decode, LongStrandsMatchReference) {
  LONGSPAN_NEEDS_GPU();
  const std::int64_t tokens = dtype() == DType::bf16 && head_dim() == 64 ? 140001 : 9001;
  for (const bool causal : {false, true}) {
    expect_forward_matches(Case(Pattern::dense(), forced(causal), {1, tokens, 4, 1, head_dim()}, dtype(), Layout::bnhd,
                                {{tokens - 1, 1}, {4500, 2}}),
                           "dense");
    Case c(Pattern::longnet({64, 5000, 9001}, {1, 1, 2}), forced(causal), {1, 9001, 4, 2, head_dim()}, dtype(),
           Layout::bnhd, {{8990, 11}});
    expect_forward_matches(c, "longnet");
  }
}

/// Scores far apart, so that maxima change from chunk to chunk, and sums of one sign.
TEST_P(Decode, PeakedScoresMatchReference) {
  LONGSPAN_NEEDS_GPU();
  for (const double deviation : {0.01, 6.0}) {
    Case c(Pattern::dense(), forced(), {1, 6000, 2, 1, head_dim()}, dtype(), Layout::bnhd, {{77, 3}}, deviation);
    c.v.for_each([&](auto b, auto row, auto head, auto column) {
      c.v.set(b, row, head, column, std::abs(c.v.at(b, row, head, column)));
    });
    expect_forward_matches(c, fmt::format("deviation {}", deviation));
  }
}

TEST_P(Decode, ExcludedKeysMayHoldNaN) {
  LONGSPAN_NEEDS_GPU();
  Case c(Pattern::dense(), forced(), {2, 700, 4, 2, head_dim()}, dtype(), Layout::bnhd, {{400, 3}});
  c.lengths = {600, 700};
  c.key_mask.assign(1400, 1);
  c.key_mask[30] = c.key_mask[700 + 299] = 0;
  const reference::Expectation want = c.expected(false);
  for (Tensor* tensor : {&c.k, &c.v}) {
    for (std::int64_t head = 0; head < 2; ++head)
      for (std::int64_t column = 0; column < head_dim(); ++column) {
        tensor->set(0, 30, head, column, std::nan(""));
        tensor->set(1, 299, head, column, std::nan(""));
        for (std::int64_t row = 600; row < 700; ++row) tensor->set(0, row, head, column, std::nan(""));
      }
  }
  DeviceCase device(c);
  device.forward(Attention(c.pattern, c.options), device.call());
  EXPECT_TRUE(reference::compare(std::as_const(device.download().out).view(), want.out).ok());
}

/// A cache has room for rows that are not there yet.
TEST_P(Decode, RowsBehindTheLastQueryMayHoldNaN) {
  LONGSPAN_NEEDS_GPU();
  for (const std::int64_t rows : {1, 16}) {
    Case c(Pattern::dense(), forced(true), {1, 700, 8, 2, head_dim()}, dtype(), Layout::bnhd, {{401 - rows, rows}});
    const reference::Expectation want = c.expected(false);
    for (Tensor* tensor : {&c.k, &c.v})
      for (std::int64_t row = 401; row < 700; ++row)
        for (std::int64_t head = 0; head < 2; ++head)
          for (std::int64_t column = 0; column < head_dim(); ++column) tensor->set(0, row, head, column, std::nan(""));
    DeviceCase device(c);
    device.forward(Attention(c.pattern, c.options), device.call());
    EXPECT_TRUE(reference::compare(std::as_const(device.download().out).view(), want.out).ok());
  }
}

// ---- bits

/// Keys on the GPU, and what any of 16 rows of any entry gives among others.
class Few {
 public:
  static constexpr std::int64_t kBatch = 2, kTokens = 9001, kRows = 16, kHeads = 8,
                                kKvHeads = 2;  // all rows share their keys' loads
  Few(DType dtype, std::int64_t head_dim) : dtype_(dtype), columns_(head_dim) {
    q_ = DeviceTensor(std::as_const(Tensor(dtype, kBatch, kRows, kHeads, head_dim).fill_random(1)).view());
    const Tensor k = Tensor(dtype, kBatch, kTokens, kKvHeads, head_dim).fill_random(2),
                 v = Tensor(dtype, kBatch, kTokens, kKvHeads, head_dim).fill_random(3);
    k_ = DeviceTensor(k.view()), v_ = DeviceTensor(v.view());
  }
  struct Choice {
    std::int64_t row = 0, rows = kRows, entry = 0, entries = kBatch, tokens = kTokens;
    bool pieces = false;
  };
  /// Rows at positions first + row, first + row + 1, ...
  Results run(const Pattern& pattern, bool causal, std::int64_t first, const Choice& choice, Call call = {}) const {
    const auto some = [&](const DeviceTensor& tensor, std::int64_t row, std::int64_t rows) {
      ConstTensorView view = tensor.view();
      view.data = static_cast<const std::byte*>(view.data) + view.offset(choice.entry, row, 0) * size_of(dtype_);
      view.sizes[0] = choice.entries, view.sizes[1] = rows;
      return view;
    };
    Results results;
    results.out = Tensor(dtype_, choice.entries, choice.rows, kHeads, columns_);
    results.lse = Tensor::lse(dtype_, choice.entries, choice.rows, kHeads);
    const DeviceTensor out(std::as_const(results.out).view()), lse(std::as_const(results.lse).view());
    const RowRange range{first + choice.row, choice.rows};
    const ConstTensorView k = some(k_, 0, choice.tokens), v = some(v_, 0, choice.tokens);
    const KeyPiece pieces[] = {{0, 1, some(k_, 0, 1000), some(v_, 0, 1000)},
                               {1000, 1, some(k_, 1000, choice.tokens - 1000), some(v_, 1000, choice.tokens - 1000)}};
    call.query_ranges = {&range, 1};
    if (choice.pieces) call.pieces = pieces;
    Attention(pattern, forced(causal))
        .forward(some(q_, choice.row, choice.rows), k, v, out.output(), lse.output(), call);
    expect_success(cudaDeviceSynchronize());
    out.download(results.out);
    lse.download(results.lse);
    return results;
  }
  void expect_same(const Results& all, const Results& part, const Choice& choice, const std::string& what) const {
    bool same = true;
    part.out.for_each([&](auto b, auto row, auto head, auto column) {
      same = same && part.out.at(b, row, head, column) == all.out.at(choice.entry + b, choice.row + row, head, column);
      same = same && part.lse.at(b, row, head) == all.lse.at(choice.entry + b, choice.row + row, head);
    });
    EXPECT_TRUE(same) << what;
  }

 private:
  DType dtype_;
  std::int64_t columns_;
  DeviceTensor q_, k_, v_;
};

const Pattern kDecodePatterns[] = {Pattern::dense(), Pattern::dilated({6000, 9001}, {1, 3}),
                                   Pattern::longnet({100, 5000, 20000}, {1, 3, 2})};

TEST_P(Decode, BitsOfARowAreItsOwn) {
  LONGSPAN_NEEDS_GPU();
  const Few few(dtype(), head_dim());
  std::vector<std::uint8_t> mask(Few::kBatch * Few::kTokens, 1);
  for (std::size_t i = 0; i < mask.size(); i += 3) mask[i] = 0;
  const DeviceTensor device_mask(ConstTensorView::mask(mask.data(), Few::kBatch, Few::kTokens));
  for (const Pattern& pattern : kDecodePatterns) {
    for (const bool causal : {false, true}) {
      const std::int64_t first = causal ? 4988 : 8985;  // 16 rows across the end of a segment, or the last ones
      const Results all = few.run(pattern, causal, first, {});
      const auto expect = [&](const Few::Choice& choice, const char* what) {
        few.expect_same(all, few.run(pattern, causal, first, choice), choice,
                        fmt::format("{}, {} causal {}", what, pattern.to_string(), causal));
      };
      for (std::int64_t row = 0; row < Few::kRows; ++row) expect({.row = row, .rows = 1}, "a row alone");
      expect({.row = 3, .rows = 7}, "seven rows");
      expect({.entry = 1, .entries = 1}, "an entry alone");
      expect({.row = 2, .rows = 5, .pieces = true}, "keys in pieces");
      if (causal) expect({.row = 0, .rows = 12, .tokens = 5000}, "with fewer keys after it");
      Call masked;
      masked.key_mask = device_mask.view();
      const Results all_masked = few.run(pattern, causal, first, {}, masked);
      few.expect_same(all_masked, few.run(pattern, causal, first, {.row = 5, .rows = 1}, masked), {.row = 5}, "masked");
    }
  }
}

TEST_P(Decode, HundredRunsGiveTheSameBits) {
  LONGSPAN_NEEDS_GPU();
  const Few few(dtype(), head_dim());
  for (const Pattern& pattern : kDecodePatterns) {
    const Results want = few.run(pattern, true, 8985, {});
    for (int i = 0; i < 100; ++i) {
      const Results got = few.run(pattern, true, 8985, {});
      ASSERT_EQ(got.out, want.out) << pattern.to_string();
      ASSERT_EQ(got.lse, want.lse) << pattern.to_string();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Few, Decode,
                         ::testing::Combine(::testing::Values(DType::f32, DType::bf16, DType::f16),
                                            ::testing::Values(8, 40, 64, 128, 256)),
                         [](const auto& parameters) {
                           return std::string(name_of(std::get<0>(parameters.param))) + "_d" +
                                  std::to_string(std::get<1>(parameters.param));
                         });

/// Many entries, and several launches of ranges, one after the other.
TEST(DecodeCalls, ManyEntriesAndManyRanges) {
  LONGSPAN_NEEDS_GPU();
  std::vector<RowRange> ranges;
  for (std::int64_t i = 0; i < 12; ++i) ranges.push_back({i * 20, 1});
  for (int turn = 0; turn < 2; ++turn)
    expect_forward_matches(
        Case(Pattern::longnet({64, 300}, {1, 3}), {}, {90, 300, 4, 4, 16}, DType::bf16, Layout::bnhd, ranges), "many");
}

/// A graph reads what lengths are when it runs.
TEST(DecodeCalls, GraphsReplayWithOtherLengths) {
  LONGSPAN_NEEDS_GPU();
  for (const Pattern& pattern : kDecodePatterns) {
    Case c(pattern, {}, {2, 9001, 4, 2, 64}, DType::bf16, Layout::bnhd, {{700, 2}});
    c.lengths = {9001, 9001};
    DeviceCase replayed(c);
    const Attention attention(pattern, {});
    const auto plan = attention.plan(replayed.problem());
    const DeviceBuffer workspace(plan->workspace_bytes(Pass::forward), 0xA5);
    cudaStream_t stream = nullptr;
    expect_success(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Call call = replayed.call();
    call.stream = stream;
    call.workspace = workspace.data();
    call.workspace_size = plan->workspace_bytes(Pass::forward);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    expect_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    replayed.forward(attention, call);
    expect_success(cudaStreamEndCapture(stream, &graph));
    expect_success(cudaGraphInstantiate(&executable, graph, 0));
    for (const std::vector<std::int64_t>& lengths :
         {std::vector<std::int64_t>{9001, 702}, {701, 0}, {5000, 9001}, {9001, 9001}}) {
      c.lengths = lengths;
      expect_success(cudaMemcpy(const_cast<void*>(call.lengths.data), lengths.data(), 16, cudaMemcpyHostToDevice));
      for (int i = 0; i < 2; ++i) expect_success(cudaGraphLaunch(executable, stream));
      expect_success(cudaStreamSynchronize(stream));
      DeviceCase eager(c);
      eager.forward(attention, eager.call());
      const Results want = eager.download();
      const Results& got = replayed.download();
      EXPECT_EQ(got.out, want.out) << pattern.to_string() << " " << lengths[0];
      EXPECT_EQ(got.lse, want.lse) << pattern.to_string() << " " << lengths[0];
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

TEST(DecodeCalls, WithoutLse) {
  LONGSPAN_NEEDS_GPU();
  const Case c(Pattern::dense(), forced(), {1, 700, 4, 2, 64}, DType::bf16, Layout::bnhd, {{699, 1}});
  DeviceCase with(c), without(c);
  const Attention attention(c.pattern, c.options);
  with.forward(attention, with.call());
  attention.forward(without.q.view(), without.k.view(), without.v.view(), without.out.output(), {}, without.call());
  EXPECT_EQ(with.download().out, without.download().out);
}

TEST(DecodeCalls, VerdictsSayWhatTheKernelLacks) {
  LONGSPAN_NEEDS_GPU();
  const auto why = [](const Pattern& pattern, std::int64_t rows, double dropout, Pass pass = Pass::forward) {
    Problem problem;
    problem.dtype = DType::bf16;
    problem.device = kGpu;
    problem.tokens = 512;
    problem.query_rows = rows;
    Options options;
    options.dropout = dropout;
    for (const KernelVerdict& verdict : Plan(pattern, options, problem).kernel_verdicts(pass)) {
      if (verdict.kernel == kName) return verdict.reason;
    }
    return std::string("is not there");
  };
  EXPECT_EQ(why(Pattern::dense(), 16, 0), "");
  EXPECT_NE(why(Pattern::dense(), 17, 0).find("16 query rows"), std::string::npos);
  EXPECT_NE(why(Pattern::dense(), 1, 0.1).find("dropout"), std::string::npos);
  EXPECT_NE(why(Pattern::block_sparse(BlockPattern::local_window(128, 64)), 1, 0).find("block masks"),
            std::string::npos);
  EXPECT_NE(why(Pattern::dense(), 1, 0, Pass::backward).find("forward only"), std::string::npos);
}

/// A rank with few rows computes them as one GPU does among all rows.
TEST(DecodeCalls, RanksWithFewRowsKeepTheBitsOfTheWhole) {
  LONGSPAN_NEEDS_GPU();
  const Case c(Pattern::longnet({20, 48}, {1, 2}), {}, {1, 48, 2, 2, 64}, DType::bf16);
  const Results want = run_on_gpu(c, "");
  const Shards shards = Shards::even(48, 4);
  const auto got = run_local<GpuPlace>(c, shards);
  for (int rank = 0; rank < 4; ++rank)
    expect_same(got[static_cast<std::size_t>(rank)], want, shards.ranges(rank), ring_tolerance(c.dtype), true, true,
                "few rows each");
}

TEST(DecodeCalls, RingsOfFewRowsInAllAreSplitAsOnOneGpu) {
  LONGSPAN_NEEDS_GPU();
  const Case c(Pattern::longnet({5, 12}, {1, 2}), {}, {1, 12, 2, 2, 64}, DType::bf16);
  const Results want = run_on_gpu(c, "");
  const Shards shards = Shards::even(12, 3);
  const auto got = run_local<GpuPlace>(c, shards);
  for (int rank = 0; rank < 3; ++rank)
    expect_same(got[static_cast<std::size_t>(rank)], want, shards.ranges(rank), ring_tolerance(c.dtype), true, true,
                "few rows in all");
}

}  // namespace
}  // namespace longspan::testing
