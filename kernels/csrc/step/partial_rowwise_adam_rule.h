// Partial row-wise Adam; see recfx/optim/rules/partial_rowwise_adam.py. This file does not use torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "step/row_sums.h"
#include "step/rule.h"

namespace recfx {

struct PartialRowWiseAdamRule {
  static constexpr const char* kName = "partial_rowwise_adam";
  static constexpr RowState kFirst = RowState::kPerElement;
  static constexpr RowState kSecond = RowState::kPerRow;

  RECFX_INLINE static void step(const SteppedRow& row, const StepNumbers& numbers) {
    const float mean = mean_of_squares(row.gradient, row.dim);
    *row.second = numbers.second_beta * *row.second + numbers.second_share * mean;
    const float divisor = std::sqrt(*row.second) / numbers.second_correction + numbers.eps;
    if (numbers.own_decay != 0.0F) {  // zero times an infinite weight would not be zero
      for (int64_t j = 0; j < row.dim; ++j) {
        row.values[j] -= numbers.own_decay * row.values[j];
      }
    }
    for (int64_t j = 0; j < row.dim; ++j) {
      const float first = row.first[j] + numbers.first_share * (row.gradient[j] - row.first[j]);
      row.first[j] = first;
      row.values[j] -= numbers.learning_rate * first / divisor;
    }
  }
};

}  // namespace recfx
