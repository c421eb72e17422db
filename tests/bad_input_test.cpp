// Everything the definition calls bad input is refused before any work, with an error that names the argument.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "attention/check.h"
#include "attention/run.h"
#include "longspan/error.h"
#include "support/case.h"

namespace longspan::testing {
namespace {

/// A good call, in pieces that tests spoil one at a time.
struct Inputs {
  Tensor q_storage{DType::f32, 2, 16, 4, 8}, k_storage{DType::f32, 2, 16, 2, 8}, v_storage{DType::f32, 2, 16, 2, 8};
  Tensor out_storage{DType::f32, 2, 16, 4, 8}, dout_storage{DType::f32, 2, 16, 4, 8};
  Tensor lse_storage = Tensor::lse(DType::f32, 2, 16, 4), dlse_storage = Tensor::lse(DType::f32, 2, 16, 4);
  Tensor dq_storage{DType::f32, 2, 16, 4, 8}, dk_storage{DType::f32, 2, 16, 2, 8}, dv_storage{DType::f32, 2, 16, 2, 8};
  TensorView q = q_storage.fill_random(1).view(), k = k_storage.fill_random(2).view(),
             v = v_storage.fill_random(3).view();
  TensorView out = out_storage.view(), lse = lse_storage.view(), dout = dout_storage.fill_random(4).view();
  TensorView dq = dq_storage.view(), dk = dk_storage.view(), dv = dv_storage.view();
  Pattern pattern = Pattern::dilated({4, 8}, {1, 2});
  Options options;
  Call call;
  std::vector<RowRange> ranges;

  void forward() {
    call.query_ranges = ranges;
    Attention(pattern, options).forward(q, k, v, out, lse, call);
  }
  void backward() {
    call.query_ranges = ranges;
    Attention(pattern, options).backward(q, k, v, out, lse, dout, dq, dk, dv, call);
  }
};

struct BadInput {
  const char* name;
  const char* argument;               // the error must name it
  std::vector<const char*> mentions;  // ... and say this
  std::function<void(Inputs&)> spoil;
  bool backward = false;
};

TensorView misaligned(TensorView view) {
  view.data = static_cast<std::uint8_t*>(view.data) + 1;
  return view;
}

std::vector<BadInput> bad_inputs() {
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  static const std::int64_t too_long[] = {17, 3}, negative[] = {-1, 3}, fine[] = {1, 2};
  static const std::uint8_t mask[64] = {};
  static const float slopes[4] = {};
  return {
      {"k_batch", "k", {"1", "2"}, [](Inputs& i) { i.k.sizes[0] = i.v.sizes[0] = 1; }},
      {"v_shape", "v", {"[2, 15, 2, 8]"}, [](Inputs& i) { i.v.sizes[1] = 15; }},
      {"head_dims_differ", "k", {"4", "8"}, [](Inputs& i) { i.k.sizes[3] = i.v.sizes[3] = 4; }},
      {"heads_not_multiple", "k", {"3", "4"}, [](Inputs& i) { i.k.sizes[2] = i.v.sizes[2] = 3; }},
      {"out_shape", "out", {"[2, 16, 4, 7]"}, [](Inputs& i) { i.out.sizes[3] = 7; }},
      {"lse_shape", "lse", {"15"}, [](Inputs& i) { i.lse.sizes[1] = 15; }},
      {"q_rows_without_ranges",
       "q",
       {"15", "16", "query_ranges"},
       [](Inputs& i) { i.q.sizes[1] = i.out.sizes[1] = 15; }},
      {"negative_size", "q", {"-3"}, [](Inputs& i) { i.q.sizes[0] = -3; }},
      {"k_dtype", "k", {"bf16", "f32"}, [](Inputs& i) { i.k.dtype = DType::bf16; }},
      {"q_dtype", "q", {"i32"}, [](Inputs& i) { i.q.dtype = DType::i32; }},
      {"lse_dtype", "lse", {"f64", "f32"}, [](Inputs& i) { i.lse.dtype = DType::f64; }},
      {"device",
       "v",
       {"cuda:1", "cpu"},
       [](Inputs& i) {
         i.v.device = {DeviceType::cuda, 1};
       }},
      {"head_dim_0", "q", {"0"}, [](Inputs& i) { i.q.sizes[3] = i.k.sizes[3] = i.v.sizes[3] = i.out.sizes[3] = 0; }},
      {"head_dim_257",
       "q",
       {"257", "256"},
       [](Inputs& i) { i.q.sizes[3] = i.k.sizes[3] = i.v.sizes[3] = i.out.sizes[3] = 257; }},
      {"no_heads", "q", {"0 heads"}, [](Inputs& i) { i.q.sizes[2] = i.out.sizes[2] = 0; }},
      {"heads_below_groups",
       "heads",
       {"4", "5"},
       [](Inputs& i) {
         i.pattern = Pattern::dilated({1, 2, 3, 4, 5}, {1, 1, 1, 1, 1});
       }},
      {"overflowing_size", "q", {"64-bit"}, [](Inputs& i) { i.q.sizes[1] = std::int64_t{1} << 61; }},
      {"overflowing_stride", "k", {"64-bit"}, [](Inputs& i) { i.k.strides[0] = std::int64_t{1} << 62; }},
      {"null_q", "q", {"null"}, [](Inputs& i) { i.q.data = nullptr; }},
      {"null_out", "out", {"null"}, [](Inputs& i) { i.out.data = nullptr; }},
      {"misaligned_k", "k", {"multiple of 4"}, [](Inputs& i) { i.k = misaligned(i.k); }},
      {"misaligned_lse", "lse", {"multiple of 4"}, [](Inputs& i) { i.lse = misaligned(i.lse); }},
      {"last_stride", "v", {"2", "contiguous"}, [](Inputs& i) { i.v.strides[3] = 2; }},
      {"dropout_one", "dropout", {"1"}, [](Inputs& i) { i.options.dropout = 1; }},
      {"dropout_negative", "dropout", {"-0.1"}, [](Inputs& i) { i.options.dropout = -0.1; }},
      {"dropout_nan", "dropout", {"nan"}, [nan](Inputs& i) { i.options.dropout = nan; }},
      {"scale_infinite", "scale", {"inf"}, [infinity](Inputs& i) { i.options.scale = infinity; }},
      {"scale_beyond_float32", "scale", {"1e+300", "float32"}, [](Inputs& i) { i.options.scale = 1e300; }},
      {"output_scale_beyond_float32",
       "output_scale",
       {"-1e+39", "float32"},
       [](Inputs& i) { i.options.output_scale = -1e39; }},
      {"piece_head_overflows",
       "pieces[0]",
       {"2 heads from head 9223372036854775807", "k has 2"},
       [](Inputs& i) {
         static KeyPiece piece;
         piece = {.k = i.k, .v = i.v, .kv_head = std::numeric_limits<std::int64_t>::max()};
         i.call.pieces = {&piece, 1};
       }},
      {"output_scale_nan", "output_scale", {"nan"}, [nan](Inputs& i) { i.options.output_scale = nan; }},
      {"lengths_too_long",
       "lengths",
       {"lengths[0]", "17", "16"},
       [](Inputs& i) { i.call.lengths = ConstTensorView::per_batch(too_long, DType::i64, 2); }},
      {"lengths_negative",
       "lengths",
       {"-1"},
       [](Inputs& i) { i.call.lengths = ConstTensorView::per_batch(negative, DType::i64, 2); }},
      {"lengths_shape",
       "lengths",
       {"2 batch"},
       [](Inputs& i) { i.call.lengths = ConstTensorView::per_batch(fine, DType::i64, 1); }},
      {"lengths_dtype",
       "lengths",
       {"f32"},
       [](Inputs& i) { i.call.lengths = ConstTensorView::per_batch(slopes, DType::f32, 2); }},
      {"key_mask_shape",
       "key_mask",
       {"[2, 16]"},
       [](Inputs& i) { i.call.key_mask = ConstTensorView::mask(mask, 2, 15); }},
      {"alibi_shape",
       "alibi_slopes",
       {"4 heads"},
       [](Inputs& i) { i.call.alibi_slopes = ConstTensorView::per_head(slopes, 3); }},
      {"range_beyond_end",
       "query_ranges",
       {"10", "7"},
       [](Inputs& i) {
         i.ranges = {{10, 7}};
       }},
      {"range_negative",
       "query_ranges",
       {"-1"},
       [](Inputs& i) {
         i.ranges = {{-1, 2}};
       }},
      {"range_overflow",
       "query_ranges",
       {"leaves"},
       [](Inputs& i) {
         i.ranges = {{4, std::numeric_limits<std::int64_t>::max()}};
       }},
      {"ranges_add_up",
       "query_ranges",
       {"16 rows"},
       [](Inputs& i) {
         i.ranges = {{0, 10}};
       }},
      {"out_is_q", "out", {"q"}, [](Inputs& i) { i.out = i.q; }},
      {"out_inside_v", "out", {"overlaps"}, [](Inputs& i) { i.out.data = static_cast<float*>(i.v.data) + 4; }},
      {"out_strides_repeat", "out", {"twice"}, [](Inputs& i) { i.out.strides[1] = 0; }},
      {"out_strides_overlap", "out", {"twice"}, [](Inputs& i) { i.out.strides[2] = 7; }},
      {"lse_in_out", "out", {"lse"}, [](Inputs& i) { i.lse.data = i.out.data; }},
      {"workspace_too_small",
       "workspace",
       {"bytes"},
       [](Inputs& i) {
         alignas(64) static char bytes[64];
         i.options.kernel = "plain";
         i.call.workspace = bytes;
         i.call.workspace_size = 1;
       },
       true},
      {"workspace_misaligned",
       "workspace",
       {"64"},
       [](Inputs& i) {
         alignas(64) static char bytes[64];
         i.call.workspace = bytes + 1;
         i.call.workspace_size = 8;
       }},
      {"missing_lse", "lse", {"forward returned"}, [](Inputs& i) { i.lse = {}; }, true},
      {"dout_shape", "dout", {"[2, 16, 3, 8]"}, [](Inputs& i) { i.dout.sizes[2] = 3; }, true},
      {"dk_shape", "dk", {"[2, 16, 4, 8]"}, [](Inputs& i) { i.dk.sizes[2] = 4; }, true},
      {"dq_is_dout", "dq", {"dout"}, [](Inputs& i) { i.dq = i.dout; }, true},
      {"dk_is_dv", "dk", {"dv"}, [](Inputs& i) { i.dk = i.dv; }, true},
      {"dlse_with_detached_mix",
       "dlse",
       {"detached_mix"},
       [](Inputs& i) {
         i.options.detached_mix = true;
         i.call.dlse = i.dlse_storage.view();
       },
       true},
      {"dlse_shape",
       "dlse",
       {"16"},
       [](Inputs& i) {
         i.call.dlse = i.dlse_storage.view();
         i.call.dlse.sizes[1] = 9;
       },
       true},
  };
}

class RefusesBadInput : public ::testing::TestWithParam<BadInput> {};

TEST_P(RefusesBadInput, NamingArgumentValueAndFix) {
  const BadInput& bad = GetParam();
  Inputs inputs;
  bad.spoil(inputs);
  try {
    bad.backward ? inputs.backward() : inputs.forward();
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), bad.argument) << error.what();
    for (const char* text : bad.mentions)
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what() << "\nlacks " << text;
  }
  // Before any work: outputs still hold their poison.
  EXPECT_TRUE(std::isnan(inputs.out_storage.at(0, 0, 0)));
  EXPECT_TRUE(std::isnan(inputs.dq_storage.at(0, 0, 0)));
}

INSTANTIATE_TEST_SUITE_P(EveryArgument, RefusesBadInput, ::testing::ValuesIn(bad_inputs()),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST(BadInput, TheGoodCallIsGood) {
  Inputs inputs;
  EXPECT_NO_THROW(inputs.forward());
  EXPECT_NO_THROW(inputs.backward());
}

TEST(BadInput, UnknownKernelListsWhatThereIs) {
  Inputs inputs;
  inputs.options.kernel = "cubist";
  try {
    inputs.forward();
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("cubist"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("reference"), std::string::npos);
  }
}

TEST(BadInput, KernelThatCannotRunSaysWhy) {
  Case c(Pattern::dense(), {}, {1, 8, 1, 1, 8}, DType::f64);
  try {
    c.run("plain");
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("f64"), std::string::npos) << error.what();
  }
}

TEST(BadInput, PiecesMustHoldEveryAttendedRow) {
  Case c(Pattern::dilated({8, 16}, {1, 2}), {}, {1, 16, 2, 2, 8});
  ConstTensorView k = c.k.view(), v = c.v.view();
  k.sizes[1] = v.sizes[1] = 15;
  c.pieces = {{0, 1, k, v}};
  EXPECT_THROW(c.run(), InvalidArgument);
  c.pieces = {{2, 1, k, v}};  // reaches position 16
  EXPECT_THROW(c.run(), InvalidArgument);
  c.pieces = {{0, 0, k, v}};
  EXPECT_THROW(c.run(), InvalidArgument);
}

/// What a call says of pieces that hold all rows but those of one block of 16.
std::string without_block(const Case& whole, std::int64_t block) {
  Case c = whole;
  const std::int64_t begin = block * 16, end = begin + 16;
  for (const auto& [first, last] : {std::pair{std::int64_t{0}, begin}, {end, c.shape.tokens}}) {
    KeyPiece piece{first, 1, c.k.view(), c.v.view()};
    for (auto [view, tensor] : {std::pair{&piece.k, &c.k}, {&piece.v, &c.v}}) {
      view->data = tensor->view().at<float>(0, 0, 0) + first * view->strides[1];
      view->sizes[1] = last - first;
    }
    c.pieces.push_back(piece);
  }
  try {
    c.run("", false);
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), "pieces");
    return error.what();
  }
  return "";
}

TEST(BadInput, PiecesMustHoldWhatTheMasksOfAllBatchEntriesSee) {
  // Entry 0 sees its own block only, entry 1 also block 0, or the other way round.
  for (const std::int64_t sees_more : {0, 1}) {
    std::vector<std::vector<std::int32_t>> rows(2 * 3, {1});
    rows[static_cast<std::size_t>(sees_more * 3 + 1)] = {0, 1};
    const BlockMask mask = BlockMask::from_rows(16, 2, 3, rows);
    const Case c(Pattern::block_sparse(mask), {}, {2, 48, 1, 1, 8}, DType::f32, Layout::bnhd, {{16, 16}});
    EXPECT_NE(without_block(c, 0).find("no piece holds position 0"), std::string::npos) << sees_more;
    EXPECT_NE(without_block(c, 1).find("no piece holds position 16"), std::string::npos);
    EXPECT_EQ(without_block(c, 2), "");
  }
}

TEST(BadInput, PiecesMustHoldAllThatAdaptiveBlocksAreChosenFrom) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    const Case c(Pattern::block_sparse(BlockPattern::adaptive(0.5, 16)), options, {2, 64, 2, 1, 8}, DType::f32,
                 Layout::bnhd, {{32, 16}});
    for (std::int64_t block = 0; block < 4; ++block) {
      const bool needed = !causal || block < 3;
      EXPECT_EQ(without_block(c, block).find(fmt::format("no piece holds position {}", 16 * block)) == 0, needed)
          << block << without_block(c, block);
    }
  }
}

TEST(BadInput, PiecesMustHoldWhatRandomBlocksOfShorterEntriesSee) {
  int cases = 0;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const BlockPattern random = BlockPattern::random(0.5, seed, 16);
    const BlockMask full = random.mask(96, 1, false), alone = random.mask(48, 1, false);
    for (std::int64_t block = 0; block < 3; ++block) {
      Case c(Pattern::block_sparse(random), {}, {2, 96, 1, 1, 8}, DType::f32, Layout::bnhd, {{16, 16}});
      c.lengths = {96, 48};
      const bool needed = full.active(0, 1, block) || alone.active(0, 1, block);
      cases += needed && !full.active(0, 1, block);
      EXPECT_EQ(without_block(c, block) != "", needed) << "seed " << seed << ", block " << block;
    }
  }
  EXPECT_GT(cases, 0);  // some that only the shorter entry sees
}

/// A call over pieces of each key/value head alone, of which one lacks one row, is refused exactly when some query of
/// some batch entry attends to that row; else it has the bits of whole tensors. Who attends to what is asked of the
/// kernel itself: a NaN in the row of v reaches all who do.
TEST(BadInput, PiecesAreRefusedExactlyWhenAnAttendedRowIsMissing) {
  std::mt19937 engine(5);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine);
  };
  int refused = 0, accepted = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const Shape shape{draw(1, 3), draw(1, 90), 4, std::int64_t{1} << draw(0, 2), 8};
    const std::int64_t blocks = (shape.tokens + 15) / 16;
    const auto random_mask = [&](std::int64_t heads) {
      std::vector<std::uint8_t> dense(static_cast<std::size_t>(heads * blocks * blocks));
      for (auto& bit : dense) bit = draw(0, 2) == 0;
      return BlockMask::from_dense(16, heads, blocks, dense);
    };
    const Pattern patterns[] = {Pattern::dilated({draw(1, 40), draw(1, 100)}, {draw(1, 5), draw(1, 9)}),
                                Pattern::longnet({draw(1, 40), draw(1, 100)}, {draw(1, 5), draw(1, 9)}),
                                Pattern::longnet({draw(1, 100)}, {draw(1, 5)}, PhaseRule::torchscale),
                                Pattern::block_sparse(random_mask(1)),
                                Pattern::block_sparse(random_mask(shape.heads)),
                                Pattern::block_sparse(random_mask(shape.batch * shape.heads)),
                                Pattern::block_sparse(BlockPattern::random(0.3, 3, 16)),
                                Pattern::dilated({draw(20, 200)}, {1}).with_long_segments(LongSegments::skip)};
    Options options;
    options.causal = trial % 2 == 0;
    std::vector<RowRange> ranges;
    for (std::int64_t i = draw(0, 2); i > 0; --i) {
      const std::int64_t start = draw(0, shape.tokens - 1);
      ranges.push_back({start, draw(1, shape.tokens - start)});
    }
    Case c(patterns[trial % 8], options, shape, DType::f32, Layout::bnhd, ranges);
    if (trial % 3 == 0) {
      for (std::int64_t entry = 0; entry < shape.batch; ++entry) c.lengths.push_back(draw(0, shape.tokens));
    }
    if (trial % 5 == 0) {
      for (std::int64_t i = 0; i < shape.batch * shape.tokens; ++i) c.key_mask.push_back(draw(0, 3) > 0);
    }
    const Results whole = c.run("plain", false);
    const std::int64_t missing = draw(0, shape.tokens - 1), head = draw(0, shape.kv_heads - 1);
    const Tensor v = c.v;
    for (std::int64_t entry = 0; entry < shape.batch; ++entry) c.v.set(entry, missing, head, 0, std::nan(""));
    const Tensor marked = c.run("plain", false).out;
    c.v = v;
    bool attended = false;
    marked.for_each([&](std::int64_t entry, std::int64_t row, std::int64_t of, std::int64_t column) {
      attended = attended || std::isnan(marked.at(entry, row, of, column));
    });

    for (std::int64_t of = 0; of < shape.kv_heads; ++of) {
      const auto add = [&](std::int64_t first, std::int64_t last) {
        KeyPiece piece{first, 1, std::as_const(c.k).view(), std::as_const(c.v).view(), of};
        for (ConstTensorView* const view : {&piece.k, &piece.v}) {
          view->data = view->at<float>(0, first, of);
          view->sizes[1] = last - first;
          view->sizes[2] = 1;
        }
        if (last > first) c.pieces.push_back(piece);
      };
      add(0, of == head ? missing : shape.tokens);
      if (of == head) add(missing + 1, shape.tokens);
    }
    if (c.pieces.empty()) continue;  // then k and v themselves are read
    bool threw = false;
    try {
      const Results got = c.run("plain", false);
      EXPECT_EQ(got.out, whole.out) << trial;
      EXPECT_EQ(got.lse, whole.lse) << trial;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.argument(), "pieces");
      threw = true;
    }
    ASSERT_EQ(threw, attended) << "trial " << trial << ", row " << missing << " of head " << head << " of "
                               << c.pattern.to_string();
    ++(threw ? refused : accepted);
  }
  EXPECT_GT(refused, 50);
  EXPECT_GT(accepted, 50);
}

TEST(BadInput, OnlyTheLibraryMayLeaveKeysOut) {
  // The last key is in no piece.
  Inputs i;
  i.pattern = Pattern::dense();
  Tensor dk(DType::f32, 2, 15, 2, 8), dv(DType::f32, 2, 15, 2, 8);
  const auto outcome = [&](Device device, bool backward, auto&& call) -> std::string {
    const auto on = [&](auto view) {
      view.device = device;
      return view;
    };
    ConstTensorView k = on(i.k), v = on(i.v);
    k.sizes[1] = v.sizes[1] = 15;
    KeyPiece piece{0, 1, k, v};
    if (backward) piece.dk = on(dk.view()), piece.dv = on(dv.view());
    i.call.pieces = {&piece, 1};
    try {
      call(on);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto forward = [&](KeysGiven given) {
    return [&, given](auto&& on) {
      run_forward(Attention(i.pattern), {on(i.q), on(i.k), on(i.v), on(i.out), on(i.lse)}, i.call, given);
    };
  };
  const auto backward = [&](KeysGiven given) {
    return [&, given](auto&& on) {
      run_backward(Attention(i.pattern),
                   {on(i.q), on(i.k), on(i.v), on(i.out), on(i.lse), on(i.dout), on(i.dq), {}, {}}, i.call, given);
    };
  };
  const auto users = [&](auto&& on) {
    Attention(i.pattern).forward(on(i.q), on(i.k), on(i.v), on(i.out), on(i.lse), i.call);
  };
  const Device gpu{DeviceType::cuda, 0};
  const std::string refusal = "no piece holds position 15";
  for (const Device device : {Device{}, gpu}) {
    EXPECT_NE(outcome(device, false, users).find(refusal), std::string::npos);
    EXPECT_NE(outcome(device, false, forward(KeysGiven::all)).find(refusal), std::string::npos);
    EXPECT_NE(outcome(device, true, backward(KeysGiven::all)).find(refusal), std::string::npos);
  }
  // GPU kernels are asked next: there is none here, or it finds this memory to be the host's.
  EXPECT_NE(outcome(gpu, false, forward(KeysGiven::some)), "");
  EXPECT_EQ(outcome(gpu, false, forward(KeysGiven::some)).find(refusal), std::string::npos);
  EXPECT_EQ(outcome(gpu, true, backward(KeysGiven::some)).find(refusal), std::string::npos);
  // The CPU's leave out what a mask says.
  EXPECT_NE(outcome({}, false, forward(KeysGiven::some)).find(refusal), std::string::npos);
  EXPECT_NE(outcome({}, true, backward(KeysGiven::some)).find(refusal), std::string::npos);
  std::uint8_t mask[16];
  std::fill_n(mask, 15, 1);
  mask[15] = 0;
  i.call.key_mask = ConstTensorView::mask(mask, 2, 16);
  i.call.key_mask.strides[0] = 0;
  EXPECT_EQ(outcome({}, false, forward(KeysGiven::some)), "");
  EXPECT_EQ(outcome({}, true, backward(KeysGiven::some)), "");
}

TEST(BadInput, SlicesOfOneFusedTensorAreFine) {
  // qkv [B, N, 3, H, D], gradients likewise: interleaved, but no element is shared.
  Tensor qkv(DType::f32, 1, 16, 12, 8), dqkv(DType::f32, 1, 16, 12, 8);
  qkv.fill_random(1);
  const auto slice = [](Tensor& tensor, int part) {
    TensorView view = tensor.view();
    view.data = static_cast<float*>(view.data) + part * 4 * 8;
    view.sizes[2] = 4;
    return view;
  };
  Tensor out(DType::f32, 1, 16, 4, 8), dout(DType::f32, 1, 16, 4, 8), lse = Tensor::lse(DType::f32, 1, 16, 4);
  dout.fill_random(2);
  const Attention attention(Pattern::dense());
  attention.forward(slice(qkv, 0), slice(qkv, 1), slice(qkv, 2), out.view(), lse.view());
  EXPECT_NO_THROW(attention.backward(slice(qkv, 0), slice(qkv, 1), slice(qkv, 2), out.view(), lse.view(), dout.view(),
                                     slice(dqkv, 0), slice(dqkv, 1), slice(dqkv, 2)));
  dqkv.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
    EXPECT_TRUE(std::isfinite(dqkv.at(b, row, head, d)));
  });
  TensorView shifted = slice(dqkv, 0);
  shifted.data = static_cast<float*>(shifted.data) + 4;
  EXPECT_TRUE(may_overlap(shifted, slice(dqkv, 0)));
  EXPECT_FALSE(may_overlap(slice(dqkv, 2), slice(dqkv, 0)));
}

TEST(EmptyInput, IsValidAndReturnsEmpty) {
  for (const Shape& shape : {Shape{0, 16, 2, 2, 8}, Shape{1, 0, 2, 2, 8}, Shape{0, 0, 2, 2, 8}}) {
    EXPECT_NO_THROW(Case(Pattern::dilated({4, 8}, {1, 2}), {}, shape).run());
  }
}

TEST(EmptyInput, IsValidForEveryBlockPattern) {
  for (const char* blocks : {"local_window(512)", "strided(512)", "dilated_sparse(1,2)", "global_local(16,64)",
                             "global_local(<=16,64)", "hierarchical", "random(0.5)", "adaptive(0.5)", "bigbird",
                             "bigbird(128)", "longformer", "longformer(512,64)"}) {
    for (const std::string& kernel : kernels_here()) {
      for (const bool causal : {false, true}) {
        Options options;
        options.causal = causal;
        const Pattern pattern = Pattern::parse(blocks);
        EXPECT_NO_THROW(Case(pattern, options, {1, 0, 2, 2, 8}).run(kernel)) << blocks << " on " << kernel;
        EXPECT_NO_THROW(Case(pattern, options, {0, 0, 2, 2, 8}).run(kernel)) << blocks << " on " << kernel;
        if (pattern.branches()[0].mask->adaptive_density() > 0) continue;  // those mask no segments
        const Pattern in_branch = Pattern::longnet({64, 128}, {1, 2}).with_mask(1, *pattern.branches()[0].mask);
        EXPECT_NO_THROW(Case(in_branch, options, {1, 0, 2, 2, 8}).run(kernel)) << blocks << " on " << kernel;
      }
    }
  }
}

TEST(EmptyInput, WithoutQueriesKeyGradientsAreZero) {
  for (const std::string& kernel : kernels_here()) {
    Case c(Pattern::dense(), {}, {1, 16, 2, 2, 8}, DType::f32, Layout::bnhd, {{3, 0}});
    const Results r = c.run(kernel);
    r.dk.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
      EXPECT_EQ(r.dk.at(b, row, head, d), 0);
    });
  }
}

TEST(Cancel, FlagAndHookStopTheCall) {
  Case c(Pattern::dense(), {}, {1, 600, 4, 4, 64});
  const std::atomic<bool> cancel{true};
  Tensor out(DType::f32, 1, 600, 4, 64);
  for (const std::string& kernel : kernels_here()) {
    Options options;
    options.kernel = kernel;
    const Attention attention(Pattern::dense(), options);
    Call call;
    call.cancel = &cancel;
    EXPECT_THROW(attention.forward(c.q.view(), c.k.view(), c.v.view(), out.view(), {}, call), Cancelled) << kernel;
  }
  // The hook is asked every now and then, so use the kernel that takes long enough.
  Options options;
  options.kernel = "reference";
  int calls = 0;
  double last = 0;
  Call call;
  call.progress = [&](double done) {
    EXPECT_GE(done, last);
    last = done;
    return ++calls < 2;
  };
  EXPECT_THROW(Attention(Pattern::dense(), options).forward(c.q.view(), c.k.view(), c.v.view(), out.view(), {}, call),
               Cancelled);
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace longspan::testing
