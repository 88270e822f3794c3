// Finds the rows of ids in slot groups, prefetching them. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "build/vector_paths.h"
#include "index/dense_ids.h"
#include "index/slot_groups.h"

namespace recfx {

// How many ids ahead a group is prefetched: enough to hide main memory's latency, few enough for the core's line
// buffers.
constexpr int64_t kLookahead = 64;

// The homes of a block of ids, and those ids that are in none of their homes, which are full.
struct FindBlock {
  // An id that is looked for in another group.
  struct Later {
    int64_t position;
    uint64_t group;
  };

  uint64_t homes[kLookahead];
  Later later[kLookahead];
  int64_t later_count = 0;
};

// The row of a dense id; more than any row for other ids.
RECFX_INLINE uint64_t dense_row(int64_t id, DenseIds dense) {
  return static_cast<uint64_t>(id) - static_cast<uint64_t>(dense.begin);  // wraps around for ids below
}

// The homes of ids[begin, end), at most kLookahead. Those of dense ids and those beyond the end are 0, as nothing is
// looked for there.
template <bool has_dense>
RECFX_INLINE void find_homes(const int64_t* ids, int64_t begin, int64_t end, const SlotGroups& groups, DenseIds dense,
                             uint64_t* homes) {
  const int64_t count = std::clamp<int64_t>(end - begin, 0, kLookahead);
  const uint64_t dense_rows = static_cast<uint64_t>(dense.rows);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = ids[begin + i];
    homes[i] = has_dense && dense_row(id, dense) < dense_rows ? 0 : groups.home(id);
  }
  std::fill(homes + count, homes + kLookahead, 0);
}

RECFX_INLINE void search_on(const int64_t* ids, int64_t* rows, const SlotGroups& groups, FindBlock& block) {
  for (int64_t k = 0; k < block.later_count; ++k) {
    const int64_t position = block.later[k].position;
    const int64_t id = ids[position];
    rows[position] = id == kEmptyId ? groups.side_row() : groups.find_from(id, block.later[k].group);
  }
  block.later_count = 0;
}

// Works in blocks. A block's groups are prefetched one by one while the block before it is searched: all at once would
// overflow the core's line buffers. Ids that are in none of their homes are looked for one block later, when the next
// group has been prefetched, too. Without dense ids a find takes a quarter less time.
template <bool has_dense>
RECFX_INLINE void find_blocks(const int64_t* ids, int64_t* rows, int64_t begin, int64_t end,
                              const SlotGroups& groups_given, DenseIds dense) {
  const SlotGroups groups = groups_given;
  const uint64_t dense_rows = static_cast<uint64_t>(dense.rows);
  FindBlock blocks[2];
  find_homes<has_dense>(ids, begin, end, groups, dense, blocks[0].homes);
  for (const uint64_t home : blocks[0].homes) {
    groups.prefetch(home);
  }
  int now = 0;
  for (; begin < end; begin += kLookahead, now ^= 1) {
    FindBlock& block = blocks[now];
    FindBlock& other = blocks[now ^ 1];
    find_homes<has_dense>(ids, begin + kLookahead, end, groups, dense, other.homes);
    const int64_t count = std::min(kLookahead, end - begin);
    int64_t later = 0;
    for (int64_t i = 0; i < count; ++i) {
      groups.prefetch(other.homes[i]);
      const int64_t id = ids[begin + i];
      const uint64_t home = block.homes[i];
      const SlotGroup& group = groups.at(home);
      const int64_t row = group.row_of(id);
      const bool is_dense = has_dense && dense_row(id, dense) < dense_rows;
      rows[begin + i] = is_dense ? static_cast<int64_t>(dense_row(id, dense)) : row;
      // Recorded without a branch, which would be mispredicted.
      block.later[later] = {begin + i, home};
      later += !is_dense & (row == kNoRow) & (group.is_full() | (id == kEmptyId));
    }
    for (int64_t k = 0; k < later; ++k) {
      uint64_t& group = block.later[k].group;
      group = groups.after(group);
      groups.prefetch(group);
    }
    block.later_count = later;
    search_on(ids, rows, groups, other);
  }
  search_on(ids, rows, groups, blocks[now ^ 1]);
}

// Finds the rows of ids[begin, end): -1 if an id is neither dense nor in the groups.
static inline void find_range(const int64_t* ids, int64_t* rows, int64_t begin, int64_t end, const SlotGroups& groups,
                              DenseIds dense) {
  on_widest_vectors([&](auto) RECFX_INLINE_LAMBDA {
    if (dense.rows > 0) {
      find_blocks<true>(ids, rows, begin, end, groups, dense);
    } else {
      find_blocks<false>(ids, rows, begin, end, groups, {0});
    }
  });
}

}  // namespace recfx
