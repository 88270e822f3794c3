// An open-addressed map from id to row with linear probing, a power of two of slots, and deletion by backward shift.
// Hash, probing and layout ([slots, 2] of id and row, -1 for empty) equal FBGEMM's pruned_hashmap_lookup. Since id -1
// marks an empty slot, its row is kept in a cell outside the table. This file does not use torch.
#pragma once

#include <cstdint>

#include "clones.h"

namespace recfx {

constexpr int64_t kEmptyId = -1;
constexpr int64_t kNoRow = -1;

struct Slot {
  int64_t id;
  int64_t row;
};

// murmur3's 64-bit finalizer
RECFX_INLINE uint64_t slot_hash(int64_t id) {
  uint64_t k = static_cast<uint64_t>(id);
  k ^= k >> 33;
  k *= 0xff51afd7ed558ccdULL;
  k ^= k >> 33;
  k *= 0xc4ceb9fe1a85ec53ULL;
  k ^= k >> 33;
  return k;
}

// A view of buffers, which it does not own.
class SlotTable {
 public:
  SlotTable(Slot* slots, int64_t slot_count, int64_t* side_row)
      : slots_(slots), mask_(static_cast<uint64_t>(slot_count) - 1), side_row_(side_row) {}

  RECFX_INLINE uint64_t home(int64_t id) const { return slot_hash(id) & mask_; }

  RECFX_INLINE void prefetch(uint64_t slot) const { __builtin_prefetch(slots_ + slot); }

  RECFX_INLINE uint64_t after(uint64_t slot) const { return (slot + 1) & mask_; }

  RECFX_INLINE Slot at(uint64_t slot) const { return slots_[slot]; }

  int64_t find(int64_t id) const { return find_from(id, home(id)); }

  // `home` is home(id), computed earlier to prefetch the slot.
  RECFX_INLINE int64_t find_from(int64_t id, uint64_t home) const {
    if (id == kEmptyId) [[unlikely]] {
      return *side_row_;
    }
    for (uint64_t slot = home;; slot = (slot + 1) & mask_) {
      const Slot& entry = slots_[slot];
      if (entry.id == id) {
        return entry.row;
      }
      if (entry.id == kEmptyId) {
        return kNoRow;
      }
    }
  }

  // The id must be absent, and at least two slots must be empty.
  void insert(int64_t id, int64_t row) {
    if (id == kEmptyId) {
      *side_row_ = row;
      return;
    }
    uint64_t slot = home(id);
    while (slots_[slot].id != kEmptyId) {
      slot = (slot + 1) & mask_;
    }
    slots_[slot] = {id, row};
  }

  // Returns the row that the id had, or -1. Leaves no tombstone: later ids of the run move back over the hole, unless
  // that would place them before their home.
  int64_t erase(int64_t id) {
    if (id == kEmptyId) {
      const int64_t row = *side_row_;
      *side_row_ = kNoRow;
      return row;
    }
    uint64_t hole = home(id);
    while (slots_[hole].id != id) {
      if (slots_[hole].id == kEmptyId) {
        return kNoRow;
      }
      hole = (hole + 1) & mask_;
    }
    const int64_t row = slots_[hole].row;
    for (uint64_t next = (hole + 1) & mask_; slots_[next].id != kEmptyId; next = (next + 1) & mask_) {
      const uint64_t distance_from_home = (next - home(slots_[next].id)) & mask_;
      const uint64_t distance_from_hole = (next - hole) & mask_;
      if (distance_from_home >= distance_from_hole) {
        slots_[hole] = slots_[next];
        hole = next;
      }
    }
    slots_[hole] = {kEmptyId, kNoRow};
    return row;
  }

 private:
  Slot* slots_;
  uint64_t mask_;
  int64_t* side_row_;
};

}  // namespace recfx
