// What engines keep beside a block mask, such as copies of its lists on a GPU.
#pragma once

#include <functional>

#include "longspan/block_mask.h"

namespace longspan {

class KeptBesideMask {
 public:
  using Thing = std::shared_ptr<const void>;
  /// Made once for each key, shared by all copies of the mask and gone with the last of them.
  static Thing get(const BlockMask& mask, std::uint64_t key, const std::function<Thing(const BlockMask&)>& make);
};

}  // namespace longspan
