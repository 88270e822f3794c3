// SGD; see recfx/optim/rules/sgd.py. This file does not use torch.
#pragma once

#include <cstdint>

#include "step/rule.h"

namespace recfx {

struct SgdRule {
  static constexpr const char* kName = "sgd";
  static constexpr RowState kFirst = RowState::kNone;
  static constexpr RowState kSecond = RowState::kNone;

  RECFX_INLINE static void step(const SteppedRow& row, const StepNumbers& numbers) {
    for (int64_t j = 0; j < row.dim; ++j) {
      row.values[j] -= numbers.learning_rate * row.gradient[j];
    }
  }
};

}  // namespace recfx
