// Which piece of a table owns each id. Contract: kernels/route/bucketize.py. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "build/vector_paths.h"
#include "index/mix64.h"

namespace recfx {

// How the ids of one feature map to the pieces of its table.
class PieceOf {
 public:
  // borders: of the pieces, at least two, ascending from 0 to rows. buckets: 0, or at least 1 and at most one per row
  // that is not dense.
  PieceOf(std::vector<int64_t> borders, int64_t rows, int64_t dense_rows, int64_t buckets, int64_t seed)
      : rows_(rows), dense_rows_(dense_rows), buckets_(buckets), mixed_seed_(mix64(static_cast<uint64_t>(seed))) {
    first_rows_ = borders;
    // Ids are compared by the number of their bucket plus dense_rows, not by the bucket's first row: borders are
    // translated once.
    if (buckets > 0) {
      const int64_t index_rows = rows - dense_rows;
      for (int64_t& border : borders) {
        if (border > dense_rows) {
          border = dense_rows + ((border - dense_rows) * buckets + index_rows - 1) / index_rows;
        }
      }
    }
    pieces_ = static_cast<int64_t>(borders.size()) - 1;
    starts_.assign(borders.begin() + 1, borders.end() - 1);
    if (buckets == 0 && rows > 0) {
      block_ = (rows + pieces_ - 1) / pieces_;
      for (int64_t piece = 0; piece <= pieces_; ++piece) {
        if (first_rows_[piece] != std::min(piece * block_, rows)) {
          block_ = 0;
          break;
        }
      }
    }
  }

  int64_t pieces() const { return pieces_; }
  bool ids_are_rows() const { return buckets_ == 0; }
  int64_t rows() const { return rows_; }
  int64_t first_row(int64_t piece) const { return first_rows_[piece]; }

  // Writes the piece of each of ids[0, count). Returns false if an id is not a row; what is written is then
  // meaningless.
  bool find(const int64_t* ids, int64_t count, uint16_t* pieces) const {
    bool all_known = true;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t size = std::min(kBlock, count - begin);
      int64_t keys[kBlock];
      all_known &= on_widest_vectors([&](auto) RECFX_INLINE_LAMBDA { return keys_of(ids + begin, size, keys, *this); });
      const int64_t start_count = static_cast<int64_t>(starts_.size());
      if (block_ > 0 && start_count > kWorthADivision) {
        for (int64_t i = 0; i < size; ++i) {
          pieces[begin + i] = static_cast<uint16_t>(keys[i] / block_);
        }
      } else if (start_count <= kWorthASearch) {
        on_widest_vectors(
            [&](auto) RECFX_INLINE_LAMBDA { compare(keys, size, starts_.data(), start_count, pieces + begin); });
      } else {
        for (int64_t i = 0; i < size; ++i) {
          const auto after = std::upper_bound(starts_.begin(), starts_.end(), keys[i]);
          pieces[begin + i] = static_cast<uint16_t>(after - starts_.begin());
        }
      }
    }
    return all_known;
  }

 private:
  static constexpr int64_t kBlock = 256;
  // Up to this many starts, comparing with all of them is faster.
  static constexpr int64_t kWorthADivision = 32;
  static constexpr int64_t kWorthASearch = 128;

  // Computes the keys that are compared with the starts of pieces.
  RECFX_INLINE static bool keys_of(const int64_t* ids, int64_t count, int64_t* keys, const PieceOf& of) {
    if (of.buckets_ == 0) {
      uint64_t outside = 0;
      const uint64_t rows = static_cast<uint64_t>(of.rows_);
      for (int64_t i = 0; i < count; ++i) {
        outside |= static_cast<uint64_t>(ids[i]) >= rows;
        keys[i] = ids[i];
      }
      return outside == 0;
    }
    const uint64_t dense_rows = static_cast<uint64_t>(of.dense_rows_);
    const uint64_t seed = of.mixed_seed_;
    const bool is_power_of_two = (of.buckets_ & (of.buckets_ - 1)) == 0;
    const uint64_t mask = static_cast<uint64_t>(of.buckets_) - 1;
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t id = static_cast<uint64_t>(ids[i]);
      // this is mixed_modulo, without a division if there is a power of two of buckets
      const uint64_t bucket =
          is_power_of_two ? mix64(id ^ seed) & mask : static_cast<uint64_t>(mixed_modulo(ids[i], seed, of.buckets_));
      keys[i] = static_cast<int64_t>(id < dense_rows ? id : dense_rows + bucket);
    }
    return true;
  }

  RECFX_INLINE static void compare(const int64_t* keys, int64_t count, const int64_t* starts, int64_t start_count,
                                   uint16_t* pieces) {
    uint64_t passed[kBlock] = {};
    for (int64_t k = 0; k < start_count; ++k) {
      const int64_t start = starts[k];
      for (int64_t i = 0; i < count; ++i) {
        passed[i] += keys[i] >= start;
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      pieces[i] = static_cast<uint16_t>(passed[i]);
    }
  }

  int64_t rows_;
  int64_t dense_rows_;
  int64_t buckets_;
  uint64_t mixed_seed_;
  int64_t pieces_;
  int64_t block_ = 0;                // rows of each piece except the last ones, if they are cut that way; otherwise 0
  std::vector<int64_t> first_rows_;  // of each piece, in the table
  std::vector<int64_t> starts_;      // of the pieces from the second on, as keys
};

}  // namespace recfx
