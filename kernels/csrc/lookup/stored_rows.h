// Pools rows as exported files store them: float32 and float16 as pool.h does, and codes of 8 or 4 bits behind a scale
// and a bias, see kernels/lookup/quantized_rows.py. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "build/float_of.h"
#include "build/vector_paths.h"
#include "lookup/pool.h"

namespace recfx {

// FBGEMM's SparseType, as far as files use it.
enum class RowFormat : int64_t { kFloat = 0, kHalf = 1, kByte = 2, kNibble = 3 };

// Of a stored row. Rows of nibbles have an even number of columns.
constexpr int64_t stored_bytes(RowFormat format, int64_t columns) {
  switch (format) {
    case RowFormat::kFloat:
      return 4 * columns;
    case RowFormat::kHalf:
      return 2 * columns;
    case RowFormat::kByte:
      return 4 + columns;
    case RowFormat::kNibble:
      return 4 + columns / 2;
  }
  return 0;
}

// One feature's bags, and where their sums go.
struct StoredBags {
  const uint8_t* table;
  int64_t bytes;           // of a row
  int64_t columns;         // of a row
  const int64_t* rows;     // of all ids; -1 adds nothing
  const float* scale;      // of all ids, or null
  const int64_t* offsets;  // [bags + 1]
  bool mean;
  float* sums;  // of bag 0
  int64_t sum_stride;
};

constexpr int64_t kStoredAhead = 40;  // how many ids ahead a row is prefetched: rows of codes are narrow

RECFX_INLINE void fetch_stored(const uint8_t* row, int64_t bytes) {
  const uintptr_t end = reinterpret_cast<uintptr_t>(row + bytes);
  for (uintptr_t line = reinterpret_cast<uintptr_t>(row) & ~uintptr_t{63}; line < end; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(line));
  }
}

template <int width>
struct Codes {
  typedef uint8_t Bytes __attribute__((vector_size(width)));
  typedef int32_t Integers __attribute__((vector_size(width * 4)));
};

template <int width>
RECFX_INLINE void convert_bytes(typename Codes<width>::Bytes bytes, typename Vectors<width>::Floats& result) {
#ifdef RECFX_X86_TARGETS
  if constexpr (width >= 8) {
    __asm__("" : "+x"(bytes));  // GCC would otherwise load and convert byte by byte
  }
#elif defined(__aarch64__)
  if constexpr (width == 4) {  // likewise
    uint32_t packed;
    std::memcpy(&packed, &bytes, sizeof(packed));
    const uint16x8_t pairs = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(packed)));
    result = (typename Vectors<width>::Floats)vcvtq_f32_u32(vmovl_u16(vget_low_u16(pairs)));
    return;
  }
#endif
  const auto codes = __builtin_convertvector(bytes, typename Codes<width>::Integers);
  result = __builtin_convertvector(codes, typename Vectors<width>::Floats);
}

template <int width>
RECFX_INLINE void load_bytes(const uint8_t* from, typename Vectors<width>::Floats& result) {
  typename Codes<width>::Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  convert_bytes<width>(bytes, result);
}

template <int width>
struct Nibbles {
  typedef uint16_t Pairs __attribute__((vector_size(width)));  // two nibbles each
};

// Codes of 4 bits, in the order of their columns: the lower bits of a byte come first.
template <int width>
RECFX_INLINE void load_nibbles_in_order(const uint8_t* from, typename Vectors<width>::Floats& result) {
  typename Codes<width / 2>::Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  const auto pairs = __builtin_convertvector(bytes, typename Nibbles<width>::Pairs);
  const typename Nibbles<width>::Pairs apart = (pairs | pairs << 4) & 0x0f0f;
  convert_bytes<width>((typename Codes<width>::Bytes)apart, result);
}

// Codes of 4 bits: the even columns of 2 * width, or the odd ones.
template <int width>
RECFX_INLINE void load_nibbles(const uint8_t* from, int shift, typename Vectors<width>::Floats& result) {
  typename Codes<width>::Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  convert_bytes<width>((bytes >> shift) & 15, result);
}

// The values of `width` columns from `column` on: for nibbles, of every second column.
template <RowFormat format, int width>
RECFX_INLINE void load_stored(const uint8_t* row, int64_t column, int part, typename Vectors<width>::Floats& result) {
  if constexpr (format == RowFormat::kByte) {
    load_bytes<width>(row + 4 + column, result);
  } else {
    load_nibbles<width>(row + 4 + column / 2, part % 2 * 4, result);
  }
}

// Some rows of a bag: where they are, and what their values are multiplied by.
struct Burst {
  static constexpr int64_t kMost = 32;
  const uint8_t* from[kMost];
  float scale[kMost];
  int64_t count;
};

// Prefetches the row of a later id than the i-th.
RECFX_INLINE void fetch_ahead(const StoredBags& bags, int64_t i, int64_t last) {
  const int64_t coming = bags.rows[std::min(i + kStoredAhead, last)];
  fetch_stored(bags.table + (coming < 0 ? 0 : coming) * bags.bytes, bags.bytes);
}

// The scale and the bias of the row of the i-th id, times the weight of the id.
RECFX_INLINE Vectors<2>::Floats scale_and_bias(const StoredBags& bags, int64_t i, const uint8_t* row) {
  uint16_t halves[2];
  std::memcpy(halves, row, sizeof(halves));
  Vectors<2>::Floats values;
  load<2>(halves, values);
  return values * (bags.scale == nullptr ? 1.0F : bags.scale[i]);
}

// Takes up the rows of ids [begin, end) that are there, and prefetches those of later ids. Returns the sum of their
// biases, which all columns have in common, in the order of the ids.
RECFX_INLINE float take_up(const StoredBags& bags, int64_t begin, int64_t end, int64_t last, Burst& burst) {
  int64_t count = 0;
  float bias = 0.0F;
  for (int64_t i = begin; i < end; ++i) {
    fetch_ahead(bags, i, last);
    const int64_t row = bags.rows[i];
    if (row < 0) {
      continue;
    }
    const uint8_t* from = bags.table + row * bags.bytes;
    const auto values = scale_and_bias(bags, i, from);
    bias += values[1];
    burst.from[count] = from;
    burst.scale[count] = values[0];
    ++count;
  }
  burst.count = count;
  return bias;
}

// Adds `parts` times `width` columns of the rows, and `bias` to each. For nibbles, each pair of parts holds the even
// and the odd columns of the same 2 * width columns, and `sum` gets them in this order until unzip().
template <RowFormat format, int parts, int width>
RECFX_INLINE void add_stored(const Burst& burst, int64_t column, bool is_first, float bias, float* sum) {
  using Floats = typename Vectors<width>::Floats;
  constexpr int step = format == RowFormat::kNibble ? 2 : 1;
  Floats totals[parts];  // in registers: every loop over it is unrolled
#pragma GCC unroll 8
  for (int part = 0; part < parts; ++part) {
    totals[part] = Floats{};
    if (!is_first) {
      std::memcpy(&totals[part], sum + column + part * width, sizeof(Floats));
    }
  }
  for (int64_t i = 0; i < burst.count; ++i) {
#pragma GCC unroll 8
    for (int part = 0; part < parts; ++part) {
      Floats values;
      load_stored<format, width>(burst.from[i], column + part / step * step * width, part, values);
      totals[part] += values * burst.scale[i];
    }
  }
#pragma GCC unroll 8
  for (int part = 0; part < parts; ++part) {
    totals[part] += bias;
    std::memcpy(sum + column + part * width, &totals[part], sizeof(Floats));
  }
}

// Calls run(parts, width, column) for the pieces of a row's columns, the widest first.
template <int native, int smallest, typename Run>
RECFX_INLINE void for_columns(int64_t columns, const Run& run) {
  int64_t column = 0;
  for (; column + 8 * native <= columns; column += 8 * native) {
    run(std::integral_constant<int, 8>(), std::integral_constant<int, native>(), column);
  }
  for (; column + 4 * native <= columns; column += 4 * native) {
    run(std::integral_constant<int, 4>(), std::integral_constant<int, native>(), column);
  }
  for (; column + 2 * native <= columns; column += 2 * native) {
    run(std::integral_constant<int, 2>(), std::integral_constant<int, native>(), column);
  }
  for (; column + smallest * 4 <= columns; column += smallest * 4) {
    run(std::integral_constant<int, smallest>(), std::integral_constant<int, 4>(), column);
  }
  for (; column < columns; column += smallest) {
    run(std::integral_constant<int, smallest>(), std::integral_constant<int, 1>(), column);
  }
}

// Puts even and odd columns, which follow each other in runs of `width`, next to each other.
template <int parts, int width>
RECFX_INLINE void unzip(float* sum) {
  float zipped[parts * width];
  std::memcpy(zipped, sum, sizeof(zipped));
  for (int pair = 0; pair < parts / 2; ++pair) {
    for (int k = 0; k < width; ++k) {
      sum[2 * (pair * width + k)] = zipped[2 * pair * width + k];
      sum[2 * (pair * width + k) + 1] = zipped[(2 * pair + 1) * width + k];
    }
  }
}

// Writes the row of the i-th id, the only one of its bag, in one pass. The values are those that take_up() and
// add_stored() make, whose sums begin with zero.
template <RowFormat format, int native, int smallest>
RECFX_INLINE void write_stored(const StoredBags& bags, int64_t i, float* sum) {
  const uint8_t* row = bags.table + bags.rows[i] * bags.bytes;
  const auto found = scale_and_bias(bags, i, row);
  const float scale = found[0];
  const float bias = 0.0F + found[1];
  for_columns<native, smallest>(bags.columns, [&](auto parts, auto width, int64_t begin) RECFX_INLINE_LAMBDA {
    constexpr int step = std::max<int>(width.value, smallest);
#pragma GCC unroll 8
    for (int part = 0; part < parts.value * width.value / step; ++part) {
      const int64_t column = begin + part * step;
      typename Vectors<step>::Floats values;
      if constexpr (format == RowFormat::kByte) {
        load_bytes<step>(row + 4 + column, values);
      } else {
        load_nibbles_in_order<step>(row + 4 + column / 2, values);
      }
      values = values * scale + bias;
      std::memcpy(sum + column, &values, sizeof(values));
    }
  });
}

// native: how many float32 fit into one of the machine's vectors.
template <RowFormat format, int native>
RECFX_INLINE void pool_stored_bags(const StoredBags& bags, int64_t first, int64_t last) {
  constexpr int smallest = format == RowFormat::kNibble ? 2 : 1;  // parts: nibbles come in pairs
  const int64_t last_id = bags.offsets[last] - 1;
  Burst burst;
  for (int64_t bag = first; bag < last; ++bag) {
    const int64_t begin = bags.offsets[bag];
    const int64_t end = bags.offsets[bag + 1];
    float* sum = bags.sums + bag * bags.sum_stride;
    if (end - begin == 1 && bags.rows[begin] >= 0) {
      fetch_ahead(bags, begin, last_id);
      write_stored<format, native, smallest>(bags, begin, sum);
      continue;
    }
    for (int64_t piece = begin; piece == begin || piece < end; piece += Burst::kMost) {
      const float bias = take_up(bags, piece, std::min(piece + Burst::kMost, end), last_id, burst);
      for_columns<native, smallest>(bags.columns, [&](auto parts, auto width, int64_t column) RECFX_INLINE_LAMBDA {
        add_stored<format, parts.value, width.value>(burst, column, piece == begin, bias, sum);
      });
    }
    if constexpr (format == RowFormat::kNibble) {
      for_columns<native, smallest>(bags.columns, [&](auto parts, auto width, int64_t column) RECFX_INLINE_LAMBDA {
        unzip<parts.value, width.value>(sum + column);
      });
    }
    if (bags.mean && end - begin > 1) {
      const auto length = static_cast<float>(end - begin);
      for (int64_t column = 0; column < bags.columns; ++column) {
        sum[column] /= length;
      }
    }
  }
}

template <typename weight_t>
static void pool_floats(const StoredBags& bags, int64_t first, int64_t last) {
  const auto* weight = reinterpret_cast<const weight_t*>(bags.table);
  pool(Bags<weight_t>{weight, bags.columns, bags.rows, bags.scale, bags.offsets, bags.mean, bags.sums, bags.sum_stride},
       first, last);
}

// Pools bags [first, last). All their rows must be known, and be rows of the table or -1.
static void pool_stored(RowFormat format, const StoredBags& bags, int64_t first, int64_t last) {
  if (format == RowFormat::kFloat) {
    return pool_floats<float>(bags, first, last);
  }
  if (format == RowFormat::kHalf) {
    return pool_floats<uint16_t>(bags, first, last);
  }
  on_widest_vectors([&](auto native) RECFX_INLINE_LAMBDA {
    if (format == RowFormat::kByte) {
      pool_stored_bags<RowFormat::kByte, native.value>(bags, first, last);
    } else {
      pool_stored_bags<RowFormat::kNibble, native.value>(bags, first, last);
    }
  });
}

}  // namespace recfx
