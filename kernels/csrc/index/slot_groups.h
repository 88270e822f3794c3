// The map from id to row of an index that changes: groups of four slots, each group one cache line, which is searched
// at once. An id that finds its home group full is in the next group that was not, so the search for an id ends at the
// first group that is not full. Deletion leaves no tombstones. Since id -1 marks an empty slot, its row is kept outside
// the groups, beside the seed of the hash. kernels/index/slot_groups.py is the reference. This file does not use torch.
#pragma once

#include <cstdint>

#include "build/vector_paths.h"
#include "index/slot_hash.h"

namespace recfx {

constexpr int kGroupSlots = 4;

// Slots are filled from the first one on; an empty one is (-1, -1).
struct SlotGroup {
  int64_t ids[kGroupSlots];
  int64_t rows[kGroupSlots];

  RECFX_INLINE bool is_full() const { return ids[kGroupSlots - 1] != kEmptyId; }

  // Without a branch: -1 if the id is not here. The id must not be -1.
  RECFX_INLINE int64_t row_of(int64_t id) const {
    typedef int64_t Pair __attribute__((vector_size(16), aligned(8), may_alias));
    const Pair both = {id, id};
    const Pair* two_ids = reinterpret_cast<const Pair*>(ids);
    const Pair* two_rows = reinterpret_cast<const Pair*>(rows);
    // all bits are set where the id is another one
    const Pair found = (two_rows[0] | (two_ids[0] != both)) & (two_rows[1] | (two_ids[1] != both));
    return found[0] & found[1];
  }
};

// A view of buffers, which it does not own.
class SlotGroups {
 public:
  // At most 2 ** 32 groups, and more slots than ids. side: the row of id -1, and the seed of the hash.
  SlotGroups(SlotGroup* groups, int64_t count, int64_t* side)
      : groups_(groups), count_(static_cast<uint64_t>(count)), hash_(side[1]), side_row_(side) {}

  const SeededHash& hash() const { return hash_; }
  RECFX_INLINE uint64_t home(int64_t id) const { return hash_.place(id, count_); }
  RECFX_INLINE uint64_t after(uint64_t group) const { return group + 1 == count_ ? 0 : group + 1; }
  RECFX_INLINE const SlotGroup& at(uint64_t group) const { return groups_[group]; }
  RECFX_INLINE void prefetch(uint64_t group) const { __builtin_prefetch(groups_ + group); }
  RECFX_INLINE int64_t side_row() const { return *side_row_; }
  uint64_t count() const { return count_; }

  int64_t find(int64_t id) const { return id == kEmptyId ? *side_row_ : find_from(id, home(id)); }

  // Searches from this group on. The id must not be -1.
  RECFX_INLINE int64_t find_from(int64_t id, uint64_t group) const {
    for (;; group = after(group)) {
      const int64_t row = groups_[group].row_of(id);
      if (row != kNoRow || !groups_[group].is_full()) {
        return row;
      }
    }
  }

  // Whether insert() and erase() of an id concern no group from `end` on. The home of the id must be before `end`.
  bool stays_before(int64_t id, uint64_t end) const {
    uint64_t group = home(id);
    while (group < end && groups_[group].is_full()) {
      ++group;
    }
    return group < end && id != kEmptyId;
  }

  // The id must be absent.
  void insert(int64_t id, int64_t row) {
    if (id == kEmptyId) {
      *side_row_ = row;
      return;
    }
    uint64_t group = home(id);
    while (groups_[group].is_full()) {
      group = after(group);
    }
    put(group, size(group), id, row);
  }

  // Returns the row that the id had, or -1.
  int64_t erase(int64_t id) {
    if (id == kEmptyId) {
      const int64_t row = *side_row_;
      *side_row_ = kNoRow;
      return row;
    }
    uint64_t group = home(id);
    int slot = slot_of(group, id);
    while (slot < 0) {
      if (!groups_[group].is_full()) {
        return kNoRow;
      }
      group = after(group);
      slot = slot_of(group, id);
    }
    const int64_t row = groups_[group].rows[slot];
    while (groups_[group].is_full()) {
      // The group will no longer be full, so searches would end here: an id that passed it takes the empty place.
      const Place later = first_that_passed(group);
      if (later.slot < 0) {
        break;
      }
      put(group, slot, groups_[later.group].ids[later.slot], groups_[later.group].rows[later.slot]);
      group = later.group;
      slot = later.slot;
    }
    const int last = size(group) - 1;
    put(group, slot, groups_[group].ids[last], groups_[group].rows[last]);
    put(group, last, kEmptyId, kNoRow);
    return row;
  }

 private:
  struct Place {
    uint64_t group;
    int slot;  // -1: there is none
  };

  int size(uint64_t group) const {
    int filled = 0;
    while (filled < kGroupSlots && groups_[group].ids[filled] != kEmptyId) {
      ++filled;
    }
    return filled;
  }

  int slot_of(uint64_t group, int64_t id) const {
    for (int slot = 0; slot < kGroupSlots; ++slot) {
      if (groups_[group].ids[slot] == id) {
        return slot;
      }
    }
    return -1;
  }

  void put(uint64_t group, int slot, int64_t id, int64_t row) {
    groups_[group].ids[slot] = id;
    groups_[group].rows[slot] = row;
  }

  // The first id after a full group whose home is that group or an earlier one.
  Place first_that_passed(uint64_t full) const {
    for (uint64_t group = after(full);; group = after(group)) {
      const uint64_t distance = group >= full ? group - full : group + count_ - full;
      for (int slot = 0; slot < kGroupSlots && groups_[group].ids[slot] != kEmptyId; ++slot) {
        const uint64_t home_group = home(groups_[group].ids[slot]);
        const uint64_t from_home = group >= home_group ? group - home_group : group + count_ - home_group;
        if (from_home >= distance) {
          return {group, slot};
        }
      }
      if (!groups_[group].is_full()) {
        return {group, -1};
      }
    }
  }

  SlotGroup* groups_;
  uint64_t count_;
  SeededHash hash_;
  int64_t* side_row_;
};

}  // namespace recfx
