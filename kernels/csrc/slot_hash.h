// The hash that places ids in slots, and the id that marks an empty slot. This file does not use torch.
#pragma once

#include <cstdint>

#include "clones.h"

namespace recfx {

constexpr int64_t kEmptyId = -1;
constexpr int64_t kNoRow = -1;

// murmur3's 64-bit finalizer
RECFX_INLINE uint64_t slot_hash(int64_t id) {
  uint64_t k = static_cast<uint64_t>(id);
  k ^= k >> 33;
  k *= 0xff51afd7ed558ccdULL;
  k ^= k >> 33;
  k *= 0xc4ceb9fe1a85ec53ULL;
  k ^= k >> 33;
  return k;
}

}  // namespace recfx
