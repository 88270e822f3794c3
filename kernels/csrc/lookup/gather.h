// Copies rows as float32, prefetching them. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "build/float_of.h"
#include "build/vector_paths.h"

namespace recfx {

template <int width, typename weight_t>
RECFX_INLINE void copy_columns(const weight_t* from, int64_t dim, float* to, int64_t& column) {
  for (; column + width <= dim; column += width) {
    typename Vectors<width>::Floats values;
    load<width>(from + column, values);
    std::memcpy(to + column, &values, sizeof(values));
  }
}

// native: how many float32 fit into one of the machine's vectors.
template <int native, typename weight_t>
RECFX_INLINE void copy_row(const weight_t* from, int64_t dim, float* to) {
  int64_t column = 0;
  copy_columns<native>(from, dim, to, column);
  copy_columns<4>(from, dim, to, column);
  copy_columns<1>(from, dim, to, column);
}

}  // namespace recfx
