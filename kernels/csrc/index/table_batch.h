// One batch of one table: which ids are new, which ids get a row, and which ids are evicted for them. This file does
// not use torch.
// All ids must belong to the slice. plan() only reads; touches and allocate() change the index and can be undone, even
// if they threw; nothing can fail after that. So either all tables go through a batch together, or none does.
// The table's buckets are divided among parts, which several threads may take through each step at the same time. The
// result does not depend on their number.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <utility>
#include <vector>

#include "index/batch_part.h"
#include "index/index.h"
#include "index/rows_in_flight.h"
#include "index/touched_scores.h"

namespace recfx {

// For so many ids of a table, and so many buckets, several threads are worth while.
constexpr int64_t kParts = 8;
constexpr int64_t kIdsWorthParts = 16384;
constexpr int64_t kBucketsWorthParts = 2 * kParts;

class TableBatch {
 public:
  using Given = BatchPart::Given;
  static constexpr int64_t kNone = BatchPart::kNone;

  // `rows` holds the rows that were found, and -1 for other ids; `scores_before` has room for as many numbers if the
  // table evicts. parts: at most kParts, and 1 if the table has candidates. For the others see BatchPart.
  TableBatch(Index& index, const int64_t* ids, int64_t* rows, int64_t count, int64_t oldest_in_flight,
             const int64_t* listed_rows, int64_t listed, int64_t oldest_listed, int64_t* scores_before, int64_t parts)
      : index_(index),
        count_(count),
        batch_(index.counts[kBatches] + 1),
        listed_(listed_rows, listed, oldest_listed),
        touched_(index, rows, count, scores_before) {
    for (int64_t part = 0; part < parts; ++part) {
      parts_.emplace_back(index, ids, rows, batch_, oldest_in_flight, listed_, scores_before);
    }
  }

  static int64_t parts_for(const Index& index, int64_t ids) {
    const bool is_large = ids >= kIdsWorthParts && index.slice.own_buckets() >= kBucketsWorthParts;
    return is_large && !index.candidates ? kParts : 1;
  }

  int64_t parts() const { return static_cast<int64_t>(parts_.size()); }
  // The part that takes care of an id without a row.
  int64_t part_of(int64_t id) const {
    return parts() == 1 ? 0 : (index_.bucket_of(id) - index_.slice.first_bucket) * parts() / index_.slice.own_buckets();
  }

  bool expires() const { return index_.policy.ttl_batches > 0; }
  // Before everything else: see BatchPart.
  void expire(std::vector<int64_t>& expired) { parts_.front().expire(expired); }

  // Whether touch_ids may be called for some ids while others are being found.
  bool touches_while_finding(int64_t threads) const {
    return index_.policy.evict && TouchedScores::any_order(index_.score_rule(), threads);
  }
  bool touches_afterwards(int64_t threads) const { return index_.policy.evict && !touches_while_finding(threads); }

  // Record that this batch uses the rows found: those of some of its ids, or those in one of `shares` shares of the
  // table's rows. Several threads may call them, each with its own ids or its own share.
  void touch_ids(int64_t begin, int64_t end) { touched_.touch_ids(begin, end, batch_); }
  void touch_share(int64_t share, int64_t shares) { touched_.touch_share(share, shares, batch_); }

  // After all touches. missing: the positions of the part's ids at which rows are -1, ascending.
  void plan(int64_t part, std::vector<int64_t> missing) { parts_[part].plan(std::move(missing)); }
  void allocate(int64_t part) { parts_[part].allocate(parts()); }

  // The bucket that was full for the first id that found it so; kNone if everything went well.
  int64_t full_bucket() const {
    const BatchPart* first = first_full();
    return first == nullptr ? kNone : first->full_bucket();
  }
  // How many rows were given out, up to the id that found its bucket full.
  int64_t given_count() const {
    const BatchPart* first = first_full();
    int64_t count = 0;
    for (const BatchPart& part : parts_) {
      for (const Given& each : part.given()) {
        count += first == nullptr || each.position < first->full_position();
      }
    }
    return count;
  }

  // Calls visit(given) for every row that was given out, in the order of the ids.
  template <typename Visit>
  void each_given(const Visit& visit) const {
    constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
    size_t next[kParts] = {};
    int64_t positions[kParts];  // of the next row that each part gave out
    for (size_t part = 0; part < parts_.size(); ++part) {
      positions[part] = parts_[part].given().empty() ? kAll : parts_[part].given()[0].position;
    }
    for (;;) {
      const size_t part = std::min_element(positions, positions + parts_.size()) - positions;
      if (positions[part] == kAll) {
        return;
      }
      const std::vector<Given>& given = parts_[part].given();
      visit(given[next[part]++]);
      positions[part] = next[part] < given.size() ? given[next[part]].position : kAll;
    }
  }

  // To be followed by undo_touches() for all ids whose rows were touched.
  void undo() {
    for (BatchPart& part : parts_) {
      part.undo();
    }
    if (index_.policy.evict) {
      for (int64_t bucket = 0; bucket < index_.slice.own_buckets(); ++bucket) {
        index_.victims->forget(bucket);
      }
    }
  }

  void undo_touches(int64_t begin, int64_t end) { touched_.undo(begin, end); }

  // Changes the slots of one of as many ranges as there are parts; then, when all ranges are done, what is left.
  void change_slots(int64_t range) {
    for (BatchPart& part : parts_) {
      part.slot_changes().make(index_.table, range);
    }
  }
  void finish_slots() {
    for (BatchPart& part : parts_) {
      part.slot_changes().make_rest(index_.table);
    }
    index_.count(kBatches, 1);
    index_.count(kIdsSeen, count_);
  }
  // After that.
  void commit(int64_t part) { parts_[part].commit(); }

 private:
  const BatchPart* first_full() const {
    const BatchPart* first = nullptr;
    for (const BatchPart& part : parts_) {
      if (part.full_bucket() != kNone && (first == nullptr || part.full_position() < first->full_position())) {
        first = &part;
      }
    }
    return first;
  }

  Index& index_;
  int64_t count_;
  int64_t batch_;
  RowsInFlight listed_;
  TouchedScores touched_;
  std::deque<BatchPart> parts_;
};

}  // namespace recfx
