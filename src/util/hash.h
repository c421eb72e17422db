// A small 64-bit hash for keys of caches: good mixing, no promise of stability between versions.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace longspan {

class Hasher {
 public:
  /// An integer or an enumerator.
  template <class Value>
  void add(Value value) {
    state_ = (state_ ^ static_cast<std::uint64_t>(value)) * 0x9E3779B97F4A7C15u;
    state_ ^= state_ >> 32;
  }
  void add(double value) { add(std::bit_cast<std::uint64_t>(value)); }
  void add(std::string_view text) {
    add(text.size());
    for (const char c : text) add(static_cast<unsigned char>(c));
  }
  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0x243F6A8885A308D3u;
};

}  // namespace longspan
