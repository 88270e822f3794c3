// The new ids of one batch that belong to some buckets of one table: which of them get a row, and which ids are evicted
// for them. This file does not use torch.
// Parts of a table whose buckets are different ones may be worked on by several threads at the same time, except for
// undo().
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "index/index.h"
#include "index/new_ids.h"
#include "index/rows_in_flight.h"
#include "index/slot_changes.h"

namespace recfx {

// The answer for a row that is read but not trained: a number below -1.
inline int64_t untrained(int64_t row) { return -row - 2; }

class BatchPart {
 public:
  // A row that was given out, and what it held before.
  struct Given {
    int64_t row;
    uint8_t state_before;
    int64_t id_before;
    int64_t score_before;
    int64_t position;  // in the batch, of its id
  };
  static constexpr int64_t kNone = -1;

  // `rows` holds the rows that were found, and -1 for other ids. Rows that are used by batches from number
  // `oldest_in_flight` on are not evicted, and neither are the rows of earlier batches in `listed`. scores_before: see
  // TouchedScores.
  BatchPart(Index& index, const int64_t* ids, int64_t* rows, int64_t batch, int64_t oldest_in_flight,
            RowsInFlight& listed, int64_t* scores_before)
      : index_(index),
        ids_(ids),
        rows_(rows),
        batch_(batch),
        oldest_in_flight_(std::min(oldest_in_flight, batch)),
        listed_(listed),
        scores_before_(scores_before) {}

  const std::vector<Given>& given() const { return given_; }
  // The bucket that was full; kNone if everything went well.
  int64_t full_bucket() const { return full_bucket_; }
  // The position in the batch of the id whose bucket was full.
  int64_t full_position() const { return full_position_; }
  SlotChanges& slot_changes() { return slot_changes_; }

  // Takes their rows from the ids that none of the last policy.ttl_batches batches has seen, except for rows that
  // batches in flight use, and appends these ids to `expired`. To be called for one part of the table's batch, before
  // anything else. It stays done if the batch is undone.
  void expire(std::vector<int64_t>& expired) {
    const int64_t most = batch_ - 1 - index_.policy.ttl_batches;
    const auto before = static_cast<int64_t>(expired.size());
    for (int64_t bucket = index_.slice.first_bucket; most >= 0 && bucket < index_.slice.end_bucket; ++bucket) {
      const int64_t begin = index_.slice.bucket_begin(bucket);
      const int64_t end = index_.slice.bucket_begin(bucket + 1);
      while (index_.taken_in(bucket) > 0) {
        const int64_t row = victim(bucket, begin, end, most);
        if (row == kNoRow) {
          break;
        }
        expired.push_back(index_.row_ids[row]);
        index_.remove(index_.row_ids[row]);
      }
    }
    for (const int64_t row : blocked_) {
      offer(row);
    }
    blocked_.clear();
    index_.count(kEvicted, static_cast<int64_t>(expired.size()) - before);
  }

  // Collects the new ids, and how often each has been seen, after all touches. missing: the positions at which rows are
  // -1, ascending.
  void plan(std::vector<int64_t> missing) {
    new_ids_.collect(ids_, std::move(missing), index_.table.hash());
    if (!index_.candidates) {
      return;
    }
    for (NewId& each : new_ids_.distinct()) {
      const int64_t place = index_.candidates->table.find(each.id);
      each.seen_before = place == kNoRow ? 0 : index_.candidates->counts[place];
    }
  }

  // Gives rows to the ids that are admitted, and collects the changes of slots; stops at a full bucket.
  // ranges: of the groups, see SlotChanges.
  void allocate(int64_t ranges) {
    slot_changes_.divide(ranges);
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
    for (const Given& each : given_) {
      if (is_taken(each.state_before)) {
        slot_changes_.erase(index_.table, each.id_before);
      }
      slot_changes_.insert(index_.table, index_.row_ids[each.row], each.row);
    }
    if (index_.candidates) {
      // Allocated here, because commit() must not run out of memory.
      new_candidates_.assign(index_.slice.own_buckets(), 0);
    }
  }

  // To be called while no slot has been changed, before the scores of touched rows are restored.
  void undo() {
    for (auto each = given_.rbegin(); each != given_.rend(); ++each) {
      if (!is_taken(each->state_before)) {
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
  }

  // To be called when all slots have been changed.
  void commit() {
    new_ids_.answer(rows_);
    int64_t uninitialized = 0;
    for (const Given& each : given_) {
      uninitialized += is_uninitialized(index_.row_state[each.row]) - is_uninitialized(each.state_before);
    }
    index_.count_uninitialized(uninitialized);
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
    index_.count(kInserted, static_cast<int64_t>(given_.size()));
    index_.count(kEvicted, evicted_);
    index_.count(kSharedAnswers, shared_answers_);
    index_.count(kUnseenAnswers, unseen_answers_);
  }

 private:
  // For LowestRows: which rows of the table may be evicted, and in which order.
  struct Evictable {
    BatchPart& batch;
    ScoreRule rule;

    int64_t score(int64_t row) const {
      return is_taken(batch.index_.row_state[row]) ? batch.index_.row_scores[row] : LowestRows::kNoScore;
    }
    int64_t stored_score(int64_t row) const { return batch.index_.row_scores[row]; }
    int64_t key_score(int64_t score) const { return rule.key_score(score); }
    Key key(int64_t row, int64_t score) const { return rule.key(score, batch.index_.row_ids[row]); }
    bool blocked(int64_t row, int64_t score) const {
      const int64_t last_batch = rule.last_batch(score);
      return last_batch >= batch.oldest_in_flight_ || batch.listed_.contains(row, last_batch);
    }
    void prefetch(int64_t row) const {
      __builtin_prefetch(batch.index_.row_state + row, 1);
      __builtin_prefetch(batch.index_.row_scores + row, 1);
      __builtin_prefetch(batch.index_.row_ids + row, 1);
    }
  };

  bool is_admitted(const NewId& each) const { return each.seen_before + each.sightings >= index_.policy.admit_after; }

  void give_row(NewId& each) {
    const int64_t bucket = index_.bucket_of(each.id);
    const int64_t begin = index_.slice.bucket_begin(bucket);
    const int64_t end = index_.slice.bucket_begin(bucket + 1);
    int64_t row = index_.free_rows.lowest(begin, end - (index_.policy.keeps_last_row ? 1 : 0));
    if (row != kNoRow) {
      given_.push_back(
          {row, index_.row_state[row], kEmptyId, index_.policy.evict ? index_.row_scores[row] : 0, each.position});
      index_.free_rows.take(row);
      ++index_.taken_in(bucket);
    } else if (index_.policy.evict) {
      row = victim(bucket, begin, end, std::numeric_limits<int64_t>::max());
      if (row == kNoRow) {
        full(bucket, each);
        return;
      }
      given_.push_back({row, index_.row_state[row], index_.row_ids[row], index_.row_scores[row], each.position});
      ++evicted_;
    } else if (index_.policy.share) {
      each.answer = index_.shared_row(each.id);
      shared_answers_ += each.sightings;
      return;
    } else {
      full(bucket, each);
      return;
    }
    index_.row_ids[row] = each.id;
    index_.row_state[row] = !index_.policy.mark_new ? kTaken : index_.row_state[row] == kNeverUsed ? kNew : kRenewed;
    if (index_.policy.evict) {
      scores_before_[each.position] = given_.back().score_before;
      index_.row_scores[row] = index_.score_rule().initial(each.seen_before + each.sightings, batch_);
    }
    each.answer = row;
    each.has_row = true;
  }

  int64_t victim(int64_t bucket, int64_t begin, int64_t end, int64_t highest_score) {
    return index_.victims->take(bucket - index_.slice.first_bucket, begin, end, index_.slice.own_dense_rows,
                                Evictable{*this, index_.score_rule()}, blocked_, highest_score);
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

  void full(int64_t bucket, const NewId& each) {
    full_bucket_ = bucket;
    full_position_ = each.position;
  }

  Index& index_;
  const int64_t* ids_;
  int64_t* rows_;
  int64_t batch_;
  int64_t oldest_in_flight_;
  RowsInFlight& listed_;
  int64_t* scores_before_;
  NewIds new_ids_;
  std::vector<Given> given_;
  SlotChanges slot_changes_;
  std::vector<int64_t> new_candidates_;  // so far, per bucket: an id's order must not depend on other buckets
  std::vector<int64_t> blocked_;         // rows in flight that the search for victims came across
  int64_t full_bucket_ = kNone;
  int64_t full_position_ = kNone;
  int64_t evicted_ = 0;
  int64_t shared_answers_ = 0;
  int64_t unseen_answers_ = 0;
};

}  // namespace recfx
