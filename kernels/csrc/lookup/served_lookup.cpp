// Finds ids in frozen indexes and pools their stored rows (or not), for exported files. Contract:
// kernels/lookup/served_lookup.py. Determinism: one thread sums each bag, in float32 and in the order of its ids.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <vector>

#include "build/tasks.h"
#include "index/absent_answer.h"
#include "index/find_in_slot_table.h"
#include "index/slot_table.h"
#include "lookup/bag_tasks.h"
#include "lookup/lookup_checks.h"
#include "lookup/stored_rows.h"

namespace recfx {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// One table of a file.
struct Table {
  RowFormat format;
  const uint8_t* rows;
  int64_t count;
  int64_t columns;
  int64_t bytes;
  std::optional<SlotTable> slots;  // nullopt: the ids are rows
  DenseIds dense;
  AbsentAnswer answer;
};

std::vector<Table> tables_of(const at::Tensor& rows, at::IntArrayRef counts, at::IntArrayRef columns,
                             at::IntArrayRef formats, const at::Tensor& slots, at::IntArrayRef slot_counts,
                             at::IntArrayRef side_rows, at::IntArrayRef dense_rows, at::IntArrayRef share_buckets,
                             at::IntArrayRef seeds) {
  const size_t tables = counts.size();
  TORCH_CHECK(columns.size() == tables && formats.size() == tables && slot_counts.size() == tables &&
                  side_rows.size() == tables && dense_rows.size() == tables && share_buckets.size() == tables &&
                  seeds.size() == tables,
              "recfx::served_lookup needs one entry per table in every list");
  TORCH_CHECK(rows.device().is_cpu() && rows.scalar_type() == at::kByte && rows.dim() == 1 && rows.is_contiguous(),
              "recfx::served_lookup: rows must be contiguous uint8 [bytes] on the CPU");
  auto* slot_data = reinterpret_cast<Slot*>(int64_data(slots, "slots", 2));
  int64_t begin = 0;
  int64_t slot = 0;
  std::vector<Table> found;
  found.reserve(tables);
  for (size_t t = 0; t < tables; ++t) {
    TORCH_CHECK(0 <= formats[t] && formats[t] <= 3 && counts[t] >= 0 && columns[t] >= 0 && slot_counts[t] >= 0 &&
                    (slot_counts[t] & (slot_counts[t] - 1)) == 0 && (formats[t] != 3 || columns[t] % 2 == 0),
                "recfx::served_lookup: table ", t, " is not one");
    TORCH_CHECK(0 <= dense_rows[t] && dense_rows[t] <= counts[t] && -1 <= side_rows[t] && side_rows[t] < counts[t] &&
                    std::abs(share_buckets[t]) <= std::max<int64_t>(0, counts[t] - dense_rows[t]),
                "recfx::served_lookup: the index of table ", t, " is not one");
    const auto format = static_cast<RowFormat>(formats[t]);
    const int64_t bytes = stored_bytes(format, columns[t]);
    found.push_back({format,
                     static_cast<const uint8_t*>(rows.const_data_ptr()) + begin,
                     counts[t],
                     columns[t],
                     bytes,
                     std::nullopt,
                     {dense_rows[t], 0},
                     AbsentAnswer(counts[t], dense_rows[t], share_buckets[t], seeds[t], 0, counts[t])});
    begin += counts[t] * bytes;
    if (slot_counts[t] > 0) {
      TORCH_CHECK(slot + slot_counts[t] <= slots.size(0), "recfx::served_lookup: there are too few slots");
      auto* side_row = const_cast<int64_t*>(&side_rows[t]);  // of an index that is only read
      found[t].slots.emplace(slot_data + slot, slot_counts[t], side_row);
      slot += slot_counts[t];
    }
  }
  TORCH_CHECK(begin == rows.numel(), "recfx::served_lookup: the tables have ", begin, " bytes, but rows has ",
              rows.numel());
  return found;
}

// Finds the rows of ids [begin, end), which are the ids themselves if the table has no index: then rows is not used.
// Returns the position of an id whose row the table does not have, or `end`.
int64_t find(const Table& table, const int64_t* ids, int64_t* rows, int64_t begin, int64_t end) {
  if (table.slots) {
    find_range(ids, rows, begin, end, *table.slots, table.dense);
    answer_absent(ids, rows, begin, end, table.answer);
  }
  const int64_t* found = table.slots ? rows : ids;
  const int64_t least = table.slots ? -1 : 0;
  uint64_t signs = 0;  // without a branch and without 64-bit comparisons, so that it is vectorised everywhere
  for (int64_t i = begin; i < end; ++i) {
    const auto row = static_cast<uint64_t>(found[i]);
    signs |= (row - static_cast<uint64_t>(least)) | (static_cast<uint64_t>(table.count - 1) - row);
  }
  if (signs >> 63 == 0) {
    return end;
  }
  const auto is_wrong = [&](int64_t row) { return row < least || row >= table.count; };
  return std::find_if(found + begin, found + end, is_wrong) - found;
}

at::Tensor served_lookup(const at::Tensor& ids_given, const at::Tensor& offsets_given, const at::Tensor& stored,
                         at::IntArrayRef counts, at::IntArrayRef columns, at::IntArrayRef formats,
                         at::IntArrayRef table_of_feature, const at::Tensor& slots, at::IntArrayRef slot_counts,
                         at::IntArrayRef side_rows, at::IntArrayRef dense_rows, at::IntArrayRef share_buckets,
                         at::IntArrayRef seeds, bool mean, const OptionalTensor& per_sample_weights, bool unpooled) {
  const at::Tensor ids = ids_given.contiguous();
  const at::Tensor offsets = offsets_given.contiguous();
  const int64_t* id_data = int64_data(ids, "ids");
  const int64_t* offset_data = int64_data(offsets, "offsets");
  const auto features = static_cast<int64_t>(table_of_feature.size());
  const int64_t batch_size = checked_batch_size(offsets, features, ids.numel());
  const std::vector<Table> tables =
      tables_of(stored, counts, columns, formats, slots, slot_counts, side_rows, dense_rows, share_buckets, seeds);
  at::Tensor scale;
  if (per_sample_weights.has_value()) {
    check_per_sample_weights(*per_sample_weights, ids.numel(), mean);
    scale = per_sample_weights->contiguous();
  }
  std::vector<int64_t> first_output;
  int64_t total = 0;
  for (const int64_t table : table_of_feature) {
    TORCH_CHECK(0 <= table && table < static_cast<int64_t>(tables.size()), "recfx: there is no table ", table);
    first_output.push_back(total);
    total += tables[table].columns;
  }
  const int64_t n = ids.numel();
  if (unpooled) {
    total = tables[table_of_feature[0]].columns;
    TORCH_CHECK(offset_data[0] == 0 && offset_data[features * batch_size] == n,
                "recfx::served_lookup: unpooled ids must all be in a bag");
    for (int64_t feature = 0; feature < features; ++feature) {
      TORCH_CHECK(tables[table_of_feature[feature]].columns == total,
                  "recfx::served_lookup: unpooled tables must have the same columns");
      first_output[feature] = offset_data[feature * batch_size] * total;
    }
  }
  const at::Tensor own_bags = at::arange(unpooled ? n + 1 : 0, at::TensorOptions().dtype(at::kLong));
  const auto* own_bag_data = own_bags.const_data_ptr<int64_t>();
  // The offsets of a feature's bags; if rows are not pooled, each of its ids is one.
  const auto bags_of = [&](int64_t feature) {
    const int64_t* bags = offset_data + feature * batch_size;
    return unpooled ? own_bag_data + *bags : bags;
  };
  at::Tensor pooled = at::empty({unpooled ? n : batch_size, total}, at::TensorOptions().dtype(at::kFloat));
  at::Tensor rows = at::empty({slots.size(0) > 0 ? n : 0}, at::TensorOptions().dtype(at::kLong));
  float* sums = pooled.data_ptr<float>();
  auto* row_data = rows.data_ptr<int64_t>();
  std::vector<BagTask> tasks;
  for (int64_t feature = 0; feature < features; ++feature) {
    const int64_t* bags = offset_data + feature * batch_size;
    add_bag_tasks(feature, bags_of(feature), unpooled ? bags[batch_size] - bags[0] : batch_size, kIdsPerTask, tasks);
  }
  std::atomic<int64_t> wrong{-1};
  run_tasks(ids.numel(), static_cast<int64_t>(tasks.size()), [&](int64_t k) {
    const BagTask& task = tasks[k];
    const Table& table = tables[table_of_feature[task.feature]];
    const int64_t* bags = bags_of(task.feature);
    const int64_t begin = bags[task.first];
    const int64_t end = bags[task.last];
    const int64_t found = find(table, id_data, row_data, begin, end);
    if (found < end) {
      wrong = found;
      return;
    }
    pool_stored(table.format,
                {table.rows, table.bytes, table.columns, table.slots ? row_data : id_data,
                 per_sample_weights.has_value() ? scale.const_data_ptr<float>() : nullptr, bags, mean,
                 sums + first_output[task.feature], total},
                task.first, task.last);
  });
  TORCH_CHECK_INDEX(wrong < 0, "recfx::served_lookup: id ", id_data[std::max<int64_t>(wrong, 0)], " at position ",
                    wrong.load(), " has no row in its table [id_out_of_range]");
  return pooled;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def(
      "served_lookup(Tensor ids, Tensor offsets, Tensor rows, int[] counts, int[] columns, int[] formats, "
      "int[] table_of_feature, Tensor slots, int[] slot_counts, int[] side_rows, int[] dense_rows, "
      "int[] share_buckets, int[] seeds, bool mean, Tensor? per_sample_weights, bool unpooled=False) -> Tensor");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) { library.impl("served_lookup", served_lookup); }

}  // namespace recfx
