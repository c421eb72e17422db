// One test for each row of "known bugs of earlier implementations" that applies to one device, named after it. Each
// runs on every kernel of this machine.
#include <cmath>

#include "support/case.h"

namespace longspan::testing {
namespace {

class KnownBugs : public ::testing::TestWithParam<std::string> {};

/// out of a case whose v is all ones: the sum of each row's weights.
void expect_rows_sum_to_one(Case c, const std::string& kernel, double factor = 1) {
  c.v.for_each(
      [&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) { c.v.set(b, row, head, d, 1); });
  const Results r = c.run(kernel, false);
  r.out.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
    const bool covered = std::isfinite(r.lse.at(b, row, head));
    EXPECT_NEAR(r.out.at(b, row, head, d), covered ? factor : 0.0, 1e-5) << row << " " << head;
  });
}

/// Changing v of one token changes its neighbours in the sequence, and nothing of other heads.
TEST_P(KnownBugs, SoftmaxRunsOverTokensNotHeads) {
  Case c(Pattern::dense(), {}, {1, 12, 3, 3, 8});
  const Results before = c.run(GetParam(), false);
  c.v.set(0, 5, 1, 0, 50);
  const Results after = c.run(GetParam(), false);
  for (std::int64_t row = 0; row < 12; ++row) {
    EXPECT_NE(before.out.at(0, row, 1, 0), after.out.at(0, row, 1, 0));
    EXPECT_EQ(before.out.at(0, row, 0, 0), after.out.at(0, row, 0, 0));
    EXPECT_EQ(before.out.at(0, row, 2, 0), after.out.at(0, row, 2, 0));
  }
}

TEST_P(KnownBugs, UnequalHeadGroupsWriteEveryHead) {  // H = 12, 5 groups: heads 10 and 11 were left unwritten
  Case c(Pattern::dilated({16, 16, 16, 16, 16}, {1, 1, 1, 1, 1}), {}, {1, 32, 12, 12, 8});
  const Results r = c.run(GetParam(), false);
  r.out.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
    EXPECT_TRUE(std::isfinite(r.out.at(b, row, head, d)) && r.out.at(b, row, head, d) != 0);
  });
  expect_rows_sum_to_one(c, GetParam());
}

/// Dividing the result by its own sum over tokens broke causality; weights that sum to 1 need no such step.
TEST_P(KnownBugs, NoNormalisationOverTheSequence) {
  Options options;
  options.causal = true;
  Case c(Pattern::dilated({16, 32}, {1, 2}), options, {1, 32, 4, 4, 8});
  expect_rows_sum_to_one(c, GetParam());
  const Results before = c.run(GetParam(), false);
  c.v.set(0, 31, 0, 0, 1e3);
  const Results after = c.run(GetParam(), false);
  for (std::int64_t row = 0; row < 31; ++row) EXPECT_EQ(before.out.at(0, row, 0, 0), after.out.at(0, row, 0, 0));
}

TEST_P(KnownBugs, CausalDilationNeverSeesTheFuture) {
  Options options;
  options.causal = true;
  for (const Pattern& pattern : {Pattern::dilated({16, 64}, {3, 5}), Pattern::longnet({16, 64}, {3, 5})}) {
    Case c(pattern, options, {1, 64, 4, 4, 8});
    const Results before = c.run(GetParam(), false);
    for (std::int64_t changed : {0, 17, 40, 63}) {
      Case other = c;
      for (std::int64_t head = 0; head < 4; ++head) {
        for (std::int64_t d = 0; d < 8; ++d) {
          other.k.set(0, changed, head, d, 7);
          other.v.set(0, changed, head, d, -9);
        }
      }
      const Results after = other.run(GetParam(), false);
      for (std::int64_t row = 0; row < changed; ++row) {
        for (std::int64_t head = 0; head < 4; ++head) {
          for (std::int64_t d = 0; d < 8; ++d)
            EXPECT_EQ(before.out.at(0, row, head, d), after.out.at(0, row, head, d)) << row;
        }
      }
    }
  }
}

TEST_P(KnownBugs, BlockSparseHasOneSoftmaxNotOnePerBlock) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    Case c(Pattern::block_sparse(BlockMask::from_rows(16, 1, 4, {{0, 1, 2, 3}, {0, 1}, {0, 2}, {1, 2, 3}})), options,
           {1, 64, 2, 2, 8});
    expect_rows_sum_to_one(c, GetParam());
  }
}

TEST_P(KnownBugs, SegmentsThatDilationDoesNotDivideAreNotShifted) {  // w % r != 0 with several segments
  Case c(Pattern::longnet({10}, {4}, PhaseRule::torchscale), {}, {1, 40, 4, 4, 8});
  const Results r = c.run(GetParam(), false);
  for (std::int64_t row = 0; row < 40; ++row) {
    for (std::int64_t head = 0; head < 4; ++head)
      EXPECT_EQ(std::isfinite(r.lse.at(0, row, head)), row % 10 % 4 == head) << row << " " << head;
  }
  c.expect_matches(false);
}

TEST_P(KnownBugs, KeyPaddingMasksAreHonoured) {
  Case c(Pattern::dilated({16, 32}, {1, 2}), {}, {1, 32, 4, 4, 8});
  c.key_mask.assign(32, 1);
  for (std::size_t i = 20; i < 32; ++i) c.key_mask[i] = 0;
  const Results before = c.run(GetParam(), false);
  for (std::int64_t row = 20; row < 32; ++row) {
    for (std::int64_t d = 0; d < 8; ++d) c.v.set(0, row, 0, d, std::nan(""));
  }
  EXPECT_EQ(before.out, c.run(GetParam(), false).out);
}

TEST_P(KnownBugs, PaddedEntryEqualsTheEntryRunAlone) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    const Pattern pattern = Pattern::longnet({12, 30, 64}, {1, 2, 4}, PhaseRule::torchscale).with_pad_keys();
    Case both(pattern, options, {2, 50, 4, 4, 8});
    both.lengths = {50, 27};
    const Results padded = both.run(GetParam());
    Case alone(pattern, options, {1, 27, 4, 4, 8});
    const auto copy_second_entry = [](auto& target, const auto& source) {
      target.for_each([&](std::int64_t, std::int64_t row, std::int64_t head, std::int64_t d) {
        target.set(0, row, head, d, source.at(1, row, head, d));
      });
    };
    copy_second_entry(alone.q, both.q);
    copy_second_entry(alone.k, both.k);
    copy_second_entry(alone.v, both.v);
    copy_second_entry(alone.dout, both.dout);
    const Results single = alone.run(GetParam());
    const auto expect_second_entry = [](const auto& one, const auto& of_two) {
      one.for_each([&](std::int64_t, std::int64_t row, std::int64_t head, std::int64_t d) {
        EXPECT_NEAR(one.at(0, row, head, d), of_two.at(1, row, head, d), 1e-5);
      });
    };
    expect_second_entry(single.out, padded.out);
    expect_second_entry(single.dq, padded.dq);
    expect_second_entry(single.dk, padded.dk);
    expect_second_entry(single.dv, padded.dv);
    for (std::int64_t row = 27; row < 50; ++row) EXPECT_EQ(padded.out.at(1, row, 0, 0), 0);
  }
}

TEST_P(KnownBugs, DecodingEqualsTheFullForward) {  // wrong in torchscale once longer than the smallest segment
  Options options;
  options.causal = true;
  const Pattern pattern = Pattern::longnet({8, 24}, {1, 3});
  Case whole(pattern, options, {1, 40, 3, 3, 8});
  const Results full = whole.run(GetParam(), false);
  for (std::int64_t position = 0; position < 40; ++position) {
    // What a decoder has: the keys so far, and one query.
    Case step(pattern, options, {1, position + 1, 3, 3, 8}, DType::f32, Layout::bnhd, {{position, 1}});
    step.q.for_each([&](std::int64_t, std::int64_t, std::int64_t head, std::int64_t d) {
      step.q.set(0, 0, head, d, whole.q.at(0, position, head, d));
    });
    const auto copy_first_rows = [](auto& target, const auto& source) {
      target.for_each([&](std::int64_t, std::int64_t row, std::int64_t head, std::int64_t d) {
        target.set(0, row, head, d, source.at(0, row, head, d));
      });
    };
    copy_first_rows(step.k, whole.k);
    copy_first_rows(step.v, whole.v);
    const Results one = step.run(GetParam(), false);
    one.out.for_each([&](std::int64_t, std::int64_t, std::int64_t head, std::int64_t d) {
      EXPECT_NEAR(one.out.at(0, 0, head, d), full.out.at(0, position, head, d), 1e-6);
    });
  }
}

TEST_P(KnownBugs, DropoutIsOffUnlessAsked) {  // attention dropout was active in evaluation
  Case c(Pattern::dilated({16, 32}, {1, 2}), {}, {1, 32, 4, 4, 8});
  c.seed = 1;
  const Results first = c.run(GetParam(), false);
  c.seed = 2;
  EXPECT_EQ(first.out, c.run(GetParam(), false).out);
  c.options.dropout = 0.5;
  EXPECT_FALSE(first.out == c.run(GetParam(), false).out);
}

TEST_P(KnownBugs, TwoEmptyBranchesGiveMinusInfinityNotNaN) {
  Case c(Pattern::longnet({8, 16}, {2, 4}), {}, {1, 32, 2, 2, 8});
  c.key_mask.assign(32, 0);
  const Results r = c.run(GetParam());
  for (const Tensor* tensor : {&r.out, &r.dq, &r.dk, &r.dv}) {
    tensor->for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
      EXPECT_EQ(tensor->at(b, row, head, d), 0);
    });
  }
  r.lse.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t) {
    EXPECT_EQ(r.lse.at(b, row, head), -INFINITY);
  });
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, KnownBugs, ::testing::ValuesIn(kernels_here()), test_name);

/// What must hold to the bit, or without leaks, on every kernel.
class Bits : public ::testing::TestWithParam<std::tuple<std::string, DType>> {
 protected:
  std::string kernel() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
};

TEST_P(Bits, ChunkedQueriesEqualTheWhole) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    const Pattern pattern = Pattern::longnet({48, 200, 333}, {1, 3, 2});
    Case whole(pattern, options, {1, 333, 3, 3, 40}, dtype());
    const Results all = whole.run(kernel(), false);
    for (const std::int64_t chunk : {1, 7, 100}) {
      for (std::int64_t start = 0; start < 333; start += chunk == 1 ? 41 : chunk) {
        const std::int64_t count = std::min(chunk, 333 - start);
        Case part(pattern, options, {1, 333, 3, 3, 40}, dtype(), Layout::bnhd, {{start, count}});
        part.q.for_each([&](std::int64_t, std::int64_t row, std::int64_t head, std::int64_t d) {
          part.q.set(0, row, head, d, whole.q.at(0, start + row, head, d));
        });
        const Results r = part.run(kernel(), false);
        r.out.for_each([&](std::int64_t, std::int64_t row, std::int64_t head, std::int64_t d) {
          EXPECT_EQ(r.out.at(0, row, head, d), all.out.at(0, start + row, head, d)) << start + row;
        });
        r.lse.for_each([&](std::int64_t, std::int64_t row, std::int64_t head, std::int64_t) {
          EXPECT_EQ(r.lse.at(0, row, head), all.lse.at(0, start + row, head));
        });
      }
    }
  }
}

TEST_P(Bits, CausalQueriesMayBeginAnywhere) {
  // Tiles of queries and of keys then meet off the diagonal: dq once took in numbers of the tile before.
  Options options;
  options.causal = true;
  const Case c(Pattern::dense(), options, {1, 331, 2, 2, 24}, dtype());
  const Results whole = c.run(kernel());
  for (const std::int64_t start : {7, 100, 152, 200, 287}) {
    Case part(c.pattern, options, c.shape, dtype(), Layout::bnhd, {{start, 331 - start}});
    const auto copy = [&](const Tensor& from, Tensor& to) {
      to.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t column) {
        to.set(b, row, head, column, from.at(b, start + row, head, column));
      });
    };
    copy(c.q, part.q);
    copy(c.dout, part.dout);
    const Results some = part.run(kernel());
    double error = 0;
    some.dq.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t column) {
      error = std::max(error, std::abs(some.dq.at(b, row, head, column) - whole.dq.at(b, start + row, head, column)));
    });
    EXPECT_LE(error, dtype() == DType::f32 ? 1e-5 : 0x1p-6) << "from " << start;  // one rounding of values up to 2
  }
}

TEST_P(Bits, PiecesEqualTheContiguous) {
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    Case c(Pattern::longnet({48, 200}, {1, 3}), options, {2, 230, 4, 2, 24}, dtype());
    const Results whole = c.run(kernel());
    Case other = c;
    const auto rows = [&](const Tensor& tensor, std::int64_t first, std::int64_t count) {
      ConstTensorView view = tensor.view();
      view.data = view.at<std::uint8_t>(0, 0, 0) + first * view.strides[1] * size_of(view.dtype);
      view.sizes[1] = count;
      return view;
    };
    // Three stretches, the middle one as its even and its odd positions.
    auto even_k = rows(c.k, 90, 30), even_v = rows(c.v, 90, 30), odd_k = rows(c.k, 91, 30), odd_v = rows(c.v, 91, 30);
    for (ConstTensorView* view : {&even_k, &even_v, &odd_k, &odd_v}) view->strides[1] *= 2;
    other.pieces = {{0, 1, rows(c.k, 0, 90), rows(c.v, 0, 90)},
                    {90, 2, even_k, even_v},
                    {91, 2, odd_k, odd_v},
                    {150, 1, rows(c.k, 150, 80), rows(c.v, 150, 80)}};
    const Results pieced = other.run(kernel());
    EXPECT_EQ(whole.out, pieced.out);
    EXPECT_EQ(whole.lse, pieced.lse);
    EXPECT_EQ(whole.dq, pieced.dq);
    EXPECT_EQ(whole.dk, pieced.dk);
    EXPECT_EQ(whole.dv, pieced.dv);
  }
}

TEST_P(Bits, AnyNumberOfThreadsGivesTheSame) {
  for (const Pattern& pattern :
       {Pattern::dense(), Pattern::dilated({64, 200}, {1, 3}), Pattern::longnet({64, 300}, {1, 3})}) {
    for (const bool causal : {false, true}) {
      Options options;
      options.causal = causal;
      Case c(pattern, options, {1, 300, 2, 1, 32}, dtype());
      set_num_threads(1);
      const Results one = c.run(kernel());
      for (const int threads : {2, 3, 8, 16}) {
        set_num_threads(threads);
        const Results many = c.run(kernel());
        EXPECT_EQ(one.out, many.out);
        EXPECT_EQ(one.lse, many.lse);
        EXPECT_EQ(one.dq, many.dq);
        EXPECT_EQ(one.dk, many.dk);
        EXPECT_EQ(one.dv, many.dv);
      }
      set_num_threads(0);
    }
  }
}

TEST_P(Bits, ExcludedRowsMayHoldAnything) {
  for (const double poison : {std::nan(""), double{INFINITY}}) {
    for (const bool causal : {false, true}) {
      Options options;
      options.causal = causal;
      Case c(Pattern::longnet({40, 128}, {1, 3}), options, {2, 128, 3, 3, 24}, dtype());
      c.lengths = {128, 77};
      c.key_mask.assign(256, 1);
      for (const std::size_t row : {5u, 6u, 63u, 64u}) c.key_mask[row] = 0;
      const Results clean = c.run(kernel());
      for (std::int64_t head = 0; head < 3; ++head) {
        for (std::int64_t d = 0; d < 24; ++d) {
          for (const std::int64_t row : {5, 6, 63, 64}) {
            c.k.set(0, row, head, d, poison);
            c.v.set(0, row, head, d, poison);
          }
          for (std::int64_t row = 77; row < 128; ++row) {
            for (Tensor* tensor : {&c.q, &c.k, &c.v, &c.dout}) tensor->set(1, row, head, d, poison);
          }
        }
      }
      const Results dirty = c.run(kernel());
      EXPECT_EQ(clean.out, dirty.out);
      EXPECT_EQ(clean.lse, dirty.lse);
      EXPECT_EQ(clean.dq, dirty.dq);
      EXPECT_EQ(clean.dk, dirty.dk);
      EXPECT_EQ(clean.dv, dirty.dv);
    }
  }
}

TEST_P(Bits, NaNStaysInItsStrandAndReachesAllOfIt) {
  Case c(Pattern::longnet({32}, {2}), {}, {1, 96, 2, 2, 16}, dtype());
  const Results clean = c.run(kernel());
  c.k.set(0, 40, 0, 3, std::nan(""));  // head 0, phase 0: even rows of segment 1
  const Results dirty = c.run(kernel());
  for (std::int64_t row = 0; row < 96; ++row) {
    for (std::int64_t head = 0; head < 2; ++head) {
      const bool hit = head == 0 && row >= 32 && row < 64 && row % 2 == 0;
      for (std::int64_t d = 0; d < 16; ++d) {
        if (hit) {
          EXPECT_TRUE(std::isnan(dirty.out.at(0, row, head, d))) << row;
        } else {
          EXPECT_EQ(clean.out.at(0, row, head, d), dirty.out.at(0, row, head, d)) << row;
          EXPECT_EQ(clean.dq.at(0, row, head, d), dirty.dq.at(0, row, head, d)) << row;
          EXPECT_EQ(clean.dk.at(0, row, head, d), dirty.dk.at(0, row, head, d)) << row;
          EXPECT_EQ(clean.dv.at(0, row, head, d), dirty.dv.at(0, row, head, d)) << row;
        }
      }
    }
  }
  // NaN in a query gives NaN out for that row alone.
  Case query(Pattern::dense(), {}, {1, 40, 1, 1, 16}, dtype());
  query.q.set(0, 7, 0, 0, std::nan(""));
  const Results r = query.run(kernel(), false);
  for (std::int64_t row = 0; row < 40; ++row) {
    EXPECT_EQ(std::isnan(r.out.at(0, row, 0, 0)), row == 7) << row;
    EXPECT_EQ(std::isnan(r.lse.at(0, row, 0)), row == 7) << row;
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, Bits,
                         ::testing::Combine(::testing::ValuesIn(kernels_here()),
                                            ::testing::Values(DType::f32, DType::bf16, DType::f16)),
                         [](const auto& parameter) {
                           std::string name =
                               std::get<0>(parameter.param) + "_" + std::string(name_of(std::get<1>(parameter.param)));
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace longspan::testing
