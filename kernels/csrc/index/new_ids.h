// The distinct ids of one batch that have no row, in order of first appearance. This file does not use torch.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "index/slot_hash.h"

namespace recfx {

struct NewId {
  int64_t id;
  int64_t position;         // in the batch, of its first sighting
  int64_t sightings;        // in this batch
  int64_t seen_before = 0;  // sightings in earlier batches
  int64_t answer = kNoRow;  // the answer for all its positions in the batch
  bool has_row = false;     // whether it was given a row of its own
};

class NewIds {
 public:
  // positions: of the ids without a row, ascending. hash: with a seed that whoever chooses the ids does not know. What
  // is collected does not depend on it.
  void collect(const int64_t* ids, std::vector<int64_t> positions, const SeededHash& hash) {
    positions_ = std::move(positions);
    if (positions_.empty()) {
      return;
    }
    const uint64_t mask = std::bit_ceil(2 * positions_.size()) - 1;
    std::vector<int64_t> place_of(mask + 1, kNoRow);  // open addressing; at most half of it is used
    numbers_.reserve(positions_.size());
    distinct_.reserve(positions_.size());
    for (const int64_t position : positions_) {
      const int64_t id = ids[position];
      uint64_t place = hash.place(id, mask + 1);
      while (place_of[place] != kNoRow && distinct_[place_of[place]].id != id) {
        place = (place + 1) & mask;
      }
      if (place_of[place] == kNoRow) {
        place_of[place] = static_cast<int64_t>(distinct_.size());
        distinct_.push_back({id, position, 0});
      }
      ++distinct_[place_of[place]].sightings;
      numbers_.push_back(place_of[place]);
    }
  }

  std::vector<NewId>& distinct() { return distinct_; }

  // Writes every id's answer to all its positions in the batch.
  void answer(int64_t* rows) const {
    for (size_t i = 0; i < positions_.size(); ++i) {
      rows[positions_[i]] = distinct_[numbers_[i]].answer;
    }
  }

 private:
  std::vector<int64_t> positions_;
  std::vector<int64_t> numbers_;  // of positions_[i] in distinct_
  std::vector<NewId> distinct_;
};

}  // namespace recfx
