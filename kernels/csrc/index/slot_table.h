// The map from id to row of an index that is only read, in an exported file or on a device: open-addressed with linear
// probing and a power of two of slots. Hash, probing and layout ([slots, 2] of id and row, -1 for empty) equal FBGEMM's
// pruned_hashmap_lookup. Since id -1 marks an empty slot, its row is kept in a cell outside the table. This file does
// not use torch.
#pragma once

#include <cstdint>

#include "build/vector_paths.h"
#include "index/slot_hash.h"

namespace recfx {

struct Slot {
  int64_t id;
  int64_t row;
};

// A view of buffers, which it does not own.
class SlotTable {
 public:
  SlotTable(Slot* slots, int64_t slot_count, int64_t* side_row)
      : slots_(slots), mask_(static_cast<uint64_t>(slot_count) - 1), side_row_(side_row) {}

  RECFX_INLINE uint64_t home(int64_t id) const { return slot_hash(id) & mask_; }

  RECFX_INLINE void prefetch(uint64_t slot) const { __builtin_prefetch(slots_ + slot); }

  RECFX_INLINE uint64_t after(uint64_t slot) const { return (slot + 1) & mask_; }

  RECFX_INLINE Slot at(uint64_t slot) const { return slots_[slot]; }

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

  RECFX_INLINE uint64_t count() const { return mask_ + 1; }

  void put(uint64_t slot, Slot entry) { slots_[slot] = entry; }

  void put_beside(int64_t row) { *side_row_ = row; }

 private:
  Slot* slots_;
  uint64_t mask_;
  int64_t* side_row_;
};

}  // namespace recfx
