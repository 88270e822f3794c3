// What ids without a row of their own read in a pooled lookup. This file does not use torch.
#pragma once

#include <cstdint>

#include "index/mix64.h"

namespace recfx {

// What an id without a row of its own reads: nothing, or a row of its bucket if the bucket belongs to this slice of the
// table.
struct AbsentAnswer {
  int64_t rows;        // of the table
  int64_t dense_rows;  // of the table
  int64_t buckets;     // of the table; 0: such ids read nothing
  bool last_row;       // they read the last row of their bucket
  int64_t row_begin;   // the first row of the slice
  int64_t own_rows;    // of the slice
  uint64_t mixed_seed;
  uint64_t mixed_share_seed;

  AbsentAnswer(int64_t rows, int64_t dense_rows, int64_t buckets, int64_t seed, int64_t row_begin, int64_t own_rows)
      : rows(rows),
        dense_rows(dense_rows),
        buckets(buckets < 0 ? -buckets : buckets),
        last_row(buckets < 0),
        row_begin(row_begin),
        own_rows(own_rows),
        mixed_seed(mix64(static_cast<uint64_t>(seed))),
        mixed_share_seed(mix64(static_cast<uint64_t>(seed) + 1)) {}

  int64_t bucket_begin(int64_t bucket) const { return dense_rows + bucket * (rows - dense_rows) / buckets; }

  // The row that shared_rows() in kernels/index/buckets.py returns, minus row_begin; -1 for an id of another slice.
  int64_t shared_row(int64_t id) const {
    if (static_cast<uint64_t>(id) < static_cast<uint64_t>(dense_rows)) {
      return -1;
    }
    const int64_t bucket = mixed_modulo(id, mixed_seed, buckets);
    const int64_t begin = bucket_begin(bucket);
    const int64_t count = bucket_begin(bucket + 1) - begin;
    const int64_t row = begin + (last_row ? count - 1 : mixed_modulo(id, mixed_share_seed, count)) - row_begin;
    return static_cast<uint64_t>(row) < static_cast<uint64_t>(own_rows) ? row : -1;
  }
};

// Fills in those of rows[begin, end) that are -1, and counts them.
inline int64_t answer_absent(const int64_t* ids, int64_t* rows, int64_t begin, int64_t end,
                             const AbsentAnswer& answer) {
  int64_t absent = 0;
  for (int64_t i = begin; i < end; ++i) {
    absent += rows[i] < 0;
  }
  if (absent > 0 && answer.buckets > 0) {
    for (int64_t i = begin; i < end; ++i) {
      rows[i] = rows[i] < 0 ? answer.shared_row(ids[i]) : rows[i];
    }
  }
  return absent;
}

}  // namespace recfx
