// Block masks in the Hopper backward: all sizes of blocks, heads of all widths, branches that share rows, options, each
// also deterministic, against the reference; and, without a GPU, the tiles that lists become.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>

#include "gpu/hopper_block_cases.h"
#include "kernels/cuda/mask_lists.h"
#include "kernels/hopper/backward_listed.h"

namespace longspan::testing {
namespace {

/// Branches that share rows: of two masks, and of a mask and none.
Pattern shared(int block) {
  const std::string size = std::to_string(block);
  return Pattern::parse("longnet 800/1{block=" + size + " local_window(256)} 1600/2{block=" + size +
                        " random(0.5,3)} 700/3");
}

/// Wide heads, and branches that share rows, which run in kernels with options only.
std::vector<BlockSetting> more_settings() {
  return {{"local_d256", local_blocks, {1, 1101, 2, 2, 256}, {}, {}},
          {"global_long_d192", global, {1, 5000, 1, 1, 192}, {}, {}},
          {"random_d160", random, {2, 900, 2, 1, 160}, {}, {}},
          {"adaptive_d256", adaptive, {1, 1000, 2, 2, 256}, {}, {}},
          {"shared", shared, {2, 1700, 3, 3, 64}, {}, {}},
          {"shared_d48", shared, {2, 1701, 4, 2, 48}, {1701, 1000}, {}},
          {"shared_wide", shared, {1, 1700, 2, 1, 128}, {}, {}},
          {"shared_d256", shared, {1, 1300, 2, 2, 256}, {}, {}}};
}
std::vector<BlockSetting> settings() {
  std::vector<BlockSetting> all = block_settings(), more = more_settings();
  std::erase_if(all, [](const BlockSetting& setting) { return !setting.ranges.empty(); });
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

enum class With { nothing, key_mask, dropout };
constexpr const char* kWith[] = {"", "_key_mask", "_dropout"};

using Parameters = std::tuple<BlockSetting, int, bool, With>;
class HopperBackwardBlocks : public ::testing::TestWithParam<Parameters> {
 protected:
  Case make() const {
    const auto& [setting, block, causal, option] = GetParam();
    const bool half = (block / 16 + static_cast<int>(option)) % 2 == (causal ? 0 : 1);
    Case c(setting.pattern(block), with(causal), setting.shape, half ? DType::f16 : DType::bf16,
           causal ? Layout::bhnd : Layout::bnhd);
    c.lengths = setting.lengths;
    if (option == With::key_mask) {
      for (std::int64_t i = 0; i < c.shape.batch * c.shape.tokens; ++i)
        c.key_mask.push_back((static_cast<std::uint64_t>(i) * 2654435761u >> 5) % 7 != 0);
    } else if (option == With::dropout) {
      c.options.dropout = 0.3;
      c.seed = 0x1234567890abcdefu;
    }
    return c;
  }
  static const Results& run(const Case& c, DeviceCase& device) {
    for (const DeviceTensor* gradient : {&device.dq, &device.dk, &device.dv}) gradient->poison();
    device.backward(Attention(c.pattern, c.options), device.call());
    return device.download();
  }
};

void expect_close(const char* name, const Tensor& got, const reference::ExpectedTensor& want) {
  const auto comparison = reference::compare(got.view(), want);
  EXPECT_LE(comparison.over_tolerance, 1) << name << " " << comparison.worst;
  EXPECT_LE(comparison.rms_over_model, 2) << name;
}

/// Deterministic gradients of heads over 128 are another kernel's.
TEST_P(HopperBackwardBlocks, MatchesReferenceAndRepeats) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  Case c = make();
  DeviceCase device(c);
  Options any = c.options;
  any.kernel.clear();
  const Attention forward(c.pattern, any);
  Case fixed = c;
  if (const auto& mask = c.pattern.branches()[0].mask; mask && mask->adaptive_density() > 0)
    fixed.pattern = Pattern::block_sparse(adaptive_mask(forward, device.q.view(), device.k.view(), device.call()));
  const reference::Expectation want = fixed.expected(true);
  device.forward(forward, device.call());
  for (const bool deterministic : {false, true}) {
    if (deterministic && c.shape.head_dim > 128) continue;
    c.options.deterministic = deterministic;
    const Results first = run(c, device);
    expect_close("dq", first.dq, want.dq);
    expect_close("dk", first.dk, want.dk);
    expect_close("dv", first.dv, want.dv);
    for (int i = 0; deterministic && i < 10; ++i) {
      const Results& again = run(c, device);
      ASSERT_EQ(again.dq, first.dq) << "repeat " << i;
      ASSERT_EQ(again.dk, first.dk) << "repeat " << i;
      ASSERT_EQ(again.dv, first.dv) << "repeat " << i;
    }
  }
}

std::string name_of_case(const ::testing::TestParamInfo<Parameters>& parameters) {
  const auto& [setting, block, causal, option] = parameters.param;
  return std::string(setting.name) + "_" + std::to_string(block) + kWith[static_cast<int>(option)] +
         (causal ? "_causal" : "");
}
INSTANTIATE_TEST_SUITE_P(Hopper, HopperBackwardBlocks,
                         ::testing::Combine(::testing::ValuesIn(settings()), ::testing::Values(16, 32, 64, 128),
                                            ::testing::Bool(), ::testing::Values(With::nothing)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(HopperOptions, HopperBackwardBlocks,
                         ::testing::Combine(::testing::ValuesIn(more_settings()), ::testing::Values(16, 64),
                                            ::testing::Bool(), ::testing::Values(With::key_mask, With::dropout)),
                         name_of_case);

/// Every pair of a mask is in the tiles of its keys, once, and nothing else is.
class ListedTiles : public ::testing::TestWithParam<std::tuple<int, int, int, bool, bool>> {};

TEST_P(ListedTiles, HoldThePairsOfTheMask) {
  const auto [block, keys, queries, causal, splits] = GetParam();
  const std::int64_t tokens = 40 * block + 3, blocks = 41;
  const BlockMask mask = gaps(block, 2, tokens);
  const cuda::ListShape shape{keys, true, splits, causal};
  const cuda::HostLists host = cuda::make_lists(mask, shape);
  const cuda::BlockLists lists =
      cuda::view_of(host, mask, shape, host.places.data(), host.blocks.data(), host.bits.data());
  std::vector<hopper::ListedTile> tiles(
      static_cast<std::size_t>(mask.active_blocks() * std::max(1, block / queries) * std::max(1, block / keys)));
  for (int head = 0; head < 2; ++head) {
    std::set<std::pair<std::int64_t, std::int64_t>> seen;  // chunks of queries and of keys
    for (int index = 0; index < lists.place_count; ++index) {
      const cuda::BlockPlace& place = lists.place(0, head, index);
      if (place.tile < 0) continue;
      hopper::ListedTile* const own = tiles.data() + hopper::listed_from(lists, place, queries);
      hopper::list_tiles(lists, place, queries, own);
      const int count = place.count == 0 ? 0 : own[0].tiles;
      ASSERT_LE(own + count, tiles.data() + tiles.size());
      for (int i = 0; i < count; ++i) {
        if (i > 0) {
          ASSERT_LT(own[i - 1].first, own[i].first);
        }
        EXPECT_TRUE(own[i].meets(0) || own[i].meets(1));
        EXPECT_EQ(hopper::tiles_before(own, count, own[i].first), i);
        for (int key = 0; key < keys / 16; ++key) {
          for (int query = 0; query < 8; ++query) {
            if (!(own[i].sees[key / 4] >> (key % 4 * 8 + query) & 1)) continue;
            ASSERT_LT(query, queries / 16);
            EXPECT_TRUE(seen.emplace(own[i].first / 16 + query, place.tile * keys / 16 + key).second);
          }
        }
      }
    }
    std::set<std::pair<std::int64_t, std::int64_t>> want;
    for (std::int64_t row = 0; row < blocks; ++row) {
      for (const std::int32_t column : mask.row(head, row)) {
        if (causal && column > row) continue;
        for (int i = 0; i < block / 16 * (block / 16); ++i)
          want.emplace(row * block / 16 + i % (block / 16), column * block / 16 + i / (block / 16));
      }
    }
    EXPECT_EQ(seen, want);
  }
}
INSTANTIATE_TEST_SUITE_P(Hopper, ListedTiles,
                         ::testing::Combine(::testing::Values(16, 32, 64, 128), ::testing::Values(64, 128),
                                            ::testing::Values(64, 128), ::testing::Bool(), ::testing::Bool()));

/// A call of blocks that no longer fit would silently take many times as long.
TEST(HopperBackwardBlockChoice, BlockMasksRunOnTheHopperKernel) {
  LONGSPAN_NEEDS_HOPPER(Pass::backward);
  for (const int block : {16, 32, 64, 128}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      for (const bool deterministic : {false, true}) {
        if (deterministic && head_dim > 128) continue;
        for (Pattern (*const pattern)(int) : {local_blocks, adaptive, shared}) {
          Options options;
          options.deterministic = deterministic;
          EXPECT_EQ(Attention(pattern(block), options).plan(problem_of(1700, 4, head_dim))->kernel_name(Pass::backward),
                    kHopper)
              << block << " " << head_dim << " " << deterministic;
        }
      }
    }
  }
}

}  // namespace
}  // namespace longspan::testing
