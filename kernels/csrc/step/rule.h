// What a rule of an optimizer is: what one step does to one row. This file does not use torch.
//
// Each rule has its own file, adagrad_rule.h for recfx/optim/rules/adagrad.py, whose `update` is its reference: the
// same operations in the same order, in float32. Sums over columns (row_sums.h) are added in an order that does not
// depend on the machine's vectors.
#pragma once

#include <cstdint>

#include "build/vector_paths.h"

namespace recfx {

// As StepNumbers in recfx/optim/rules/rule.py.
struct StepNumbers {
  float learning_rate;
  float weight_decay;
  float eps;
  float first_share;
  float second_beta;
  float second_share;
  float second_correction;
  float first_correction;
  float own_decay;
  float momentum;
};

// One row: its values, the sum of its gradients, and its states. They do not overlap.
struct SteppedRow {
  float* __restrict values;          // [dim]
  const float* __restrict gradient;  // [dim], with weight decay
  float* __restrict first;           // [dim], or [1] if the rule keeps one number per row
  float* __restrict second;          // likewise
  float* __restrict space;           // [dim], for the rule to work in
  int64_t dim;
};

enum class RowState { kNone, kPerRow, kPerElement };

}  // namespace recfx
