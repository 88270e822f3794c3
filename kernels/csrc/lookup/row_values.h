// Rows of tables as float32, and back: of float32 itself, float16 or bfloat16. This file does not use torch.
#pragma once

#include <cstdint>
#include <cstring>

#include "build/float_of.h"
#include "build/vector_paths.h"
#include "lookup/gather.h"

namespace recfx {

// Rounds to the nearest, and halfway cases to even, like torch.
RECFX_INLINE uint16_t half_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t rest = bits & 0x7fffffffU;
  // Of exponents from -14 on: the exponent is rebased, and what does not fit is rounded away; it carries over into the
  // exponent, up to infinity.
  const uint32_t normal = (rest - (112U << 23) + 0xfffU + ((rest >> 13) & 1U)) >> 13;
  // Of smaller ones: adding a half leaves the float16's digits at the end of the sum, which the processor has rounded.
  float magnitude;
  std::memcpy(&magnitude, &rest, sizeof(rest));
  const float sum = magnitude + 0.5F;
  uint32_t subnormal;
  std::memcpy(&subnormal, &sum, sizeof(sum));
  subnormal -= 126U << 23;
  const uint32_t finite = rest < (113U << 23) ? subnormal : normal;
  const uint32_t large = rest > 0x7f800000U ? 0x7e00U : 0x7c00U;
  return static_cast<uint16_t>(sign | (rest >= 0x477ff000U ? large : finite));
}

RECFX_INLINE BFloat16 bfloat16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? 0x7fc0U : rounded)};
}

// Where a row's values are worked on: in the table itself if they are float32, else in `space`. native: how many
// float32 fit into one of the machine's vectors.
template <int native>
RECFX_INLINE float* read_row(float* row, int64_t, float*) {
  return row;
}

template <int native, typename stored_t>
RECFX_INLINE float* read_row(const stored_t* row, int64_t dim, float* space) {
  copy_row<native>(row, dim, space);
  return space;
}

RECFX_INLINE void write_row(float*, const float*, int64_t) {}

RECFX_INLINE void write_row(uint16_t* row, const float* values, int64_t dim) {
  for (int64_t j = 0; j < dim; ++j) {
    row[j] = half_of(values[j]);
  }
}

RECFX_INLINE void write_row(BFloat16* row, const float* values, int64_t dim) {
  for (int64_t j = 0; j < dim; ++j) {
    row[j] = bfloat16_of(values[j]);
  }
}

}  // namespace recfx
