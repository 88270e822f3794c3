// Row-wise Adagrad; see recfx/optim/rules/rowwise_adagrad.py. This file does not use torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "step/row_sums.h"
#include "step/rule.h"

namespace recfx {

struct RowWiseAdagradRule {
  static constexpr const char* kName = "rowwise_adagrad";
  static constexpr RowState kFirst = RowState::kPerRow;
  static constexpr RowState kSecond = RowState::kNone;

  RECFX_INLINE static void step(const SteppedRow& row, const StepNumbers& numbers) {
    *row.first += mean_of_squares(row.gradient, row.dim);
    const float divisor = std::sqrt(*row.first) + numbers.eps;
    for (int64_t j = 0; j < row.dim; ++j) {
      row.values[j] -= numbers.learning_rate * row.gradient[j] / divisor;
    }
  }
};

}  // namespace recfx
