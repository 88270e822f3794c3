// Loads adjacent weights as a vector of float32, from float32 or from the 16 bits of float16 or bfloat16. This file
// does not use torch.
#pragma once

#ifdef __aarch64__
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>

#include "build/vector_paths.h"

namespace recfx {

// The 16 bits of a bfloat16; those of a float16 are a uint16_t.
struct BFloat16 {
  uint16_t bits;
};

// Compilers turn operations on these into vector instructions, several of them if the machine's vectors are shorter.
template <int width>
struct Vectors {
  typedef float Floats __attribute__((vector_size(width * 4)));
  typedef uint32_t Words __attribute__((vector_size(width * 4)));
  typedef uint16_t Halves __attribute__((vector_size(width * 2)));
};

// Integers of 16 bits as ones of 32. GCC for aarch64 would move the four of a vector one by one.
template <int width>
RECFX_INLINE void widen(const uint16_t* from, typename Vectors<width>::Words& result) {
  typename Vectors<width>::Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
#ifdef __aarch64__
  if constexpr (width == 4) {
    result = (typename Vectors<width>::Words)vmovl_u16((uint16x4_t)halves);
    return;
  }
#endif
  result = __builtin_convertvector(halves, typename Vectors<width>::Words);
}

template <int width>
RECFX_INLINE void load(const float* from, typename Vectors<width>::Floats& result) {
  std::memcpy(&result, from, sizeof(result));
}

// Exact for every float16, including infinities, NaN and subnormals. It uses integer arithmetic because every compiler
// vectorises that for every machine.
template <int width>
RECFX_INLINE void load(const uint16_t* from, typename Vectors<width>::Floats& result) {
  using Floats = typename Vectors<width>::Floats;
  using Words = typename Vectors<width>::Words;
  Words half;
  widen<width>(from, half);
  const Words sign = (half & 0x8000u) << 16;
  const Words rest = half & 0x7fffu;
  const Floats normal = (Floats)((rest << 13) + (0xe0u << 23)) * 0x1p-112f;
  const Floats subnormal = (Floats)(rest | (126u << 23)) - 0.5f;
  const Words is_subnormal = (Words)(rest < 0x400u);  // all bits set, or none
  result = (Floats)((((Words)subnormal & is_subnormal) | ((Words)normal & ~is_subnormal)) | sign);
}

template <int width>
RECFX_INLINE void load(const BFloat16* from, typename Vectors<width>::Floats& result) {
  typename Vectors<width>::Words half;
  widen<width>(&from->bits, half);
  result = (typename Vectors<width>::Floats)(half << 16);
}

}  // namespace recfx
