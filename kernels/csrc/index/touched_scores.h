// The scores of the rows that one batch of one table uses. This file does not use torch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "index/find_in_groups.h"
#include "index/index.h"

namespace recfx {

class TouchedScores {
 public:
  // rows: found for each id of the batch, -1 for other ids. before: memory for as many numbers.
  TouchedScores(Index& index, const int64_t* rows, int64_t count, int64_t* before)
      : index_(index), rows_(rows), count_(count), before_(before) {}

  // Whether several threads may touch any ids at the same time; then it is best done right after these were found.
  static bool any_order(const ScoreRule& rule, int64_t threads) { return threads == 1 || rule.is_idempotent(); }

  // Records that batch number `batch` uses the rows found for the ids from `begin` to `end`. See any_order.
  void touch_ids(int64_t begin, int64_t end, int64_t batch) {
    const int64_t first = index_.slice.own_dense_rows;
    touch(begin, end, batch, [first](int64_t row) { return row >= first; });
  }

  // The same for the rows of one of `shares` equal shares of the table's rows, so that several threads need no atomic
  // operations, which are several times as slow.
  void touch_share(int64_t share, int64_t shares, int64_t batch) {
    const int64_t own_rows = index_.slice.rows() - index_.slice.own_dense_rows;
    const int64_t first = index_.slice.own_dense_rows + share * own_rows / shares;
    const int64_t last = index_.slice.own_dense_rows + (share + 1) * own_rows / shares;
    touch(0, count_, batch, [first, last](int64_t row) { return first <= row && row < last; });
  }

  // Undoes the touches of the ids from `begin` to `end`, once all others are made or undone, before the ids without a
  // row are answered.
  void undo(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (rows_[i] >= index_.slice.own_dense_rows) {
        // If a row was touched several times, its score was the lowest of these: whoever wrote it first had read what
        // was there before, in any order of memory.
        int64_t& score = index_.row_scores[rows_[i]];
        score = std::min(score, before_[i]);
      }
    }
  }

 private:
  // The ids from `begin` to `end` whose rows `is_ours` takes, a block of them after their scores were prefetched.
  template <typename IsOurs>
  void touch(int64_t begin, int64_t end, int64_t batch, const IsOurs& is_ours) {
    const ScoreRule rule = index_.score_rule();
    int64_t ours[2][kLookahead];
    int64_t counts[2] = {0, 0};
    int now = 0;
    for (; begin < end; begin += kLookahead, now ^= 1) {
      int64_t count = 0;
      for (int64_t i = begin; i < std::min(begin + kLookahead, end); ++i) {
        ours[now][count] = i;
        count += is_ours(rows_[i]);
      }
      prefetch_all(ours[now], count);
      counts[now] = count;
      touch_all(ours[now ^ 1], counts[now ^ 1], rule, batch);
    }
    touch_all(ours[now ^ 1], counts[now ^ 1], rule, batch);
  }

  void prefetch_all(const int64_t* positions, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
      __builtin_prefetch(index_.row_scores + rows_[positions[k]], 1);
    }
  }

  void touch_all(const int64_t* positions, int64_t count, const ScoreRule& rule, int64_t batch) {
    for (int64_t k = 0; k < count; ++k) {
      const std::atomic_ref<int64_t> score(index_.row_scores[rows_[positions[k]]]);
      const int64_t before = score.load(std::memory_order_relaxed);
      before_[positions[k]] = before;
      score.store(rule.touched(before, batch), std::memory_order_relaxed);
    }
  }

  Index& index_;
  const int64_t* rows_;
  int64_t count_;
  int64_t* before_;
};

}  // namespace recfx
