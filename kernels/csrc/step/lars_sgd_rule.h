// LARS-SGD; see recfx/optim/rules/lars_sgd.py. This file does not use torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "step/row_sums.h"
#include "step/rule.h"

namespace recfx {

struct LarsSgdRule {
  static constexpr const char* kName = "lars_sgd";
  static constexpr RowState kFirst = RowState::kPerElement;
  static constexpr RowState kSecond = RowState::kNone;

  RECFX_INLINE static void step(const SteppedRow& row, const StepNumbers& numbers) {
    const float of_values = norm(row.values, row.dim);
    const float wanted = norm(row.gradient, row.dim) + numbers.own_decay * of_values;
    const float rate = wanted == 0.0F ? 0.0F : numbers.learning_rate * of_values / wanted;
    // Two loops: the compiler makes vectors of each, but not of both in one.
    for (int64_t j = 0; j < row.dim; ++j) {
      row.first[j] = numbers.momentum * row.first[j] + rate * (row.gradient[j] + numbers.own_decay * row.values[j]);
    }
    for (int64_t j = 0; j < row.dim; ++j) {
      row.values[j] -= row.first[j];
    }
  }
};

}  // namespace recfx
