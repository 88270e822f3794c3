// Row-wise Adagrad, weight decay decoupled; see recfx/optim/rules/rowwise_adagrad_decoupled.py. Without torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "step/row_sums.h"
#include "step/rule.h"

namespace recfx {

struct RowWiseAdagradDecoupledRule {
  static constexpr const char* kName = "rowwise_adagrad_decoupled";
  static constexpr RowState kFirst = RowState::kPerRow;
  static constexpr RowState kSecond = RowState::kNone;

  RECFX_INLINE static void step(const SteppedRow& row, const StepNumbers& numbers) {
    *row.first += mean_of_squares(row.gradient, row.dim);
    const float divisor = std::sqrt(*row.first) + numbers.eps;
    if (numbers.own_decay != 0.0F) {  // zero times an infinite weight would not be zero
      for (int64_t j = 0; j < row.dim; ++j) {
        row.values[j] -= numbers.own_decay * row.values[j];
      }
    }
    for (int64_t j = 0; j < row.dim; ++j) {
      row.values[j] -= numbers.learning_rate * row.gradient[j] / divisor;
    }
  }
};

}  // namespace recfx
