// Pooling bags of rows, rows fetched ahead. No torch in here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "clones.h"
#include "float_of.h"

namespace recfx {

constexpr int64_t kLineBytes = 64;

// Rows of so many bytes are fetched line by line, spread over the additions: a burst of many lines would wait for itself.
// Narrower ones are fetched at once, which takes fewer instructions.
constexpr int64_t kSpreadBytes = 256;

// One feature's bags, and where their sums go.
template <typename weight_t>
struct Bags {
  const weight_t* weight;  // [rows, dim]
  int64_t dim;
  const int64_t* rows;     // of all ids; -1 adds nothing
  const float* scale;      // of all ids, or null
  const int64_t* offsets;  // [bags + 1]
  bool mean;
  float* sums;  // of bag 0
  int64_t sum_stride;

  RECFX_INLINE int64_t row_bytes() const {
    return dim * static_cast<int64_t>(sizeof(weight_t));
  }
  // How many ids ahead a row is fetched.
  RECFX_INLINE int64_t rows_ahead() const {
    return row_bytes() >= kSpreadBytes ? 16 : 32;
  }
};

template <typename weight_t>
RECFX_INLINE void fetch_row(const weight_t* row, int64_t dim) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(row) & ~static_cast<uintptr_t>(kLineBytes - 1);
  const uintptr_t end = reinterpret_cast<uintptr_t>(row + dim);
  for (uintptr_t line = begin; line < end; line += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(line));
  }
}

// Adds `parts` times `width` columns of some rows to sum, in the order of the rows. With `spread`, the same columns of
// the coming rows are fetched along.
template <int parts, int width, bool scaled, bool spread, typename weight_t>
RECFX_INLINE void add_columns(const weight_t* const* rows, const weight_t* const* coming, const float* scale,
                              int64_t count, int64_t column, bool first, float* sum) {
  using Floats = typename Vectors<width>::Floats;
  Floats totals[parts];  // in registers: every loop over it is unrolled
#pragma GCC unroll 4
  for (int part = 0; part < parts; ++part) {
    totals[part] = Floats{};
    if (!first) {
      load<width>(sum + column + part * width, totals[part]);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 4
    for (int part = 0; part < parts; ++part) {
      Floats values;
      load<width>(rows[i] + column + part * width, values);
      if constexpr (spread) {
        __builtin_prefetch(coming[i] + column + part * width);
      }
      totals[part] += scaled ? values * scale[i] : values;
    }
  }
#pragma GCC unroll 4
  for (int part = 0; part < parts; ++part) {
    std::memcpy(sum + column + part * width, &totals[part], sizeof(Floats));
  }
}

template <bool scaled, bool spread, typename weight_t>
RECFX_INLINE void add_rows(const weight_t* const* rows, const weight_t* const* coming, const float* scale, int64_t count,
                           int64_t dim, bool first, float* sum) {
  int64_t column = 0;
  for (; column + 64 <= dim; column += 64) {
    add_columns<4, 16, scaled, spread>(rows, coming, scale, count, column, first, sum);
  }
  for (; column + 16 <= dim; column += 16) {
    add_columns<1, 16, scaled, spread>(rows, coming, scale, count, column, first, sum);
  }
  for (; column + 4 <= dim; column += 4) {
    add_columns<1, 4, scaled, spread>(rows, coming, scale, count, column, first, sum);
  }
  for (; column < dim; ++column) {
    add_columns<1, 1, scaled, spread>(rows, coming, scale, count, column, first, sum);
  }
}

// Pools one bag. rows[0, known) may be read to fetch ahead.
template <bool scaled, bool spread, typename weight_t>
RECFX_INLINE void pool_bag(const Bags<weight_t>& bags, int64_t bag, int64_t known, int64_t rows_ahead) {
  constexpr int64_t kPiece = 32;
  const weight_t* present[kPiece];
  const weight_t* coming[kPiece];
  float scale[kPiece];
  const int64_t begin = bags.offsets[bag];
  const int64_t end = bags.offsets[bag + 1];
  float* sum = bags.sums + bag * bags.sum_stride;
  for (int64_t piece = begin; piece == begin || piece < end; piece += kPiece) {
    const int64_t piece_end = std::min(piece + kPiece, end);
    int64_t count = 0;
    for (int64_t i = piece; i < piece_end; ++i) {
      const weight_t* ahead = bags.weight + bags.rows[std::min(i + rows_ahead, known - 1)] * bags.dim;
      if constexpr (spread) {
        coming[count] = ahead;
      } else {
        fetch_row(ahead, bags.dim);
      }
      present[count] = bags.weight + bags.rows[i] * bags.dim;
      if constexpr (scaled) {
        scale[count] = bags.scale[i];
      }
      count += bags.rows[i] >= 0;
    }
    add_rows<scaled, spread>(present, coming, scale, count, bags.dim, piece == begin, sum);
  }
  if (bags.mean && end - begin > 1) {
    const float length = static_cast<float>(end - begin);
    for (int64_t j = 0; j < bags.dim; ++j) {
      sum[j] /= length;
    }
  }
}

template <bool scaled, bool spread, typename weight_t>
RECFX_INLINE void pool_bags(const Bags<weight_t>& bags, int64_t first, int64_t last) {
  const int64_t rows_ahead = bags.rows_ahead();
  const int64_t known = bags.offsets[last];
  for (int64_t bag = first; bag < last; ++bag) {
    pool_bag<scaled, spread>(bags, bag, known, rows_ahead);
  }
}

// Pools bags [first, last), all rows of which are known.
template <typename weight_t>
RECFX_INLINE void pool_known(const Bags<weight_t>& bags, int64_t first, int64_t last) {
  const bool spread = bags.row_bytes() >= kSpreadBytes;
  if (bags.scale == nullptr) {
    spread ? pool_bags<false, true>(bags, first, last) : pool_bags<false, false>(bags, first, last);
  } else {
    spread ? pool_bags<true, true>(bags, first, last) : pool_bags<true, false>(bags, first, last);
  }
}

RECFX_CLONES static void pool(const Bags<float>& bags, int64_t first, int64_t last) {
  pool_known(bags, first, last);
}

RECFX_CLONES static void pool(const Bags<uint16_t>& bags, int64_t first, int64_t last) {
  pool_known(bags, first, last);
}

}  // namespace recfx
