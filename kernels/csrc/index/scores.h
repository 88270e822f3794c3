// The scores that decide which row is evicted: one int64 per row. This file does not use torch.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>

#include "index/mix64.h"

namespace recfx {

// Rows are evicted in the order of their keys, lowest first. Candidates for admission are ordered by `score` alone.
struct Key {
  int64_t score;
  int64_t tie;
  auto operator<=>(const Key&) const = default;
};

// lru: the number of the batch that used the row last.
// lfu: sightings in the upper 27 bits, that batch in the lower 36; sightings saturate.
class ScoreRule {
 public:
  explicit ScoreRule(bool lfu) : lfu_(lfu) {}

  int64_t initial(int64_t sightings, int64_t batch) const {
    return lfu_ ? (std::min(sightings, kMostSightings) << kBatchBits) | batch : batch;
  }

  // `score` after one more sighting in `batch`.
  int64_t touched(int64_t score, int64_t batch) const {
    return lfu_ ? initial((score >> kBatchBits) + 1, batch) : batch;
  }

  // Whether a row has the same score however often it is touched in a batch.
  bool is_idempotent() const { return !lfu_; }

  int64_t last_batch(int64_t score) const { return lfu_ ? score & ((int64_t{1} << kBatchBits) - 1) : score; }

  // The part of the score that is compared first; ties are broken by the hash of the id.
  int64_t key_score(int64_t score) const { return lfu_ ? score >> kBatchBits : score; }
  Key key(int64_t score, int64_t id) const {
    return {key_score(score), static_cast<int64_t>(mix64(static_cast<uint64_t>(id)))};
  }

 private:
  static constexpr int kBatchBits = 36;
  static constexpr int64_t kMostSightings = (int64_t{1} << 27) - 1;
  bool lfu_;
};

}  // namespace recfx
