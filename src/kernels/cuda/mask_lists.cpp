// Merging the block rows (or key blocks) of a tile into one list, and uploading the result.
#include "kernels/cuda/mask_lists.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <mutex>
#include <vector>

#include "device/error.h"
#include "pattern/kept_beside_mask.h"
#include "plan/strands.h"

namespace longspan::cuda {
namespace {

std::atomic<std::uint64_t> uploads{0};
constexpr std::int64_t kShortList = 4096;  // rows that one item takes without anyone noticing
constexpr std::int64_t kShortPart = 1024;  // the same of a forward's

/// Graph capture forbids allocations and copies beside it, unless they are said to have nothing to do with it.
class BesideCapture {
 public:
  BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCapture(const BesideCapture&) = delete;
  BesideCapture& operator=(const BesideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// One allocation on a GPU, freed with its owner.
class DeviceBytes {
 public:
  DeviceBytes(int device, std::size_t bytes) : device_(device) {
    check(cudaMalloc(&data_, std::max<std::size_t>(bytes, 1)), "block lists");
  }
  ~DeviceBytes() {
    const BesideCapture beside;
    int before = 0;
    if (cudaGetDevice(&before) != cudaSuccess) return;  // the driver is gone, and so is the memory
    if (before != device_) cudaSetDevice(device_);
    cudaFree(data_);
    if (before != device_) cudaSetDevice(before);
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
  int device_;
};

struct UploadedLists {
  UploadedLists(int device, std::size_t bytes) : memory(device, bytes) {}
  DeviceBytes memory;
  BlockLists lists{};
};

/// One tile's blocks [first, first + count) as entries {block, bits}, ascending.
class Merge {
 public:
  Merge(const BlockMask& mask, const ListShape& shape) : mask_(mask), shape_(shape) {}

  void add(HostLists& lists, std::int64_t head, std::int64_t first, std::int64_t count) {
    blocks_.clear();
    bits_.clear();
    full_ = 0;
    std::vector<std::span<const std::int32_t>>& left = left_;
    left.clear();
    for (std::int64_t own = first; own < first + count; ++own) left.push_back(seen(head, own));
    const std::uint16_t all = static_cast<std::uint16_t>((1u << count) - 1);
    constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();
    while (true) {
      std::int32_t next = kNone;
      for (const auto& list : left) next = list.empty() ? next : std::min(next, list.front());
      if (next == kNone) break;
      std::uint16_t bits = 0;
      for (std::size_t i = 0; i < left.size(); ++i) {
        if (left[i].empty() || left[i].front() != next) continue;
        bits = static_cast<std::uint16_t>(bits | 1u << i);
        left[i] = left[i].subspan(1);
      }
      const bool off_diagonal = !shape_.causal || (shape_.by_keys ? next >= first + count : next < first);
      if (bits == all && off_diagonal) {
        lists.blocks.push_back(next);
        lists.bits.push_back(all);
        ++full_;
      } else {
        blocks_.push_back(next);
        bits_.push_back(bits);
      }
    }
    lists.blocks.insert(lists.blocks.end(), blocks_.begin(), blocks_.end());
    lists.bits.insert(lists.bits.end(), bits_.begin(), bits_.end());
  }
  int full() const { return full_; }
  int count() const { return full_ + static_cast<int>(blocks_.size()); }

 private:
  std::span<const std::int32_t> seen(std::int64_t head, std::int64_t own) const {
    const auto all = shape_.by_keys ? mask_.column(head, own) : mask_.row(head, own);
    if (!shape_.causal) return all;
    if (shape_.by_keys) return {std::lower_bound(all.begin(), all.end(), static_cast<std::int32_t>(own)), all.end()};
    return {all.begin(), std::upper_bound(all.begin(), all.end(), static_cast<std::int32_t>(own))};
  }

  const BlockMask& mask_;
  const ListShape& shape_;
  std::vector<std::span<const std::int32_t>> left_;
  std::vector<std::int32_t> blocks_;
  std::vector<std::uint16_t> bits_;
  int full_ = 0;
};

std::shared_ptr<const void> upload(const BlockMask& mask, const ListShape& shape, int device) {
  const HostLists host = make_lists(mask, shape);
  const std::size_t places = host.places.size() * sizeof(BlockPlace),
                    blocks = host.blocks.size() * sizeof(std::int32_t),
                    bits = shape.tile_rows > mask.block_size() ? host.bits.size() * sizeof(std::uint16_t) : 0;
  const BesideCapture beside;
  auto uploaded = std::make_shared<UploadedLists>(device, places + blocks + bits);
  char* const data = uploaded->memory.data();
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "block lists");
  cudaError_t status = cudaSuccess;
  const auto copy = [&](std::size_t offset, const void* from, std::size_t bytes) {
    if (status == cudaSuccess && bytes > 0)
      status = cudaMemcpyAsync(data + offset, from, bytes, cudaMemcpyHostToDevice, stream);
  };
  copy(0, host.places.data(), places);
  copy(places, host.blocks.data(), blocks);
  copy(places + blocks, host.bits.data(), bits);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  check(status, "copying block lists to the GPU");
  ++uploads;
  uploaded->lists = view_of(host, mask, shape, reinterpret_cast<const BlockPlace*>(data),
                            reinterpret_cast<const std::int32_t*>(data + places),
                            reinterpret_cast<const std::uint16_t*>(data + places + blocks));
  return uploaded;
}

}  // namespace

HostLists make_lists(const BlockMask& mask, const ListShape& shape) {
  const std::int64_t size = mask.block_size(), blocks = mask.blocks();
  const std::int64_t group = std::max<std::int64_t>(1, shape.tile_rows / size),
                     repeats = std::max<std::int64_t>(1, size / shape.tile_rows);
  const std::int64_t groups = (blocks + group - 1) / group;
  HostLists lists;
  std::vector<BlockPlace> whole;  // [mask head][groups]
  Merge merge(mask, shape);
  for (std::int64_t head = 0; head < mask.heads(); ++head) {
    for (std::int64_t index = 0; index < groups; ++index) {
      const auto begin = static_cast<std::int64_t>(lists.blocks.size());
      merge.add(lists, head, index * group, std::min(group, blocks - index * group));
      whole.push_back({begin, merge.full(), merge.count(), static_cast<int>(index)});
    }
  }
  std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (shape.splits && shape.by_keys) {
    most = longest_list(mask.active_blocks(), mask.heads() * groups, mask.block_size());
  } else if (shape.splits) {
    const auto entries = static_cast<std::int64_t>(lists.blocks.size()), count = mask.heads() * groups;
    most = std::max(2 * strands::ceil_divide(entries, std::max<std::int64_t>(count, 1)), kShortPart / size);
  }
  std::vector<std::vector<BlockPlace>> of_heads(static_cast<std::size_t>(mask.heads()));
  for (std::int64_t head = 0; head < mask.heads(); ++head) {
    auto& places = of_heads[static_cast<std::size_t>(head)];
    int slots = 0;
    for (std::int64_t index = 0; index < groups; ++index) {
      const BlockPlace& all = whole[static_cast<std::size_t>(head * groups + index)];
      const auto parts =
          static_cast<int>(std::max<std::int64_t>(1, strands::ceil_divide<std::int64_t>(all.count, most)));
      for (std::int64_t repeat = 0; repeat < repeats; ++repeat) {
        for (int part = 0; part < parts; ++part) {
          const std::int64_t first = part * most, count = std::min(most, all.count - first);
          const std::int64_t full = std::clamp<std::int64_t>(all.full - first, 0, count);
          places.push_back({all.begin + first, static_cast<int>(full), static_cast<int>(count),
                            static_cast<int>(index * repeats + repeat), parts > 1 && !shape.by_keys ? ++slots : 0});
        }
      }
    }
    lists.places_of_head = std::max(lists.places_of_head, static_cast<std::int64_t>(places.size()));
    lists.slots_of_head = std::max<std::int64_t>(lists.slots_of_head, slots);
  }
  for (auto& places : of_heads) {
    places.resize(static_cast<std::size_t>(lists.places_of_head), {0, 0, 0, -1});
    lists.places.insert(lists.places.end(), places.begin(), places.end());
  }
  return lists;
}

BlockLists view_of(const HostLists& host, const BlockMask& mask, const ListShape& shape, const BlockPlace* places,
                   const std::int32_t* blocks, const std::uint16_t* bits) {
  BlockLists lists{};
  lists.places = places;
  lists.blocks = blocks;
  lists.bits = shape.tile_rows > mask.block_size() ? bits : nullptr;
  lists.place_count = static_cast<int>(host.places_of_head);
  lists.head_places = mask.heads() > 1 ? lists.place_count : 0;
  lists.shift = static_cast<std::uint8_t>(std::countr_zero(static_cast<unsigned>(mask.block_size())));
  lists.tile_shift = static_cast<std::uint8_t>(std::countr_zero(static_cast<unsigned>(shape.tile_rows)));
  return lists;
}

std::int64_t longest_list(std::int64_t entries, std::int64_t lists, int block_size) {
  lists = std::max<std::int64_t>(1, lists);
  return std::max(2 * ((entries + lists - 1) / lists), kShortList / block_size);
}

std::int64_t slots_of(const BlockMask& mask, const ListShape& shape) {
  const std::uint64_t key = std::uint64_t{1} << 63 | static_cast<std::uint64_t>(shape.tile_rows) << 1 |
                            static_cast<std::uint64_t>(shape.causal);
  const auto found = KeptBesideMask::get(mask, key, [&](const BlockMask& of) -> std::shared_ptr<const void> {
    std::size_t longest = 0;
    const bool listed = of.why_no_lists().empty();  // else a plan that can be printed only
    for (std::int64_t head = 0; head < of.heads() && listed; ++head) {
      for (std::int64_t block = 0; block < of.blocks(); ++block)
        longest = std::max(longest, of.row(head, block).size());
    }
    // A list is shorter than the rows of its tile together, and longer than any of them.
    const std::int64_t rows = static_cast<std::int64_t>(longest) * std::max(of.block_size(), shape.tile_rows);
    return std::make_shared<const std::int64_t>(rows > kShortPart ? make_lists(of, shape).slots_of_head : 0);
  });
  return *static_cast<const std::int64_t*>(found.get());
}

bool has_long_columns(const BlockMask& mask) {
  constexpr std::uint64_t kKey = ~std::uint64_t{0};
  const auto found = KeptBesideMask::get(mask, kKey, [](const BlockMask& of) -> std::shared_ptr<const void> {
    std::size_t longest = 0;
    for (std::int64_t head = 0; head < of.heads(); ++head) {
      for (std::int64_t block = 0; block < of.blocks(); ++block)
        longest = std::max(longest, of.column(head, block).size());
    }
    const std::int64_t most = longest_list(of.active_blocks(), of.heads() * of.blocks(), of.block_size());
    return std::make_shared<const bool>(static_cast<std::int64_t>(longest) > most);
  });
  return *static_cast<const bool*>(found.get());
}

std::int64_t most_listed_rows(const BlockMask& mask) {
  constexpr std::uint64_t kKey = ~std::uint64_t{1};
  static constexpr std::int64_t kTile = 256;  // rows, or more than any kernel's tile has
  const auto found = KeptBesideMask::get(mask, kKey, [](const BlockMask& of) -> std::shared_ptr<const void> {
    if (!of.why_no_lists().empty())  // a plan that can be printed only
      return std::make_shared<const std::int64_t>(std::numeric_limits<std::int64_t>::max());
    std::size_t longest = 0;
    for (std::int64_t head = 0; head < of.heads(); ++head) {
      for (std::int64_t block = 0; block < of.blocks(); ++block)
        longest = std::max({longest, of.row(head, block).size(), of.column(head, block).size()});
    }
    return std::make_shared<const std::int64_t>(static_cast<std::int64_t>(longest) *
                                                std::max<std::int64_t>(of.block_size(), kTile));
  });
  return *static_cast<const std::int64_t*>(found.get());
}

std::uint64_t lists_uploaded() { return uploads.load(); }

BlockLists lists_of(const BlockMask& mask, const ListShape& shape, int device, bool captured) {
  const std::uint64_t key = static_cast<std::uint64_t>(device) << 32 |
                            static_cast<std::uint64_t>(shape.tile_rows) << 3 |
                            static_cast<std::uint64_t>(shape.by_keys) << 2 |
                            static_cast<std::uint64_t>(shape.splits) << 1 | static_cast<std::uint64_t>(shape.causal);
  const auto kept = KeptBesideMask::get(mask, key, [&](const BlockMask& of) { return upload(of, shape, device); });
  if (captured) {
    static std::mutex mutex;
    static auto* const forever = new std::vector<std::shared_ptr<const void>>;
    const std::lock_guard lock(mutex);
    if (std::find(forever->begin(), forever->end(), kept) == forever->end()) forever->push_back(kept);
  }
  return static_cast<const UploadedLists*>(kept.get())->lists;
}

}  // namespace longspan::cuda
