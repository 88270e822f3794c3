// The scores of the rows that one batch of one table uses. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "find_in_groups.h"
#include "index.h"

namespace recfx {

class TouchedScores {
 public:
  // rows: found for each id of the batch, -1 for other ids. before: memory for as many numbers.
  TouchedScores(Index& index, const int64_t* rows, int64_t count, int64_t* before)
      : index_(index), rows_(rows), count_(count), before_(before) {}

  // Records that batch number `batch` uses the rows found: those of one of `shares` equal shares of the table's rows,
  // so that several threads need no atomic operations, which are several times as slow.
  void touch(int64_t share, int64_t shares, int64_t batch) {
    const int64_t own_rows = index_.slice.rows() - index_.slice.own_dense_rows;
    const int64_t first = index_.slice.own_dense_rows + share * own_rows / shares;
    const int64_t last = index_.slice.own_dense_rows + (share + 1) * own_rows / shares;
    const ScoreRule rule = index_.score_rule();
    int64_t ours[2][kLookahead];
    int64_t counts[2] = {0, 0};
    int now = 0;
    for (int64_t begin = 0; begin < count_; begin += kLookahead, now ^= 1) {
      int64_t count = 0;
      for (int64_t i = begin; i < std::min(begin + kLookahead, count_); ++i) {
        ours[now][count] = i;
        count += first <= rows_[i] && rows_[i] < last;
      }
      counts[now] = count;
      for (int64_t k = 0; k < count; ++k) {
        __builtin_prefetch(index_.row_scores + rows_[ours[now][k]], 1);
      }
      touch_all(ours[now ^ 1], counts[now ^ 1], rule, batch);
    }
    touch_all(ours[now ^ 1], counts[now ^ 1], rule, batch);
  }

  // To be called once all shares were touched, before the ids without a row are answered.
  void undo() {
    for (int64_t i = 0; i < count_; ++i) {
      if (rows_[i] >=
          index_.slice.own_dense_rows) {  // if a row was touched several times, its score was the lowest of these
        int64_t& score = index_.row_scores[rows_[i]];
        score = std::min(score, before_[i]);
      }
    }
  }

 private:
  void touch_all(const int64_t* positions, int64_t count, const ScoreRule& rule, int64_t batch) {
    for (int64_t k = 0; k < count; ++k) {
      int64_t& score = index_.row_scores[rows_[positions[k]]];
      before_[positions[k]] = score;
      score = rule.touched(score, batch);
    }
  }

  Index& index_;
  const int64_t* rows_;
  int64_t count_;
  int64_t* before_;
};

}  // namespace recfx
