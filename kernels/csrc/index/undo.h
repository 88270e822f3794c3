// Takes back what one batch did to one table, when nothing has changed the index since. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "index/index.h"

namespace recfx {

// A candidate's place, and what it held before a batch changed it.
struct CandidateBefore {
  int64_t place;
  int64_t id;
  int64_t count;
  int64_t order;
};

// The score before of an id that does not say what the score of its row was: another sighting of the id does.
constexpr int64_t kNoScoreBefore = std::numeric_limits<int64_t>::max();

// Gives a row back: to the id that lost it, or to nobody.
inline void undo_given(Index& index, int64_t row, uint8_t state_before, int64_t id_before) {
  const int64_t id = index.row_ids[row];
  index.table.erase(id);
  *index.uninitialized -= is_uninitialized(index.row_state[row]);
  index.row_ids[row] = id_before;
  index.row_state[row] = state_before;
  if (is_taken(state_before)) {
    index.table.insert(id_before, row);
  } else {
    index.free_rows.give_back(row);
    --index.taken_in(index.bucket_of(id));
  }
}

// rows: the batch's answers; before: the scores of their rows, of which the lowest counts where a row has several.
inline void undo_scores(Index& index, const int64_t* rows, const int64_t* before, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] >= index.slice.own_dense_rows) {
      index.row_scores[rows[i]] = kNoScoreBefore;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] >= index.slice.own_dense_rows) {
      int64_t& score = index.row_scores[rows[i]];
      score = std::min(score, before[i]);
    }
  }
}

inline void undo_candidate(Candidates& candidates, const CandidateBefore& before) {
  const int64_t place = before.place;
  if (candidates.counts[place] != 0) {
    candidates.table.erase(candidates.ids[place]);
    candidates.free_places.give_back(place);
  }
  candidates.ids[place] = before.id;
  candidates.counts[place] = static_cast<int32_t>(before.count);
  candidates.order[place] = before.order;
  if (before.count != 0) {
    candidates.table.insert(before.id, place);
    candidates.free_places.take(place);
  }
}

// Lets the searches for the lowest rows start again.
inline void forget_lowest(Index& index) {
  for (int64_t bucket = 0; bucket < index.slice.own_buckets(); ++bucket) {
    if (index.victims) {
      index.victims->forget(bucket);
    }
    if (index.candidates) {
      index.candidates->oldest.forget(bucket);
    }
  }
}

}  // namespace recfx
