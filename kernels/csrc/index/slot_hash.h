// The hashes that place ids in slots, and the id that marks an empty slot. This file does not use torch.
#pragma once

#include <cstdint>

#include "build/vector_paths.h"
#include "index/mix64.h"

namespace recfx {

constexpr int64_t kEmptyId = -1;
constexpr int64_t kNoRow = -1;

// murmur3's 64-bit finalizer. Everybody can invert it, so ids can be chosen that collide: it is for tables whose layout
// is not ours to choose.
RECFX_INLINE uint64_t slot_hash(int64_t id) {
  uint64_t k = static_cast<uint64_t>(id);
  k ^= k >> 33;
  k *= 0xff51afd7ed558ccdULL;
  k ^= k >> 33;
  k *= 0xc4ceb9fe1a85ec53ULL;
  k ^= k >> 33;
  return k;
}

// The hash of tables whose layout nobody else knows. The last factor is any odd number, one as likely as another if the
// seed is random: so two ids have the same upper n bits with a probability of about 2 ** (1 - n), also if they were
// chosen by somebody who knows everything but the seed. kernels/index/slot_groups.py has the same function.
class SeededHash {
 public:
  explicit SeededHash(int64_t seed)
      : key_(mix64(static_cast<uint64_t>(seed))), factor_(mix64(static_cast<uint64_t>(seed) + 1) | 1) {}

  // One of `places` places, at most 2 ** 32. The lower bits of the product are no good.
  RECFX_INLINE uint64_t place(int64_t id, uint64_t places) const {
    uint64_t k = static_cast<uint64_t>(id) ^ key_;
    k ^= k >> 33;
    k *= 0xff51afd7ed558ccdULL;
    k ^= k >> 33;
    k *= factor_;
    return ((k >> 32) * places) >> 32;
  }

 private:
  uint64_t key_;
  uint64_t factor_;
};

}  // namespace recfx
