// Writes indexes as slot tables, which devices and exported files read, and finds places for ids that come later.
// Contracts: slot_tables_ and take_slots_ in kernels/index/hash_index.py. Determinism: one thread writes each table, in
// the order of its rows or of its ids.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "build/parallel.h"
#include "index/checks.h"
#include "index/index.h"
#include "index/slot_table.h"

namespace recfx {
namespace {

constexpr int64_t kFilledAtOnce = int64_t{1} << 16;
constexpr int64_t kRowsAhead = 32;

struct Rows {
  const int64_t* ids;
  const uint8_t* states;
  int64_t count;
};

// Inserts ids into a table. The time does not depend on which ids they are: everybody knows the hash, so somebody may
// have chosen ids of one home.
class Insertions {
 public:
  explicit Insertions(const SlotTable& table) : table_(table) {}

  // The id must be absent, and at least two slots must be empty.
  void insert(int64_t id, int64_t row) {
    if (id == kEmptyId) {
      table_.put_beside(row);
      return;
    }
    uint64_t slot = table_.home(id);
    for (int64_t step = 0; table_.at(slot).id != kEmptyId; ++step) {
      if (step == kLongWay) {
        slot = empty_from(slot);
        break;
      }
      slot = table_.after(slot);
    }
    table_.put(slot, {id, row});
  }

 private:
  static constexpr int64_t kLongWay = 128;  // which few ids ever go that were not chosen

  // The first empty slot from here on. On the way, it notes how far it is from every slot where it has looked.
  uint64_t empty_from(uint64_t slot) {
    if (ahead_.empty()) {
      ahead_.assign(table_.count(), 1);
    }
    const uint64_t mask = table_.count() - 1;
    uint64_t found = slot;
    while (table_.at(found).id != kEmptyId) {
      found = (found + ahead_[found]) & mask;
    }
    while (slot != found) {
      const uint64_t next = (slot + ahead_[slot]) & mask;
      ahead_[slot] = static_cast<uint32_t>(std::min<uint64_t>((found - slot) & mask, UINT32_MAX));
      slot = next;
    }
    return found;
  }

  SlotTable table_;
  std::vector<uint32_t> ahead_;  // so many slots from each one on are not empty, if that one is not
};

void insert_rows(const Rows& rows, const SlotTable& table) {
  Insertions insertions(table);
  for (int64_t row = 0; row < rows.count; ++row) {
    if (row + kRowsAhead < rows.count && is_taken(rows.states[row + kRowsAhead])) {
      table.prefetch(table.home(rows.ids[row + kRowsAhead]));
    }
    if (is_taken(rows.states[row])) {
      insertions.insert(rows.ids[row], row);
    }
  }
}

void slot_tables_(const at::Tensor& all_slots, const at::Tensor& all_side_rows, at::IntArrayRef slot_counts,
                  at::TensorList row_ids, at::TensorList row_states, at::TensorList locks) {
  const size_t tables = slot_counts.size();
  TORCH_CHECK(row_ids.size() == tables && row_states.size() == tables && locks.size() == tables,
              "recfx: slot_tables_ needs one entry per table in every list");
  static_assert(sizeof(Slot) == 2 * sizeof(int64_t));
  int64_t* numbers = int64_data(all_slots, "all_slots", 2);
  int64_t* side_rows = int64_data(all_side_rows, "all_side_rows");
  auto* slots = reinterpret_cast<Slot*>(numbers);
  std::vector<IndexLock> index_locks;
  std::vector<Rows> rows;
  std::vector<SlotTable> views;
  int64_t begin = 0;
  for (size_t t = 0; t < tables; ++t) {
    const int64_t count = slot_counts[t];
    const int64_t row_count = row_ids[t].numel();
    TORCH_CHECK(count > 0 && (count & (count - 1)) == 0, "recfx: table ", t, " has ", count,
                " slots, which is not a power of two");
    TORCH_CHECK(row_states[t].device().is_cpu() && row_states[t].is_contiguous() &&
                    row_states[t].scalar_type() == at::kByte && row_states[t].numel() == row_count,
                "recfx: row_state of table ", t, " must be uint8 [", row_count, "] on the CPU");
    rows.push_back(
        {int64_data(row_ids[t], "row_ids"), static_cast<const uint8_t*>(row_states[t].const_data_ptr()), row_count});
    index_locks.push_back(index_lock(locks[t]));
    views.emplace_back(slots + begin, count, side_rows + t);
    begin += count;
  }
  TORCH_CHECK(
      all_slots.size(1) == 2 && all_slots.size(0) == begin && all_side_rows.numel() == static_cast<int64_t>(tables),
      "recfx: ", begin, " slots and ", tables, " rows of id -1 do not fit into ", all_slots.sizes(), " and ",
      all_side_rows.sizes());
  const Locked locked(std::move(index_locks), false);
  for (size_t t = 0; t < tables; ++t) {  // a full table would be searched for ever
    const int64_t taken = std::count_if(rows[t].states, rows[t].states + rows[t].count, is_taken);
    TORCH_CHECK(taken < slot_counts[t], "recfx: ", taken, " ids of table ", t, " do not fit into ", slot_counts[t],
                " slots");
  }
  parallel_for(0, 2 * begin, kFilledAtOnce,
               [&](int64_t first, int64_t last) { std::fill(numbers + first, numbers + last, kEmptyId); });
  std::fill(side_rows, side_rows + tables, kNoRow);
  parallel_for_each(static_cast<int64_t>(tables), [&](int64_t t) { insert_rows(rows[t], views[t]); });
}

at::Tensor take_slots_(const at::Tensor& taken, at::IntArrayRef slot_counts, const at::Tensor& ids,
                       at::IntArrayRef ends) {
  const auto tables = static_cast<int64_t>(slot_counts.size());
  const int64_t all_slots = std::accumulate(slot_counts.begin(), slot_counts.end(), int64_t{0});
  TORCH_CHECK(taken.device().is_cpu() && taken.is_contiguous() && taken.scalar_type() == at::kByte &&
                  taken.numel() == all_slots,
              "recfx: taken must be uint8 [", all_slots, "] on the CPU");
  const int64_t* own_ids = int64_data(ids, "ids");
  TORCH_CHECK(static_cast<int64_t>(ends.size()) == tables && (tables == 0 || ends[tables - 1] == ids.numel()) &&
                  std::is_sorted(ends.begin(), ends.end()),
              "recfx: take_slots_ needs the end of each table's ids");
  at::Tensor places = at::empty_like(ids);
  auto* is_taken = static_cast<uint8_t*>(taken.data_ptr());
  int64_t* own_places = int64_data(places, "places");
  std::vector<int64_t> begins(slot_counts.size());
  std::exclusive_scan(slot_counts.begin(), slot_counts.end(), begins.begin(), int64_t{0});
  parallel_for_each(tables, [&](int64_t t) {
    const int64_t count = slot_counts[t];
    TORCH_CHECK(count > 0 && (count & (count - 1)) == 0, "recfx: table ", t, " has ", count,
                " slots, which is not a power of two");
    uint8_t* own = is_taken + begins[t];
    for (int64_t k = t == 0 ? 0 : ends[t - 1]; k < ends[t]; ++k) {
      uint64_t slot = slot_hash(own_ids[k]) & static_cast<uint64_t>(count - 1);
      if (own_ids[k] == kEmptyId) {
        own_places[k] = all_slots + t;
        continue;
      }
      for (int64_t step = 0; own[slot] != 0; ++step) {
        TORCH_CHECK(step < count, "recfx: table ", t, " has no empty slot");
        slot = (slot + 1) & static_cast<uint64_t>(count - 1);
      }
      own[slot] = 1;
      own_places[k] = begins[t] + static_cast<int64_t>(slot);
    }
  });
  return places;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def("take_slots_(Tensor(a!) taken, int[] slot_counts, Tensor ids, int[] ends) -> Tensor");
  library.def(
      "slot_tables_(Tensor(a!) all_slots, Tensor(b!) all_side_rows, int[] slot_counts, Tensor[] row_ids, "
      "Tensor[] row_states, Tensor[] locks) -> ()");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) {
  library.impl("slot_tables_", slot_tables_);
  library.impl("take_slots_", take_slots_);
}

}  // namespace recfx
