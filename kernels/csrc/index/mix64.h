// 64-bit mixing, shared by the index and the initialisation of rows. This file does not use torch.
#pragma once

#include <cstdint>

#include "build/vector_paths.h"

namespace recfx {

// splitmix64's finalizer. kernels/index/mix64.py has the same function in ATen and TorchScript.
RECFX_INLINE uint64_t mix64(uint64_t z) {
  z ^= z >> 30;
  z *= 0xbf58476d1ce4e5b9ULL;
  z ^= z >> 27;
  z *= 0x94d049bb133111ebULL;
  z ^= z >> 31;
  return z;
}

// mix64(id ^ mixed_seed) modulo `pieces`. The sign bit is cleared first, so that every language gets the same result.
RECFX_INLINE int64_t mixed_modulo(int64_t id, uint64_t mixed_seed, int64_t pieces) {
  const uint64_t mixed = mix64(static_cast<uint64_t>(id) ^ mixed_seed) & 0x7fffffffffffffffULL;
  return static_cast<int64_t>(mixed % static_cast<uint64_t>(pieces));
}

}  // namespace recfx
