// Pools bags of rows, or copies the rows, prefetching them. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "build/float_of.h"
#include "build/vector_paths.h"
#include "lookup/gather.h"

namespace recfx {

constexpr int64_t kLineBytes = 64;

// Rows of at least this many bytes are added one by one, while the cache lines of a later row are prefetched. Narrower
// rows are prefetched in bursts before they are added, which keeps more of them in flight.
constexpr int64_t kWideBytes = 128;

// How many ids ahead a row is prefetched.
constexpr int64_t kWideAhead = 32;
constexpr int64_t kNarrowAhead = 32;

// One feature's bags, and where their sums go.
template <typename weight_t>
struct Bags {
  const weight_t* weight;  // [rows, dim]
  int64_t dim;
  const int64_t* rows;     // of all ids; -1 adds nothing
  const float* scale;      // of all ids, or null
  const int64_t* offsets;  // [bags + 1]; null: rows are not pooled, each id is a bag
  bool mean;
  float* sums;  // of the first bag
  int64_t sum_stride;
  int64_t first_bag = 0;  // its number: that of the feature's first id if rows are not pooled

  RECFX_INLINE int64_t row_bytes() const { return dim * static_cast<int64_t>(sizeof(weight_t)); }
};

template <typename weight_t>
RECFX_INLINE void fetch_row(const weight_t* row, int64_t dim) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(row) & ~static_cast<uintptr_t>(kLineBytes - 1);
  const uintptr_t end = reinterpret_cast<uintptr_t>(row + dim);
  for (uintptr_t line = begin; line < end; line += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(line));
  }
}

// Sums `parts` times `width` columns of one bag's rows, in the order of the rows, and prefetches these columns of later
// rows, for which it may read bags.rows[0, last].
template <int parts, int width, bool scaled, typename weight_t>
RECFX_INLINE void pool_columns(const Bags<weight_t>& bags, int64_t begin, int64_t end, int64_t last, int64_t column,
                               float* sum) {
  using Floats = typename Vectors<width>::Floats;
  constexpr int parts_per_line = std::max<int>(1, kLineBytes / (width * sizeof(weight_t)));
  Floats totals[parts];  // in registers: every loop over it is unrolled
#pragma GCC unroll 8
  for (int part = 0; part < parts; ++part) {
    totals[part] = Floats{};
  }
  for (int64_t i = begin; i < end; ++i) {
    const weight_t* coming = bags.weight + bags.rows[std::min(i + kWideAhead, last)] * bags.dim + column;
#pragma GCC unroll 8
    for (int part = 0; part < parts; part += parts_per_line) {
      __builtin_prefetch(coming + part * width);
    }
    const int64_t row = bags.rows[i];
    if (row < 0) {
      continue;
    }
    const weight_t* from = bags.weight + row * bags.dim + column;
#pragma GCC unroll 8
    for (int part = 0; part < parts; ++part) {
      Floats values;
      load<width>(from + part * width, values);
      totals[part] += scaled ? values * bags.scale[i] : values;
    }
  }
#pragma GCC unroll 8
  for (int part = 0; part < parts; ++part) {
    std::memcpy(sum + column + part * width, &totals[part], sizeof(Floats));
  }
}

// native: how many float32 fit into one of the machine's vectors. Wider ones would be spilled to memory.
template <int native, bool scaled, typename weight_t>
RECFX_INLINE void pool_wide_bag(const Bags<weight_t>& bags, int64_t begin, int64_t end, int64_t last, float* sum) {
  int64_t column = 0;
  for (; column + 8 * native <= bags.dim; column += 8 * native) {
    pool_columns<8, native, scaled>(bags, begin, end, last, column, sum);
  }
  for (; column + 4 * native <= bags.dim; column += 4 * native) {
    pool_columns<4, native, scaled>(bags, begin, end, last, column, sum);
  }
  for (; column + 2 * native <= bags.dim; column += 2 * native) {
    pool_columns<2, native, scaled>(bags, begin, end, last, column, sum);
  }
  for (; column + native <= bags.dim; column += native) {
    pool_columns<1, native, scaled>(bags, begin, end, last, column, sum);
  }
  for (; column + 4 <= bags.dim; column += 4) {
    pool_columns<1, 4, scaled>(bags, begin, end, last, column, sum);
  }
  for (; column < bags.dim; ++column) {
    pool_columns<1, 1, scaled>(bags, begin, end, last, column, sum);
  }
}

// Adds `width` columns of some rows to sum, in the order of the rows.
template <int width, bool scaled, typename weight_t>
RECFX_INLINE void add_columns(const weight_t* const* rows, const float* scale, int64_t count, int64_t column,
                              bool first, float* sum) {
  using Floats = typename Vectors<width>::Floats;
  Floats total{};
  if (!first) {
    load<width>(sum + column, total);
  }
  for (int64_t i = 0; i < count; ++i) {
    Floats values;
    load<width>(rows[i] + column, values);
    total += scaled ? values * scale[i] : values;
  }
  std::memcpy(sum + column, &total, sizeof(Floats));
}

template <int native, bool scaled, typename weight_t>
RECFX_INLINE void add_rows(const weight_t* const* rows, const float* scale, int64_t count, int64_t dim, bool first,
                           float* sum) {
  int64_t column = 0;
  for (; column + native <= dim; column += native) {
    add_columns<native, scaled>(rows, scale, count, column, first, sum);
  }
  for (; column + 4 <= dim; column += 4) {
    add_columns<4, scaled>(rows, scale, count, column, first, sum);
  }
  for (; column < dim; ++column) {
    add_columns<1, scaled>(rows, scale, count, column, first, sum);
  }
}

template <int native, bool scaled, typename weight_t>
RECFX_INLINE void pool_narrow_bag(const Bags<weight_t>& bags, int64_t begin, int64_t end, int64_t last, float* sum) {
  constexpr int64_t kPiece = 32;
  const weight_t* present[kPiece];
  float scale[kPiece];
  for (int64_t piece = begin; piece == begin || piece < end; piece += kPiece) {
    const int64_t piece_end = std::min(piece + kPiece, end);
    int64_t count = 0;
    for (int64_t i = piece; i < piece_end; ++i) {
      fetch_row(bags.weight + bags.rows[std::min(i + kNarrowAhead, last)] * bags.dim, bags.dim);
      present[count] = bags.weight + bags.rows[i] * bags.dim;
      if constexpr (scaled) {
        scale[count] = bags.scale[i];
      }
      count += bags.rows[i] >= 0;
    }
    add_rows<native, scaled>(present, scale, count, bags.dim, piece == begin, sum);
  }
}

template <int native, bool scaled, bool wide, typename weight_t>
RECFX_INLINE void pool_bags(const Bags<weight_t>& bags, int64_t first, int64_t last) {
  const int64_t last_id = bags.offsets[last] - 1;
  for (int64_t bag = first; bag < last; ++bag) {
    const int64_t begin = bags.offsets[bag];
    const int64_t end = bags.offsets[bag + 1];
    float* sum = bags.sums + bag * bags.sum_stride;
    if constexpr (wide) {
      pool_wide_bag<native, scaled>(bags, begin, end, last_id, sum);
    } else {
      pool_narrow_bag<native, scaled>(bags, begin, end, last_id, sum);
    }
    if (bags.mean && end - begin > 1) {
      const float length = static_cast<float>(end - begin);
      for (int64_t j = 0; j < bags.dim; ++j) {
        sum[j] /= length;
      }
    }
  }
}

template <int native, typename weight_t>
RECFX_INLINE void gather_rows(const Bags<weight_t>& bags, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    fetch_row(bags.weight + bags.rows[std::min(i + kWideAhead, last - 1)] * bags.dim, bags.dim);
    float* to = bags.sums + (i - bags.first_bag) * bags.sum_stride;
    if (bags.rows[i] < 0) {
      std::fill(to, to + bags.dim, 0.0F);
    } else {
      copy_row<native>(bags.weight + bags.rows[i] * bags.dim, bags.dim, to);
    }
  }
}

template <int native, typename weight_t>
RECFX_INLINE void pool_all(const Bags<weight_t>& bags, int64_t first, int64_t last) {
  if (bags.offsets == nullptr) {
    return gather_rows<native>(bags, first, last);
  }
  const bool wide = bags.row_bytes() >= kWideBytes;
  if (bags.scale == nullptr) {
    wide ? pool_bags<native, false, true>(bags, first, last) : pool_bags<native, false, false>(bags, first, last);
  } else {
    wide ? pool_bags<native, true, true>(bags, first, last) : pool_bags<native, true, false>(bags, first, last);
  }
}

// Pools bags [first, last). All their rows must be known.
template <typename weight_t>
static void pool(const Bags<weight_t>& bags, int64_t first, int64_t last) {
  on_widest_vectors([&](auto native) RECFX_INLINE_LAMBDA { pool_all<native.value>(bags, first, last); });
}

}  // namespace recfx
