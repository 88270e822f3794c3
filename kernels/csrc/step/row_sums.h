// Sums over the columns of a row, for rules that need a mean or a norm. This file does not use torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "build/vector_paths.h"

namespace recfx {

// The sum of squares, in 16 interleaved sums that are then added pairwise.
RECFX_INLINE float sum_of_squares(const float* values, int64_t dim) {
  constexpr int64_t kSums = 16;
  float sums[kSums] = {};
  int64_t j = 0;
  for (; j + kSums <= dim; j += kSums) {
    for (int64_t k = 0; k < kSums; ++k) {
      sums[k] += values[j + k] * values[j + k];
    }
  }
  for (int64_t k = 0; j < dim; ++j, ++k) {
    sums[k] += values[j] * values[j];
  }
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t k = 0; k < half; ++k) {
      sums[k] += sums[k + half];
    }
  }
  return sums[0];
}

RECFX_INLINE float mean_of_squares(const float* values, int64_t dim) {
  return sum_of_squares(values, dim) / static_cast<float>(dim);
}

RECFX_INLINE float norm(const float* values, int64_t dim) { return std::sqrt(sum_of_squares(values, dim)); }

}  // namespace recfx
