// Steps the rows of one group of positions: sums the gradients of each row and carries out the rule once, while the
// rows, states and gradients of later positions are prefetched. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "build/float_of.h"
#include "build/vector_paths.h"
#include "lookup/pool.h"
#include "lookup/row_values.h"
#include "step/row_groups.h"
#include "step/rule.h"

namespace recfx {

// How many positions ahead rows are prefetched.
constexpr int64_t kStepAhead = 12;

// Rows of space that a step takes: for the sum of gradients, for values that are not float32, and for the rule.
constexpr int64_t kStepSpace = 3;

// The gradients of one feature's bags.
struct FeatureGradients {
  const float* rows;   // of the first bag
  uint32_t first_bag;  // its number among the bags of the table
};

// One table in a step.
struct SteppedTable {
  void* values;   // [rows, dim]
  float* first;   // [rows, dim] or [rows, 1]; null if the rule has none
  float* second;  // likewise
  int64_t dim;
  const FeatureGradients* gradients;  // of the table's features
  int64_t features;
  int64_t stride;    // of the rows of gradients
  uint32_t samples;  // bags of each feature; 0 if rows are not pooled
  StepNumbers numbers;

  RECFX_INLINE const float* gradient_of(uint32_t bag) const {
    const FeatureGradients* of_feature = gradients;
    if (features > 1 && samples > 0) {
      of_feature += bag / samples;
    } else if (features > 1) {
      const FeatureGradients* last = gradients + features - 1;
      while (of_feature < last && of_feature[1].first_bag <= bag) {
        ++of_feature;
      }
    }
    return of_feature->rows + static_cast<int64_t>(bag - of_feature->first_bag) * stride;
  }
};

template <typename value_t>
RECFX_INLINE void fetch_to_write(const value_t* row, int64_t count) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(row) & ~static_cast<uintptr_t>(kLineBytes - 1);
  const uintptr_t end = reinterpret_cast<uintptr_t>(row + count);
  for (uintptr_t line = begin; line < end; line += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(line), 1);
  }
}

// The state of a row; null if the rule has none.
template <RowState kState>
RECFX_INLINE float* state_of(float* states, int64_t row, int64_t dim) {
  return kState == RowState::kNone ? nullptr : states + row * (kState == RowState::kPerRow ? 1 : dim);
}

template <RowState kState>
RECFX_INLINE void fetch_state(float* states, int64_t row, int64_t dim) {
  if constexpr (kState != RowState::kNone) {
    fetch_to_write(state_of<kState>(states, row, dim), kState == RowState::kPerRow ? 1 : dim);
  }
}

template <typename Rule, typename weight_t>
RECFX_INLINE void fetch_stepped_row(const SteppedTable& table, int64_t row) {
  fetch_to_write(static_cast<weight_t*>(table.values) + row * table.dim, table.dim);
  fetch_state<Rule::kFirst>(table.first, row, table.dim);
  fetch_state<Rule::kSecond>(table.second, row, table.dim);
}

// Sums `parts` times `width` columns of the gradients of some positions, in their order.
template <int parts, int width, typename position_t>
RECFX_INLINE void sum_columns(const SteppedTable& table, const position_t* begin, const position_t* end, int64_t column,
                              float* sum) {
  using Floats = typename Vectors<width>::Floats;
  Floats totals[parts];
#pragma GCC unroll 8
  for (int part = 0; part < parts; ++part) {
    totals[part] = Floats{};
  }
  for (const position_t* at = begin; at < end; ++at) {
    if (column == 0 && end - at > kStepAhead) {  // of a row with many positions
      fetch_row(table.gradient_of(at[kStepAhead].bag), table.dim);
    }
    const float* from = table.gradient_of(at->bag) + column;
#pragma GCC unroll 8
    for (int part = 0; part < parts; ++part) {
      Floats values;
      load<width>(from + part * width, values);
      totals[part] += position_t::kScaled ? values * at->scale() : values;
    }
  }
#pragma GCC unroll 8
  for (int part = 0; part < parts; ++part) {
    std::memcpy(sum + column + part * width, &totals[part], sizeof(Floats));
  }
}

template <int native, typename position_t>
RECFX_INLINE void sum_gradients(const SteppedTable& table, const position_t* begin, const position_t* end, float* sum) {
  int64_t column = 0;
  for (; column + 8 * native <= table.dim; column += 8 * native) {
    sum_columns<8, native>(table, begin, end, column, sum);
  }
  for (; column + 4 * native <= table.dim; column += 4 * native) {
    sum_columns<4, native>(table, begin, end, column, sum);
  }
  for (; column + native <= table.dim; column += native) {
    sum_columns<1, native>(table, begin, end, column, sum);
  }
  for (; column + 4 <= table.dim; column += 4) {
    sum_columns<1, 4>(table, begin, end, column, sum);
  }
  for (; column < table.dim; ++column) {
    sum_columns<1, 1>(table, begin, end, column, sum);
  }
}

// The sum of the gradients of some positions, float32 [dim]. Compiled once for each path, and not for each rule.
template <int native, typename position_t>
RECFX_INLINE void sum_once(const SteppedTable& table, const position_t* begin, const position_t* end, float* sum) {
  on_vectors<native>([&](auto floats) RECFX_INLINE_LAMBDA { sum_gradients<floats.value>(table, begin, end, sum); });
}

template <int native, typename Rule, typename weight_t, typename position_t>
RECFX_INLINE void step_rows(const SteppedTable& table, int64_t first_row, SortedPositions<position_t> positions,
                            float* space) {
  const int64_t dim = table.dim;
  float* summed = space;
  float* read = space + dim;
  const position_t* end = positions.end;
  const position_t* ahead = positions.begin;
  for (const position_t* at = positions.begin; at < end;) {
    const position_t* next = at + 1;
    while (next < end && next->row == at->row) {
      ++next;
    }
    ahead = std::max(ahead, at);
    for (const position_t* last = at + std::min(kStepAhead, end - at); ahead < last; ++ahead) {
      fetch_row(table.gradient_of(ahead->bag), dim);
      if (ahead == positions.begin || ahead->row != ahead[-1].row) {
        fetch_stepped_row<Rule, weight_t>(table, first_row + ahead->row);
      }
    }
    const int64_t row = first_row + at->row;
    const float* gradient = table.gradient_of(at->bag);
    if (position_t::kScaled || next - at > 1) {
      sum_once<native>(table, at, next, summed);
      gradient = summed;
    }
    weight_t* stored = static_cast<weight_t*>(table.values) + row * dim;
    float* values = read_row<native>(stored, dim, read);
    if (table.numbers.weight_decay != 0.0F) {  // zero times an infinite weight would not be zero
      for (int64_t j = 0; j < dim; ++j) {
        summed[j] = gradient[j] + table.numbers.weight_decay * values[j];
      }
      gradient = summed;
    }
    float* first = state_of<Rule::kFirst>(table.first, row, dim);
    float* second = state_of<Rule::kSecond>(table.second, row, dim);
    Rule::step({values, gradient, first, second, space + 2 * dim, dim}, table.numbers);
    write_row(stored, values, dim);
    at = next;
  }
}

// Steps the rows of positions that are sorted by row. space: float32 [kStepSpace, dim].
template <typename Rule, typename weight_t, typename position_t>
static void step_sorted(const SteppedTable& table, int64_t first_row, SortedPositions<position_t> positions,
                        float* space) {
  on_widest_vectors([&](auto native) RECFX_INLINE_LAMBDA {
    step_rows<native.value, Rule, weight_t>(table, first_row, positions, space);
  });
}

}  // namespace recfx
