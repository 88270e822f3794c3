// Which rows of a table an index holds, and how the table's rows are divided into buckets. This file does not use
// torch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace recfx {

// Rows [row_begin, row_end) of a table of `table_rows` rows, in which dense rows come first, then the buckets. The row
// numbers that an index stores and returns are relative to the slice (the table's row minus row_begin); buckets are
// numbered as in the table. IndexPolicy in kernels/index/index_buffers.py has the same numbers.
struct RowSlice {
  int64_t table_rows;
  int64_t dense_rows;  // of the table
  int64_t buckets;     // of the table
  int64_t row_begin;
  int64_t row_end;
  int64_t own_dense_rows;  // the first rows of the slice
  int64_t first_bucket;
  int64_t end_bucket;

  // There must be at least one bucket, and at least one row per bucket.
  RowSlice(int64_t table_rows, int64_t dense_rows, int64_t buckets, int64_t row_begin, int64_t row_end)
      : table_rows(table_rows),
        dense_rows(dense_rows),
        buckets(buckets),
        row_begin(row_begin),
        row_end(row_end),
        own_dense_rows(std::max<int64_t>(0, std::min(row_end, dense_rows) - row_begin)),
        first_bucket(bucket_from(row_begin)),
        end_bucket(bucket_from(row_end)) {}

  int64_t rows() const { return row_end - row_begin; }
  int64_t own_buckets() const { return end_bucket - first_bucket; }
  // The number of rows that the index gives out.
  int64_t own_index_rows() const { return rows() - own_dense_rows; }
  bool is_whole_table() const { return rows() == table_rows; }

  bool is_dense(int64_t id) const { return id >= 0 && id < dense_rows; }
  bool holds_bucket(int64_t bucket) const { return first_bucket <= bucket && bucket < end_bucket; }
  // The row at which a bucket begins, relative to the slice.
  int64_t bucket_begin(int64_t bucket) const { return table_bucket_begin(bucket) - row_begin; }
  // A slice begins and ends among the dense rows or at the border of a bucket.
  bool may_be_border(int64_t row) const { return row <= dense_rows || table_bucket_begin(bucket_from(row)) == row; }

 private:
  int64_t table_bucket_begin(int64_t bucket) const { return dense_rows + bucket * (table_rows - dense_rows) / buckets; }
  // The first bucket that begins at or after a row of the table.
  int64_t bucket_from(int64_t row) const {
    const int64_t index_rows = table_rows - dense_rows;
    return (std::max<int64_t>(0, row - dense_rows) * buckets + index_rows - 1) / index_rows;
  }
};

}  // namespace recfx
