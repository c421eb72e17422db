// The arithmetic behind a launch, on the host: items name every row of every head exactly once, whatever the pattern
// and the query ranges. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "kernels/cuda/mask_lists.h"
#include "kernels/cuda/prepare.h"
#include "plan/key_rows.h"

namespace longspan::cuda {
namespace {

struct Setting {
  Pattern pattern;
  std::vector<RowRange> ranges;
};

std::vector<Setting> settings() {
  const Pattern ragged = Pattern::dilated({150, 230}, {3, 7}), even = Pattern::dilated({64, 128, 512}, {1, 2, 4});
  const Pattern beyond = Pattern::dilated({4, 1}, {9, 3});
  const Pattern skipping = Pattern::dilated({64, 4096}, {1, 2}).with_long_segments(LongSegments::skip);
  std::vector<RowRange> many;
  for (std::int64_t i = 0; i < 30; ++i) many.push_back({i * 9, 5});
  std::vector<Setting> list;
  for (const Pattern& pattern : {Pattern::dense(), ragged, even, beyond, skipping}) {
    for (const auto& ranges :
         {std::vector<RowRange>{{0, 301}}, {{299, 2}}, {{60, 100}, {5, 1}, {0, 0}, {60, 100}}, many}) {
      list.push_back({pattern, ranges});
    }
  }
  return list;
}

/// A plan and arguments whose tensors are never touched.
struct Arguments {
  Arguments(const Setting& setting, bool causal, std::int64_t heads = 3) : ranges(setting.ranges) {
    problem.dtype = DType::bf16;
    problem.tokens = 301;
    problem.heads = heads;
    problem.kv_heads = heads == 3 ? 3 : heads / 3;
    problem.batch = 2;
    for (const RowRange& range : ranges) problem.query_rows += range.count;
    options.causal = causal;
    plan = std::make_unique<Plan>(setting.pattern, options, problem);
  }
  std::vector<RowRange> ranges;
  Problem problem;
  Options options;
  Call call;
  std::unique_ptr<Plan> plan;
  std::byte workspace[256];
};

using Row = std::tuple<int, int, std::int64_t>;  // entry, head, row

/// Also where the last tiles of a launch are cut in two, as on a GPU of `multiprocessors`; 0 cuts none.
TEST(GpuWork, ForwardItemsWriteEveryRowOnce) {
  int cut = 0, mixed = 0;
  for (const int multiprocessors : {0, 50, 300}) {
    for (const Setting& setting : settings()) {
      for (const bool causal : {false, true}) {
        Arguments a(setting, causal);
        std::map<Row, int> written;
        const ForwardArguments forward{*a.plan, a.call, a.ranges, {}, {}, {}, {}, {}, 1, a.workspace};
        for_each_launch(forward, {.rows = 16, .parts = true}, true, [&](Launch& launch) {
          EXPECT_EQ(launch.schedule.halved_tiles, 0u);  // whatever an earlier launch had
          if (multiprocessors > 0) halve_last_tiles(launch, multiprocessors, 3);
          cut += launch.schedule.halved_tiles > 0;
          mixed += launch.schedule.halved_tiles > 0 && launch.schedule.whole_tiles > 0;
          for (std::int64_t flat = 0; flat < launch.schedule.items; ++flat) {
            bool half = true;
            const Item item = launch.schedule.decode_halves(static_cast<unsigned>(flat), half);
            const DeviceRange& range = launch.schedule.ranges[item.range];
            if (item.branch < 0) {
              EXPECT_FALSE(half);
              for (int local = item.tile * kFillRows; local < std::min((item.tile + 1) * kFillRows, range.count);
                   ++local) {
                if (launch.schedule.covered(item.head, range.start + local, launch.tensors.tokens, 0,
                                            launch.schedule.branch_count))
                  continue;
                ++written[{item.entry, item.head, range.first_row + local}];
              }
              continue;
            }
            const StrandRows strand =
                launch.schedule.branches[item.branch].strand(item.head, item.segment, launch.tensors.tokens);
            const StrandQueries queries = range.of(strand);
            const int rows = half ? 8 : 16;
            for (int i = item.tile * rows; i < std::min((item.tile + 1) * rows, queries.count); ++i) {
              const std::int64_t row = queries.q_row + static_cast<std::int64_t>(i) * strand.stride;
              EXPECT_EQ(range.start + row - range.first_row, strand.start + (queries.begin + i) * strand.stride);
              ++written[{item.entry, item.head, row}];
            }
          }
        });
        ASSERT_EQ(written.size(), static_cast<std::size_t>(2 * 3 * a.problem.query_rows))
            << setting.pattern.to_string();
        for (const auto& [row, count] : written) ASSERT_EQ(count, 1) << setting.pattern.to_string();
      }
    }
  }
  EXPECT_GT(cut, mixed);
  EXPECT_GT(mixed, 0);
}

/// Tiles are cut where that shortens the longest share of a multiprocessor, and only among items that run at once.
TEST(GpuWork, LastTilesAreHalvedWhereSharesDiffer) {
  Arguments a({Pattern::dense(), {{0, 301}}}, false);  // 6 strands of 19 tiles
  const ForwardArguments forward{*a.plan, a.call, a.ranges, {}, {}, {}, {}, {}, 1, a.workspace};
  const auto halved = [&](int multiprocessors, bool merges = false) {
    unsigned count = 0;
    for_each_launch(forward, {.rows = 16, .parts = true}, true, [&](Launch& launch) {
      launch.schedule.merges = merges;
      const std::int64_t items = launch.schedule.items;
      halve_last_tiles(launch, multiprocessors, 3);
      EXPECT_EQ(launch.schedule.items, items + launch.schedule.halved_tiles);
      count = launch.schedule.halved_tiles;
    });
    return count;
  };
  EXPECT_EQ(halved(300), 114u);  // one half each instead of one tile for some
  EXPECT_EQ(halved(200), 0u);    // 228 halves on 200: two of them are no less than a tile
  EXPECT_EQ(halved(114), 0u);    // even
  EXPECT_EQ(halved(100), 14u);
  EXPECT_EQ(halved(100, true), 0u);
  EXPECT_EQ(halved(60), 0u);
  EXPECT_EQ(halved(50), 14u);  // two and a half at most, not three
  EXPECT_EQ(halved(37), 0u);   // more than three each
}

TEST(GpuWork, StrandsAreThoseOfThePlan) {
  for (const Setting& setting : settings()) {
    Arguments a(setting, false);
    const ForwardArguments forward{*a.plan, a.call, a.ranges, {}, {}, {}, {}, {}, 1, a.workspace};
    for_each_launch(forward, {.rows = 16}, true, [&](Launch& launch) {
      for (std::size_t b = 0; b < a.plan->branches().size(); ++b) {
        const BranchPlan& want = a.plan->branches()[b];
        for (const int length : {0, 1, 63, 150, 301}) {
          if (!want.active(length)) continue;
          for (int head = 0; head < 3; ++head) {
            for (int segment = 0; segment < want.segments(length); ++segment) {
              const Strand strand = want.strand(head, segment, length);
              const StrandRows got = launch.schedule.branches[b].strand(head, segment, length);
              EXPECT_EQ(got.count, strand.count);
              if (strand.count > 0) {
                EXPECT_EQ(got.start, strand.start);
              }
            }
          }
        }
      }
    });
  }
}

TEST(GpuWork, PiecesAreSearchedAsOnTheHost) {
  // Some of the keys only, as a round of a ring has them: what no piece has is nowhere. Nothing is read.
  Arguments a({Pattern::dense(), {{0, 301}}}, false, 6);
  static std::byte memory[8192];
  const auto rows = [&](std::int64_t count, std::int64_t heads, int place) {
    return ConstTensorView::bnhd(memory + place, DType::bf16, 2, count, heads, 16);
  };
  const std::vector<KeyPiece> pieces = {{10, 1, rows(50, 2, 0), rows(50, 2, 2), 0},
                                        {100, 7, rows(20, 1, 4), rows(20, 1, 6), 1},
                                        {200, 3, rows(0, 2, 0), rows(0, 2, 0), 0},  // a rank without rows
                                        {40, 2, rows(30, 1, 6), rows(30, 1, 4), 0}};
  a.call.pieces = pieces;
  const ConstTensorView none{nullptr, DType::bf16, {}, {2, 301, 2, 16}, {0, 0, 0, 1}};
  const KeyRows keys(none, none, pieces);
  std::vector<PieceGradients> gradients;
  for (const KeyPiece& piece : pieces) {
    const Rows sums{reinterpret_cast<char*>(memory), piece.k.strides[0], piece.k.strides[1], piece.k.strides[2]};
    gradients.push_back({sums, sums});
  }
  int found = 0, missing = 0;
  const ForwardArguments forward{*a.plan, a.call, a.ranges, {}, none, none, {}, {}, 1, a.workspace};
  for_each_launch(forward, {.rows = 16}, true, [&](Launch& launch) {
    launch.gradients.piece_gradients = gradients.data();
    for (int entry = 0; entry < 2; ++entry) {
      for (int kv_head = 0; kv_head < 2; ++kv_head) {
        for (int position = 0; position < 301; ++position) {
          const RowRun want = keys.run(entry, kv_head, Strand{position, 1, 1}, 0, 1);
          const char *k_row, *v_row;
          launch.tensors.key_row(entry, kv_head, position, 2, k_row, v_row);
          EXPECT_EQ(static_cast<const void*>(k_row), want.k);
          EXPECT_EQ(static_cast<const void*>(v_row), want.v);
          EXPECT_EQ(launch.gradient_row(entry, kv_head, position, false) != nullptr, want.count > 0);
          ++(want.count > 0 ? found : missing);
        }
      }
    }
  });
  EXPECT_EQ(found, 2 * (50 + 50 + 20 + 30 - 10));  // 10 rows of the last piece are the first one's, too
  EXPECT_EQ(found + missing, 2 * 2 * 301);
}

TEST(GpuWork, BackwardItemsHoldEveryKeyOnce) {
  for (const Setting& setting : settings()) {
    if (setting.ranges.size() > 1) continue;
    Arguments a(setting, true);
    if (a.problem.query_rows != a.problem.tokens) continue;
    std::map<Row, int> held;
    const BackwardArguments backward{*a.plan, a.call, a.ranges, {}, {}, {}, {}, {}, {}, {}, {}, {}, 1, a.workspace};
    for_each_launch(backward, {.rows = 16, .by_keys = true, .fills = false, .parts = true}, true, [&](Launch& launch) {
      EXPECT_FALSE(launch.gradients.sum_keys);
      for (std::int64_t flat = 0; flat < launch.schedule.items; ++flat) {
        const Item item = launch.schedule.decode(flat);
        const StrandRows strand =
            launch.schedule.branches[item.branch].strand(item.head, item.segment, launch.tensors.tokens);
        for (int key = item.tile * 16; key < std::min((item.tile + 1) * 16, strand.count); ++key) {
          ++held[{item.entry, item.head, strand.start + key * strand.stride}];
        }
      }
      for (int head = 0; head < 3; ++head) {
        for (int position = 0; position < 301; ++position) {
          const bool covered = launch.schedule.covered(head, position, 301, 0, launch.schedule.branch_count);
          EXPECT_EQ((held[{0, head, position}]), covered ? 1 : 0) << setting.pattern.to_string() << " " << position;
        }
      }
    });
  }
}

/// Deterministic gradients: in a launch no row of keys, nor of queries, has two writers; together they are the whole.
TEST(GpuWork, WritersOfARowComeInDifferentLaunches) {
  const Pattern mixed = Pattern::longnet({64, 200, 1024}, {1, 3, 6});
  for (const Pattern& pattern : {Pattern::dense(), mixed, Pattern::dilated({150, 230, 301}, {3, 7, 2})}) {
    for (const bool by_keys : {false, true}) {
      Arguments a({pattern, {{0, 100}, {100, 201}}}, true, 6);
      const int group = by_keys ? 3 : 1;
      const BackwardArguments backward{*a.plan, a.call, a.ranges, {}, {}, {}, {}, {}, {}, {}, {}, {}, 1, a.workspace};
      for_each_launch(
          backward, {.rows = 16, .by_keys = by_keys, .fills = false, .parts = true}, true, [&](Launch& launch) {
            using Writer = std::tuple<int, int, int, int, int, int>;
            const auto names = [](const Launch& part) {
              std::vector<Writer> list;
              for (unsigned flat = 0; flat < part.schedule.items; ++flat) {
                const Item item = part.schedule.decode(flat);
                list.emplace_back(item.branch, item.range, item.entry, item.head, item.segment, item.tile);
              }
              return list;
            };
            std::vector<Writer> together, whole = names(launch);
            for_each_writer(launch, group, [&](const Launch& part) {
              std::map<Row, int> writers;
              for (const auto& [branch, range, entry, head, segment, tile] : names(part)) {
                together.emplace_back(branch, range, entry, head, segment, tile);
                const StrandRows strand = part.schedule.branches[branch].strand(head, segment, part.tensors.tokens);
                const StrandQueries queries = part.schedule.ranges[range].of(strand);
                const int count = by_keys ? strand.count : queries.count, first = by_keys ? 0 : queries.begin;
                for (int i = tile * 16; i < std::min((tile + 1) * 16, count); ++i)
                  EXPECT_EQ((++writers[{entry, head / group, strand.start + (first + i) * strand.stride}]), 1);
              }
            });
            std::sort(whole.begin(), whole.end());
            std::sort(together.begin(), together.end());
            EXPECT_EQ(together, whole) << pattern.to_string();
          });
    }
  }
}

/// Lists of every tile name each pair of rows that a mask lets attend exactly once, and no other, whatever the strand's
/// length and the range that is asked for.
TEST(GpuWork, BlockListsNameEveryPairOnce) {
  std::mt19937 engine(3);
  for (int trial = 0; trial < 60; ++trial) {
    const int size = 16 << engine() % 4;
    const std::int64_t blocks = 1 + static_cast<std::int64_t>(engine() % 9),
                       heads = 1 + static_cast<std::int64_t>(engine() % 2);
    std::vector<std::uint8_t> dense(static_cast<std::size_t>(heads * blocks * blocks));
    const unsigned one_in = 1 + engine() % 4;
    for (auto& bit : dense) bit = engine() % one_in == 0;
    const BlockMask mask = BlockMask::from_dense(size, heads, blocks, dense);
    const ListShape shape{engine() % 2 ? 64 : 128, engine() % 2 == 0, engine() % 2 == 0, engine() % 2 == 0};
    const HostLists host = make_lists(mask, shape);
    const BlockLists lists = view_of(host, mask, shape, host.places.data(), host.blocks.data(), host.bits.data());
    const int rows = static_cast<int>(blocks) * size - static_cast<int>(engine() % static_cast<unsigned>(size));
    const int begin = static_cast<int>(engine() % static_cast<unsigned>(rows)),
              end = begin + 1 + static_cast<int>(engine() % static_cast<unsigned>(rows - begin));
    for (std::int64_t head = 0; head < heads; ++head) {
      std::map<std::pair<int, int>, int> named;  // {row of the tile, row of the list}
      for (int index = 0; index < lists.place_count; ++index) {
        const BlockPlace& place = lists.place(0, static_cast<int>(head), index);
        if (place.tile < 0) continue;
        ASSERT_TRUE(shape.by_keys || shape.splits || place.tile == index);
        const BlockWalk walk = lists.walk(place, begin, end);
        for (int x = 0; x < walk.rows(); ++x) {
          const int other = walk.row(x);
          for (int own = place.tile * shape.tile_rows; own < std::min(rows, (place.tile + 1) * shape.tile_rows);
               ++own) {
            const bool seen = other >= begin && other < end && walk.meets(x >> walk.shift, own) &&
                              !(shape.causal && (shape.by_keys ? other < own : other > own));
            ASSERT_TRUE(x >= walk.unmasked || seen || other < begin) << x << " of " << walk.unmasked;
            if (seen) ++named[std::pair{own, other}];
          }
        }
      }
      for (int own = 0; own < rows; ++own) {
        for (int other = begin; other < end; ++other) {
          const int query = shape.by_keys ? other : own, key = shape.by_keys ? own : other;
          const bool attends = mask.active(head, query / size, key / size) && !(shape.causal && key > query);
          const auto found = named.find(std::pair{own, other});
          ASSERT_EQ(found == named.end() ? 0 : found->second, attends ? 1 : 0)
              << "query " << query << " key " << key << " trial " << trial;
        }
      }
    }
  }
}

/// A forward's list that is much longer than the others becomes several places: together they name it all, in order,
/// and each has a slot of its own to leave results in.
TEST(GpuWork, LongListsOfAForwardAreCut) {
  for (const int size : {16, 64, 128}) {
    const std::int64_t blocks = 6400 / size;
    std::vector<std::vector<std::int32_t>> rows(static_cast<std::size_t>(2 * blocks));
    for (std::int64_t row = 0; row < 2 * blocks; ++row) {
      rows[static_cast<std::size_t>(row)].push_back(static_cast<std::int32_t>(row % blocks));
      if (row != 1) continue;
      for (std::int32_t column = 2; column < blocks; ++column) rows[1].push_back(column);
    }
    const BlockMask mask = BlockMask::from_rows(size, 2, blocks, rows);
    const ListShape shape{.tile_rows = 128, .splits = true};
    const HostLists host = make_lists(mask, shape);
    ASSERT_GE(host.slots_of_head, 3);
    EXPECT_EQ(slots_of(mask, shape), host.slots_of_head);
    std::set<int> slots;
    std::int64_t next = -1;
    for (const BlockPlace& place : host.places) {
      if (place.slot == 0) continue;
      EXPECT_EQ(place.tile, 128 > size ? 0 : 1);
      EXPECT_TRUE(slots.insert(place.slot).second);
      EXPECT_TRUE(next < 0 || place.begin == next);
      next = place.begin + place.count;
    }
    EXPECT_EQ(static_cast<std::int64_t>(slots.size()), host.slots_of_head);
    EXPECT_EQ(*slots.rbegin(), host.slots_of_head);
  }
  EXPECT_EQ(slots_of(BlockPattern::local_window(256, 64).mask(100, 1, false), {.tile_rows = 128, .splits = true}), 0);
}

}  // namespace
}  // namespace longspan::cuda
