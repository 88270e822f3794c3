// The find loop: ids to rows, slots fetched ahead. No torch in here.
#pragma once

#include <array>
#include <cstdint>

#include "slot_table.h"

namespace recfx {

// How many ids ahead a slot is fetched: enough to cover main memory's latency, few enough for the core's line buffers.
constexpr int64_t kLookahead = 32;

// rows[begin, end) of ids[begin, end): -1 where the table does not hold the id; ids below dense_rows are their own row.
inline void find_range(const int64_t* ids, int64_t* rows, int64_t begin, int64_t end, const SlotTable& table,
                int64_t dense_rows) {
  std::array<uint64_t, kLookahead> homes;  // a ring: the home of id i is at i % kLookahead
  for (int64_t i = begin; i < end && i < begin + kLookahead; ++i) {
    homes[i % kLookahead] = table.home(ids[i]);
    table.prefetch(homes[i % kLookahead]);
  }
  for (int64_t i = begin; i < end; ++i) {
    const uint64_t home = homes[i % kLookahead];
    if (i + kLookahead < end) {
      const uint64_t later = table.home(ids[i + kLookahead]);
      table.prefetch(later);
      homes[i % kLookahead] = later;
    }
    const int64_t id = ids[i];
    rows[i] = id >= 0 && id < dense_rows ? id : table.find_from(id, home);
  }
}

}  // namespace recfx
