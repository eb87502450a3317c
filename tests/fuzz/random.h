// SPDX-License-Identifier: Apache-2.0
// Draws that depend on a seed and the number of a mutant alone, so that any mutant can be made again.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fuzz {

// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
class Random {
 public:
  Random(uint64_t seed, uint64_t mutant) : state_(seed * 0x9E3779B97F4A7C15u + mutant) { state_ = next() ^ mutant; }

  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  size_t below(size_t limit) { return limit == 0 ? 0 : static_cast<size_t>(next() % limit); }
  bool chance(size_t percent) { return below(100) < percent; }

  template <typename List>
  const auto& pick(const List& list) {
    return list[below(list.size())];
  }

  // Ends of ranges, small numbers, and any number at all.
  uint64_t number() {
    static constexpr uint64_t kEnds[] = {0, 1, 2, 63, 64, 255, 4095, 4096, 65535, 65536, 1u << 31, ~0u, uint64_t{1} << 32,
                                         (uint64_t{1} << 32) + 1, uint64_t{1} << 62, uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{0} >> 1};
    return chance(70) ? kEnds[below(sizeof(kEnds) / sizeof(kEnds[0]))] : chance(50) ? below(100) : next();
  }

 private:
  uint64_t state_;
};

}  // namespace fuzz
