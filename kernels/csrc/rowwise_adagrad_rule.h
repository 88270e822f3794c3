// Row-wise Adagrad; see recfx/optim/rules/rowwise_adagrad.py. This file does not use torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "rule.h"

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

struct RowWiseAdagradRule {
  static constexpr const char* kName = "rowwise_adagrad";
  static constexpr FirstState kFirst = FirstState::kPerRow;
  static constexpr bool kHasSecond = false;

  RECFX_INLINE static void step(const SteppedRow& row, const StepNumbers& numbers) {
    *row.first += sum_of_squares(row.gradient, row.dim) / static_cast<float>(row.dim);
    const float divisor = std::sqrt(*row.first) + numbers.eps;
    for (int64_t j = 0; j < row.dim; ++j) {
      row.values[j] -= numbers.learning_rate * row.gradient[j] / divisor;
    }
  }
};

}  // namespace recfx
