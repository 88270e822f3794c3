// One index: views of the buffers that HashIndex owns, and the steps that change one row. This file does not use torch.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "index/free_rows.h"
#include "index/lowest_rows.h"
#include "index/mix64.h"
#include "index/row_slice.h"
#include "index/scores.h"
#include "index/slot_groups.h"

namespace recfx {

// States of a row.
constexpr uint8_t kNeverUsed = 0;
constexpr uint8_t kTaken = 1;
constexpr uint8_t kFreed = 2;    // free, but it belonged to an id before
constexpr uint8_t kNew = 3;      // taken and never used before, but it does not hold the weights of its id yet
constexpr uint8_t kRenewed = 5;  // the same, but it belonged to another id before

inline bool is_taken(uint8_t state) { return state % 2 == 1; }
inline bool is_uninitialized(uint8_t state) { return state == kNew || state == kRenewed; }

// Positions in `counts`; kernels/index/index_buffers.py names them.
enum Counter { kBatches, kIdsSeen, kInserted, kEvicted, kSharedAnswers, kUnseenAnswers, kCounters };

// A HashConfig as numbers, which kernels/index/index_buffers.py makes (IndexPolicy).
struct Policy {
  int64_t seed;
  bool share;  // on_full
  bool evict;  // on_full
  bool lfu;    // else lru
  int64_t admit_after;
  bool share_unseen;
  bool keeps_last_row;      // of each bucket: it belongs to no id, and is the one that ids share
  bool mark_new = false;    // rows that are given out are kNew or kRenewed until they are initialised
  int64_t ttl_batches = 0;  // with evict: an id that none of so many batches has seen loses its row; 0: it keeps it
};

// When a candidate was first seen: the number of the batch, then its number among the batch's new candidates in its
// bucket.
constexpr int kNewIdBits = 31;
inline int64_t candidate_order(int64_t batch, int64_t number) { return (batch << kNewIdBits) + number; }
inline int64_t first_batch(int64_t order) { return order >> kNewIdBits; }

// Ids that have been seen, but not often enough to get a row. A bucket has at most as many as it has rows.
struct Candidates {
  SlotGroups table;  // maps ids to places; places are divided into buckets like rows
  int64_t* ids;
  int32_t* counts;  // sightings; 0: the place is free
  int64_t* order;   // when the candidate was first seen
  FreeRows free_places;
  LowestRows oldest;

  // For LowestRows: the oldest candidate is the lowest.
  int64_t score(int64_t place) const { return counts[place] == 0 ? LowestRows::kNoScore : order[place]; }
  int64_t stored_score(int64_t place) const { return order[place]; }
  int64_t key_score(int64_t score) const { return score; }
  Key key(int64_t, int64_t score) const { return {score, 0}; }
  bool blocked(int64_t, int64_t) const { return false; }
  void prefetch(int64_t place) const {
    __builtin_prefetch(counts + place);
    __builtin_prefetch(order + place);
    __builtin_prefetch(ids + place);
  }
};

struct Index {
  Policy policy;
  RowSlice slice;
  SlotGroups table;
  int64_t* row_ids;
  uint8_t* row_state;
  FreeRows free_rows;
  int64_t* bucket_taken;  // per bucket of the slice
  int64_t* counts;
  int64_t* uninitialized;                // [1]: how many rows are kNew or kRenewed
  int64_t* row_scores;                   // with policy.evict
  std::optional<LowestRows> victims;     // with policy.evict
  std::optional<Candidates> candidates;  // with policy.admit_after > 1

  // The bucket that an id belongs to, by the table's numbering.
  int64_t bucket_of(int64_t id) const {
    return mixed_modulo(id, mix64(static_cast<uint64_t>(policy.seed)), slice.buckets);
  }
  // Whether an id without a row here belongs to another slice of the table.
  bool is_foreign(int64_t absent_id) const {
    return !slice.is_whole_table() && (slice.is_dense(absent_id) || !slice.holds_bucket(bucket_of(absent_id)));
  }
  int64_t& taken_in(int64_t bucket) { return bucket_taken[bucket - slice.first_bucket]; }
  // The row that an id shares if it has none of its own. Its bucket must be in the slice.
  int64_t shared_row(int64_t id) const {
    const int64_t bucket = bucket_of(id);
    const int64_t begin = slice.bucket_begin(bucket);
    const int64_t end = slice.bucket_begin(bucket + 1);
    if (policy.keeps_last_row) {
      return end - 1;
    }
    return begin + mixed_modulo(id, mix64(static_cast<uint64_t>(policy.seed) + 1), end - begin);
  }

  // Atomic, because batches that need no new row count without holding the lock. Relaxed, as are all counts and scores
  // that several threads change: no thread concludes from them that other memory has been written.
  void count(Counter which, int64_t amount) {
    std::atomic_ref<int64_t>(counts[which]).fetch_add(amount, std::memory_order_relaxed);
  }
  // Atomic, because others ask for it without holding the lock. To a thread that has been given a new row, by its own
  // batch or by another thread's, the row's count has happened before: it does not read an earlier one.
  void count_uninitialized(int64_t amount) {
    std::atomic_ref<int64_t>(*uninitialized).fetch_add(amount, std::memory_order_relaxed);
  }

  ScoreRule score_rule() const { return ScoreRule(policy.lfu); }
  // Returns the row that the id had, or -1.
  int64_t remove(int64_t id) {
    const int64_t row = table.erase(id);
    if (row != kNoRow) {
      if (is_uninitialized(row_state[row])) {
        count_uninitialized(-1);
      }
      row_ids[row] = kEmptyId;
      row_state[row] = kFreed;
      if (policy.evict) {
        row_scores[row] = 0;
      }
      free_rows.give_back(row);
      --taken_in(bucket_of(id));
    }
    return row;
  }

  void remove_candidate(int64_t id) {
    const int64_t place = candidates->table.erase(id);
    if (place != kNoRow) {
      candidates->ids[place] = kEmptyId;
      candidates->counts[place] = 0;
      candidates->order[place] = 0;
      candidates->free_places.give_back(place);
    }
  }
};

}  // namespace recfx
