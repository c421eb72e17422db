// Philox words through the Box-Muller transform. Element i depends on (seed, stream, i) only.
#include "random.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "interrupt.h"
#include "longspan/threads.h"
#include "util/dispatch.h"
#include "util/parallel.h"
#include "util/philox.h"

namespace longspan::cli {
namespace {

constexpr std::int64_t kItem = 1 << 16;  // elements of one work item; a multiple of 4

/// Two normal numbers from two words; the radius never sees log(0).
void normal_pair(std::uint32_t first, std::uint32_t second, float& left, float& right) {
  const float uniform = (static_cast<float>(first >> 8) + 0.5f) * 0x1p-24f;
  const float angle = static_cast<float>(second >> 8) * (0x1p-24f * 2 * std::numbers::pi_v<float>);
  const float radius = std::sqrt(-2 * std::log(uniform));
  left = radius * std::cos(angle);
  right = radius * std::sin(angle);
}

template <class Storage>
void fill(Storage* data, std::int64_t count, std::uint64_t seed, std::uint32_t stream, std::int64_t first) {
  const std::int64_t skipped = first % 4;  // elements of the first group that are somebody else's
  const std::int64_t items = (skipped + count + kItem - 1) / kItem;
  LoopControl control;
  control.cancel = &interrupted();
  parallel_for(num_threads(), items, control, [&](int, std::int64_t item) {
    const std::int64_t end = std::min(skipped + count, (item + 1) * kItem);
    for (std::int64_t index = item * kItem; index < end; index += 4) {
      const auto group = static_cast<std::uint64_t>(first / 4 + index / 4);
      const PhiloxBlock words = philox4x32(
          seed, {static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(group >> 32), stream, 0x10A95BA0u});
      float values[4];
      normal_pair(words[0], words[1], values[0], values[1]);
      normal_pair(words[2], words[3], values[2], values[3]);
      const std::int64_t here = std::min<std::int64_t>(4, end - index);
      for (std::int64_t i = index == 0 ? skipped : 0; i < here; ++i)
        data[index + i - skipped] = from_float<Storage>(values[i]);
    }
  });
}

}  // namespace

void fill_normal(void* data, DType dtype, std::int64_t count, std::uint64_t seed, std::uint32_t stream,
                 std::int64_t first) {
  dispatch_storage(dtype, [&]<class Storage>() { fill(static_cast<Storage*>(data), count, seed, stream, first); });
}

}  // namespace longspan::cli
