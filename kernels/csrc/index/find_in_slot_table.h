// Finds the rows of ids in a slot table, prefetching slots. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "build/vector_paths.h"
#include "index/dense_ids.h"
#include "index/slot_table.h"

namespace recfx {

// How many ids ahead a slot is prefetched: enough to hide main memory's latency, few enough for the core's line
// buffers.
constexpr int64_t kSlotsAhead = 64;

// Finds the rows of ids[begin, end) in blocks of kSlotsAhead ids: -1 if an id is neither dense nor in the table. The
// homes of a block are computed and prefetched one block early.
// from_zero: the dense ids begin at 0. This spares the index of a whole table the cost of slices, some 5 % of a
// find.
template <bool from_zero>
class Finder {
 public:
  RECFX_INLINE Finder(const int64_t* ids, int64_t* rows, int64_t begin, int64_t end, const SlotTable& table,
                      DenseIds dense)
      : table_(table),
        ids_(ids),
        rows_(rows),
        done_(begin),
        end_(end),
        dense_rows_(static_cast<uint64_t>(dense.rows)),
        dense_begin_(static_cast<uint64_t>(dense.begin)) {
    fetch();
  }

  // rows[begin, done()) have been found
  RECFX_INLINE int64_t done() const { return done_; }

  // Finds the rows of one more block.
  RECFX_INLINE void step() {
    const int64_t count = block_size(done_);
    const int64_t* ids = ids_ + done_;
    int64_t* rows = rows_ + done_;
    const uint64_t* homes = homes_[now_];
    done_ += count;
    now_ ^= 1;
    fetch();

    // Most ids are in their home slot, or it is empty. The others are recorded without a branch, which would be
    // mispredicted for every third id, and are handled afterwards.
    uint32_t others[kSlotsAhead];
    int64_t other_count = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = ids[i];
      const Slot home = table_.at(homes[i]);
      const uint64_t dense_row =
          static_cast<uint64_t>(id) - (from_zero ? 0 : dense_begin_);  // wraps around for ids below
      const bool is_dense = dense_row < dense_rows_;
      const bool settled = is_dense | ((id != kEmptyId) & ((home.id == id) | (home.id == kEmptyId)));
      rows[i] = is_dense ? static_cast<int64_t>(dense_row) : home.row;  // an empty slot's row is kNoRow
      others[other_count] = static_cast<uint32_t>(i);
      other_count += !settled;
    }
    for (int64_t k = 0; k < other_count; ++k) {
      table_.prefetch(table_.after(homes[others[k]]));  // often in the next cache line
    }
    for (int64_t k = 0; k < other_count; ++k) {
      const uint32_t i = others[k];
      rows[i] = table_.find_from(ids[i], homes[i]);
    }
  }

 private:
  RECFX_INLINE int64_t block_size(int64_t begin) const { return std::min(kSlotsAhead, end_ - begin); }

  RECFX_INLINE void fetch() {
    const int64_t count = block_size(done_);
    uint64_t* homes = homes_[now_];
    for (int64_t i = 0; i < count; ++i) {  // separate from the prefetches, so that it is vectorised
      homes[i] = table_.home(ids_[done_ + i]);
    }
    for (int64_t i = 0; i < count; ++i) {
      table_.prefetch(homes[i]);
    }
  }

  const SlotTable table_;
  const int64_t* ids_;
  int64_t* rows_;
  int64_t done_;
  int64_t end_;
  uint64_t dense_rows_;
  uint64_t dense_begin_;
  int now_ = 0;
  uint64_t homes_[2][kSlotsAhead];
};

template <bool from_zero>
RECFX_INLINE void find_blocks(const int64_t* ids, int64_t* rows, int64_t begin, int64_t end, const SlotTable& table,
                              DenseIds dense) {
  for (Finder<from_zero> finder(ids, rows, begin, end, table, dense); finder.done() < end;) {
    finder.step();
  }
}

static inline void find_range(const int64_t* ids, int64_t* rows, int64_t begin, int64_t end, const SlotTable& table,
                              DenseIds dense) {
  on_widest_vectors([&](auto) RECFX_INLINE_LAMBDA {
    if (dense.begin == 0) {
      find_blocks<true>(ids, rows, begin, end, table, dense);
    } else {
      find_blocks<false>(ids, rows, begin, end, table, dense);
    }
  });
}

}  // namespace recfx
