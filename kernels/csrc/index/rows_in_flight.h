// Rows that batches in flight use. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

namespace recfx {

// Individual rows of one table. They are sorted only when first needed. Several threads may ask.
class RowsInFlight {
 public:
  // rows: in any order; repeats and negative numbers are allowed. None of their batches is older than number `oldest`.
  RowsInFlight(const int64_t* rows, int64_t count, int64_t oldest) : rows_(rows), count_(count), oldest_(oldest) {}

  bool contains(int64_t row, int64_t last_batch) {
    if (count_ == 0 || last_batch < oldest_) {
      return false;
    }
    std::call_once(is_sorted_, [&] {
      sorted_.assign(rows_, rows_ + count_);
      std::sort(sorted_.begin(), sorted_.end());
    });
    return std::binary_search(sorted_.begin(), sorted_.end(), row);
  }

 private:
  const int64_t* rows_;
  int64_t count_;
  int64_t oldest_;
  std::once_flag is_sorted_;
  std::vector<int64_t> sorted_;
};

}  // namespace recfx
