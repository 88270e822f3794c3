// LAMB; see recfx/optim/rules/lamb.py. This file does not use torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "step/row_sums.h"
#include "step/rule.h"

namespace recfx {

struct LambRule {
  static constexpr const char* kName = "lamb";
  static constexpr RowState kFirst = RowState::kPerElement;
  static constexpr RowState kSecond = RowState::kPerElement;

  RECFX_INLINE static void step(const SteppedRow& row, const StepNumbers& numbers) {
    for (int64_t j = 0; j < row.dim; ++j) {
      const float gradient = row.gradient[j];
      const float first = row.first[j] + numbers.first_share * (gradient - row.first[j]);
      const float second = numbers.second_beta * row.second[j] + numbers.second_share * (gradient * gradient);
      row.first[j] = first;
      row.second[j] = second;
      row.space[j] = first / numbers.first_correction / (std::sqrt(second) / numbers.second_correction + numbers.eps);
    }
    if (numbers.own_decay != 0.0F) {  // zero times an infinite weight would not be zero
      for (int64_t j = 0; j < row.dim; ++j) {
        row.space[j] += numbers.own_decay * row.values[j];
      }
    }
    const float wanted = norm(row.space, row.dim);
    if (wanted == 0.0F) {  // nothing to scale
      return;
    }
    const float rate = numbers.learning_rate * (norm(row.values, row.dim) / wanted);
    for (int64_t j = 0; j < row.dim; ++j) {
      row.values[j] -= rate * row.space[j];
    }
  }
};

}  // namespace recfx
