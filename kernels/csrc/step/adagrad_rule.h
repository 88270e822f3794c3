// Adagrad; see recfx/optim/rules/adagrad.py. This file does not use torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "step/rule.h"

namespace recfx {

struct AdagradRule {
  static constexpr const char* kName = "adagrad";
  static constexpr RowState kFirst = RowState::kPerElement;
  static constexpr RowState kSecond = RowState::kNone;

  RECFX_INLINE static void step(const SteppedRow& row, const StepNumbers& numbers) {
    for (int64_t j = 0; j < row.dim; ++j) {
      const float gradient = row.gradient[j];
      const float sum = row.first[j] + gradient * gradient;
      row.first[j] = sum;
      row.values[j] -= numbers.learning_rate * gradient / (std::sqrt(sum) + numbers.eps);
    }
  }
};

}  // namespace recfx
