// Adam; see recfx/optim/rules/adam.py. This file does not use torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "step/rule.h"

namespace recfx {

struct AdamRule {
  static constexpr const char* kName = "adam";
  static constexpr RowState kFirst = RowState::kPerElement;
  static constexpr RowState kSecond = RowState::kPerElement;

  RECFX_INLINE static void step(const SteppedRow& row, const StepNumbers& numbers) {
    for (int64_t j = 0; j < row.dim; ++j) {
      const float gradient = row.gradient[j];
      const float first = row.first[j] + numbers.first_share * (gradient - row.first[j]);
      const float second = numbers.second_beta * row.second[j] + numbers.second_share * (gradient * gradient);
      row.first[j] = first;
      row.second[j] = second;
      row.values[j] -= numbers.learning_rate * first / (std::sqrt(second) / numbers.second_correction + numbers.eps);
    }
  }
};

}  // namespace recfx
