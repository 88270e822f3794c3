// One batch of one table: which ids are new, which ids get a row, and which ids are evicted for them. This file does
// not use torch.
// All ids must belong to the slice. plan() only reads; touch() and allocate() change the index and can be undone, even
// if they threw; commit() cannot fail. So either all tables go through a batch together, or none does.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "find_in_groups.h"
#include "index.h"
#include "new_ids.h"

namespace recfx {

// The answer for a row that is read but not trained: a number below -1.
inline int64_t untrained(int64_t row) { return -row - 2; }

// Individual rows that batches in flight use. They are sorted only when first needed.
class RowsInFlight {
 public:
  RowsInFlight() = default;
  // rows: in any order; repeats and negative numbers are allowed. None of their batches is older than number `oldest`.
  RowsInFlight(const int64_t* rows, int64_t count, int64_t oldest) : rows_(rows), count_(count), oldest_(oldest) {}

  bool contains(int64_t row, int64_t last_batch) {
    if (count_ == 0 || last_batch < oldest_) {
      return false;
    }
    if (sorted_.empty()) {
      sorted_.assign(rows_, rows_ + count_);
      std::sort(sorted_.begin(), sorted_.end());
    }
    return std::binary_search(sorted_.begin(), sorted_.end(), row);
  }

 private:
  const int64_t* rows_ = nullptr;
  int64_t count_ = 0;
  int64_t oldest_ = 0;
  std::vector<int64_t> sorted_;
};

class TableBatch {
 public:
  // A row that was given out, and what it held before.
  struct Given {
    int64_t row;
    uint8_t state_before;
    int64_t id_before;
    int64_t score_before;
  };
  static constexpr int64_t kNone = -1;

  // `rows` holds the rows that were found, and -1 for other ids. Rows that are used by batches from number
  // `oldest_in_flight` on are not evicted, and neither are the rows of earlier batches in `listed`.
  TableBatch(Index& index, const int64_t* ids, int64_t* rows, int64_t count, int64_t oldest_in_flight,
             RowsInFlight listed)
      : index_(index),
        ids_(ids),
        rows_(rows),
        count_(count),
        batch_(index.counts[kBatches] + 1),
        oldest_in_flight_(std::min(oldest_in_flight, batch_)),
        listed_(listed),
        scores_before_(index.policy.evict ? count : 0, kNone) {}

  const std::vector<Given>& given() const { return given_; }
  // The bucket that was full; kNone if everything went well.
  int64_t full_bucket() const { return full_bucket_; }

  // Records that this batch uses the rows found for ids[begin, end). Several threads may call it, each with its own
  // ids.
  void touch(int64_t begin, int64_t end) {
    const ScoreRule rule = index_.score_rule();
    for (int64_t i = begin; i < end; ++i) {
      if (i + kLookahead < end && rows_[i + kLookahead] >= 0) {
        __builtin_prefetch(index_.row_scores + rows_[i + kLookahead], 1);
      }
      if (rows_[i] >= index_.slice.own_dense_rows) {
        scores_before_[i] = rule.touch(index_.row_scores[rows_[i]], batch_);
      }
    }
  }

  // Collects the new ids, and how often each has been seen. missing: the positions at which rows are -1, ascending.
  void plan(std::vector<int64_t> missing) {
    new_ids_.collect(ids_, std::move(missing));
    if (!index_.candidates) {
      return;
    }
    for (NewId& each : new_ids_.distinct()) {
      const int64_t place = index_.candidates->table.find(each.id);
      each.seen_before = place == kNoRow ? 0 : index_.candidates->counts[place];
    }
  }

  // Gives rows to the ids that are admitted; stops at a full bucket.
  void allocate() {
    std::vector<NewId>& distinct = new_ids_.distinct();
    for (size_t i = 0; i < distinct.size() && full_bucket_ == kNone; ++i) {
      NewId& each = distinct[i];
      if (is_admitted(each)) {
        give_row(each);
      } else {
        each.answer = index_.policy.share_unseen ? untrained(index_.shared_row(each.id)) : kNoRow;
        unseen_answers_ += each.sightings;
      }
    }
    if (full_bucket_ == kNone) {
      write_slots();
      new_ids_.answer(rows_);
    }
    if (index_.candidates) {
      new_candidates_.assign(index_.slice.own_buckets(),
                             0);  // allocated here, because commit() must not run out of memory
    }
  }

  void undo() {
    for (auto each = given_.rbegin(); each != given_.rend(); ++each) {
      if (slots_written_) {
        index_.table.erase(index_.row_ids[each->row]);
      }
      if (is_taken(each->state_before)) {
        if (slots_written_) {
          index_.table.insert(each->id_before, each->row);
        }
      } else {
        --index_.taken_in(index_.bucket_of(index_.row_ids[each->row]));
        index_.free_rows.give_back(each->row);
      }
      index_.row_ids[each->row] = each->id_before;
      index_.row_state[each->row] = each->state_before;
      if (index_.policy.evict) {
        index_.row_scores[each->row] = each->score_before;
      }
    }
    given_.clear();
    if (index_.policy.evict) {
      undo_touches();
    }
  }

  void commit() {
    for (const Given& each : given_) {
      *index_.uninitialized += is_uninitialized(index_.row_state[each.row]) - is_uninitialized(each.state_before);
    }
    if (index_.candidates) {
      update_candidates();
    }
    if (index_.policy.evict) {
      for (const Given& each : given_) {
        offer(each.row);
      }
      for (const int64_t row : blocked_) {
        offer(row);
      }
    }
    count(kBatches, 1);
    count(kIdsSeen, count_);
    count(kInserted, static_cast<int64_t>(given_.size()));
    count(kEvicted, evicted_);
    count(kSharedAnswers, shared_answers_);
    count(kUnseenAnswers, unseen_answers_);
  }

 private:
  // Atomic, because batches that need no new row count without holding the lock.
  void count(Counter which, int64_t amount) {
    std::atomic_ref<int64_t>(index_.counts[which]).fetch_add(amount, std::memory_order_relaxed);
  }

  // For LowestRows: which rows of the table may be evicted, and in which order.
  struct Evictable {
    TableBatch& batch;
    ScoreRule rule;

    int64_t score(int64_t row) const {
      return is_taken(batch.index_.row_state[row]) ? batch.index_.row_scores[row] : LowestRows::kNoScore;
    }
    int64_t key_score(int64_t score) const { return rule.key_score(score); }
    Key key(int64_t row, int64_t score) const { return rule.key(score, batch.index_.row_ids[row]); }
    bool blocked(int64_t row, int64_t score) const {
      const int64_t last_batch = rule.last_batch(score);
      return last_batch >= batch.oldest_in_flight_ || batch.listed_.contains(row, last_batch);
    }
  };

  bool is_admitted(const NewId& each) const { return each.seen_before + each.sightings >= index_.policy.admit_after; }

  void give_row(NewId& each) {
    const int64_t bucket = index_.bucket_of(each.id);
    const int64_t begin = index_.slice.bucket_begin(bucket);
    const int64_t end = index_.slice.bucket_begin(bucket + 1);
    int64_t row = index_.free_rows.lowest(begin, end);
    if (row != kNoRow) {
      given_.push_back({row, index_.row_state[row], kEmptyId, index_.policy.evict ? index_.row_scores[row] : 0});
      index_.free_rows.take(row);
      ++index_.taken_in(bucket);
    } else if (index_.policy.evict) {
      row = victim(bucket, begin, end);
      if (row == kNoRow) {
        full_bucket_ = bucket;
        return;
      }
      given_.push_back({row, index_.row_state[row], index_.row_ids[row], index_.row_scores[row]});
      ++evicted_;
    } else if (index_.policy.share) {
      each.answer = index_.shared_row(each.id);
      shared_answers_ += each.sightings;
      return;
    } else {
      full_bucket_ = bucket;
      return;
    }
    index_.row_ids[row] = each.id;
    index_.row_state[row] = !index_.policy.mark_new ? kTaken : index_.row_state[row] == kNeverUsed ? kNew : kRenewed;
    if (index_.policy.evict) {
      index_.row_scores[row] = index_.score_rule().initial(each.seen_before + each.sightings, batch_);
    }
    each.answer = row;
    each.has_row = true;
  }

  // Writes the slots of all given rows at once, so that they can be prefetched.
  void write_slots() {
    constexpr size_t kAhead = 16;
    for (size_t i = 0; i < given_.size(); ++i) {
      if (i + kAhead < given_.size()) {
        const Given& ahead = given_[i + kAhead];
        index_.table.prefetch(index_.table.home(index_.row_ids[ahead.row]));
        index_.table.prefetch(index_.table.home(ahead.id_before));
      }
      if (is_taken(given_[i].state_before)) {
        index_.table.erase(given_[i].id_before);
      }
      index_.table.insert(index_.row_ids[given_[i].row], given_[i].row);
    }
    slots_written_ = true;
  }

  int64_t victim(int64_t bucket, int64_t begin, int64_t end) {
    return index_.victims->take(bucket - index_.slice.first_bucket, begin, end, index_.slice.own_dense_rows,
                                Evictable{*this, index_.score_rule()}, blocked_);
  }

  // Tells the search for victims about a row that may be lower than those that it knows.
  void offer(int64_t row) {
    if (is_taken(index_.row_state[row])) {
      const int64_t bucket = index_.bucket_of(index_.row_ids[row]);
      const Key key = index_.score_rule().key(index_.row_scores[row], index_.row_ids[row]);
      index_.victims->add(bucket - index_.slice.first_bucket, index_.slice.bucket_begin(bucket),
                          index_.slice.bucket_begin(bucket + 1), index_.slice.own_dense_rows, key, row);
    }
  }

  void undo_touches() {
    for (int64_t i = 0; i < count_; ++i) {
      if (scores_before_[i] != kNone) {  // if a row was touched several times, its score was the lowest of these
        int64_t& score = index_.row_scores[rows_[i]];
        score = std::min(score, scores_before_[i]);
      }
    }
    for (int64_t bucket = 0; bucket < index_.slice.own_buckets(); ++bucket) {
      index_.victims->forget(bucket);
    }
  }

  // First counts known candidates and removes those that got a row, then adds new ones in order of appearance. An id
  // that was admitted to a full bucket and shares a row remains a candidate.
  void update_candidates() {
    for (const NewId& each : new_ids_.distinct()) {
      if (each.has_row) {
        index_.remove_candidate(each.id);
      } else if (each.seen_before > 0) {
        index_.candidates->counts[index_.candidates->table.find(each.id)] = sightings(each);
      }
    }
    for (const NewId& each : new_ids_.distinct()) {
      if (!each.has_row && each.seen_before == 0) {
        const int64_t bucket = index_.bucket_of(each.id);
        int64_t& number = new_candidates_[bucket - index_.slice.first_bucket];
        add_candidate(each, bucket, candidate_order(batch_, number++));
      }
    }
  }

  // There is no need to count beyond the sightings that it takes to be admitted.
  int32_t sightings(const NewId& each) const {
    return static_cast<int32_t>(std::min(each.seen_before + each.sightings, index_.policy.admit_after));
  }

  void add_candidate(const NewId& each, int64_t bucket, int64_t order) {
    Candidates& candidates = *index_.candidates;
    const int64_t begin = index_.slice.bucket_begin(bucket);
    const int64_t end = index_.slice.bucket_begin(bucket + 1);
    int64_t place = candidates.free_places.lowest(begin, end);
    if (place == kNoRow) {
      std::vector<int64_t> blocked;
      const int64_t oldest = candidates.oldest.take(bucket - index_.slice.first_bucket, begin, end,
                                                    index_.slice.own_dense_rows, candidates, blocked);
      index_.remove_candidate(candidates.ids[oldest]);
      place = oldest;
    }
    candidates.table.insert(each.id, place);
    candidates.ids[place] = each.id;
    candidates.counts[place] = sightings(each);
    candidates.order[place] = order;
    candidates.free_places.take(place);
  }

  Index& index_;
  const int64_t* ids_;
  int64_t* rows_;
  int64_t count_;
  int64_t batch_;
  int64_t oldest_in_flight_;
  RowsInFlight listed_;
  NewIds new_ids_;
  std::vector<int64_t> scores_before_;  // of found rows; kNone for other ids
  std::vector<Given> given_;
  std::vector<int64_t> new_candidates_;  // so far, per bucket: an id's order must not depend on other buckets
  std::vector<int64_t> blocked_;         // rows in flight that the search for victims came across
  bool slots_written_ = false;
  int64_t full_bucket_ = kNone;
  int64_t evicted_ = 0;
  int64_t shared_answers_ = 0;
  int64_t unseen_answers_ = 0;
};

}  // namespace recfx
