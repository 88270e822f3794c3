// Pooled lookups of all tables of a group in one parallel region. Contract: kernels/pooled_lookup.py.
// Determinism: one thread sums each bag, in float32 and in the order of its ids.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <vector>

#include "absent_answer.h"
#include "checks.h"
#include "find.h"
#include "parallel.h"
#include "pool.h"
#include "slot_table.h"

namespace recfx {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

constexpr int64_t kIdsPerTask = 4096;

// The number of ids for which it is worth waking one more thread. Smaller batches are done before other threads have
// started.
constexpr int64_t kIdsPerThread = 8192;

// The arguments that all three operators share, checked.
struct Lookup {
  at::Tensor offsets_tensor;
  at::Tensor scale_tensor;
  at::TensorList weights;
  at::IntArrayRef table_of_feature;
  const int64_t* offsets;
  const float* scale = nullptr;
  int64_t ids;
  int64_t features;
  int64_t batch_size;
  int64_t columns = 0;
  bool mean;
  std::vector<int64_t> first_column;  // per feature

  Lookup(int64_t ids, const at::Tensor& offsets_given, at::TensorList weights, at::IntArrayRef table_of_feature,
         const OptionalTensor& scale_given, bool mean)
      : offsets_tensor(offsets_given.contiguous()),
        weights(weights),
        table_of_feature(table_of_feature),
        offsets(int64_data(offsets_tensor, "offsets")),
        ids(ids),
        features(static_cast<int64_t>(table_of_feature.size())),
        mean(mean) {
    TORCH_CHECK(features > 0 && offsets_tensor.numel() > 0 && (offsets_tensor.numel() - 1) % features == 0,
                "recfx: offsets must be [F * B + 1] for ", features, " features, got ", offsets_tensor.sizes());
    batch_size = (offsets_tensor.numel() - 1) / features;
    const int64_t* last = offsets + features * batch_size;
    TORCH_CHECK(*offsets >= 0 && *last <= ids && std::is_sorted(offsets, last + 1),
                "recfx: offsets must ascend within the ", ids, " ids");
    for (const at::Tensor& weight : weights) {
      TORCH_CHECK(weight.device().is_cpu() && weight.dim() == 2 && weight.is_contiguous() &&
                      weight.scalar_type() == weights[0].scalar_type() &&
                      (weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kHalf),
                  "recfx: weights must be contiguous [rows, dim] on the CPU, all float32 or all float16");
    }
    for (const int64_t table : table_of_feature) {
      TORCH_CHECK(0 <= table && table < static_cast<int64_t>(weights.size()), "recfx: there is no table ", table);
      first_column.push_back(columns);
      columns += weights[table].size(1);
    }
    if (scale_given.has_value()) {
      TORCH_CHECK(scale_given->device().is_cpu() && scale_given->scalar_type() == at::kFloat &&
                      scale_given->dim() == 1 && scale_given->numel() == ids,
                  "recfx: per_sample_weights must be float32 [", ids, "] on the CPU");
      TORCH_CHECK(!mean, "recfx: per_sample_weights are for sums, not for means");
      scale_tensor = scale_given->contiguous();
      scale = scale_tensor.const_data_ptr<float>();
    }
  }

  at::Tensor new_pooled() const { return at::empty({batch_size, columns}, at::TensorOptions().dtype(at::kFloat)); }

  template <typename weight_t>
  Bags<weight_t> bags(int64_t feature, const int64_t* rows, float* pooled) const {
    const at::Tensor& weight = weights[table_of_feature[feature]];
    return {static_cast<const weight_t*>(weight.const_data_ptr()),
            weight.size(1),
            rows,
            scale,
            offsets + feature * batch_size,
            mean,
            pooled + first_column[feature],
            columns};
  }

  // Calls run(bags) for one feature, with bags of the weights' type.
  template <typename Run>
  void with_bags(int64_t feature, const int64_t* rows, float* pooled, const Run& run) const {
    if (weights[0].scalar_type() == at::kFloat) {
      run(bags<float>(feature, rows, pooled));
    } else {
      run(bags<uint16_t>(feature, rows, pooled));
    }
  }
};

// Some adjacent bags of one feature.
struct Task {
  int64_t feature;
  int64_t first;
  int64_t last;
  int64_t absent = 0;
};

// Tasks of about kIdsPerTask ids each.
std::vector<Task> tasks_of(const Lookup& lookup) {
  std::vector<Task> tasks;
  for (int64_t feature = 0; feature < lookup.features && lookup.batch_size > 0; ++feature) {
    const int64_t* offsets = lookup.offsets + feature * lookup.batch_size;
    const int64_t ids = offsets[lookup.batch_size] - offsets[0];
    const int64_t pieces = std::clamp<int64_t>(ids / kIdsPerTask, 1, lookup.batch_size);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      tasks.push_back({feature, piece * lookup.batch_size / pieces, (piece + 1) * lookup.batch_size / pieces});
    }
  }
  return tasks;
}

// Tasks differ in cost because tables have different widths, so each thread takes the next task when it is free. With a
// single thread, no parallel region is opened.
template <typename Run>
void run_tasks(int64_t ids, std::vector<Task>& tasks, const Run& run) {
  const int64_t count = static_cast<int64_t>(tasks.size());
  const int64_t threads = std::min({static_cast<int64_t>(at::get_num_threads()), count, ids / kIdsPerThread + 1});
  std::atomic<int64_t> next{0};
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t k = next++; k < count; k = next++) {
      run(tasks[k]);
    }
  });
}

at::Tensor pooled_lookup(const at::Tensor& rows, const at::Tensor& offsets, at::TensorList weights,
                         at::IntArrayRef table_of_feature, bool mean, const OptionalTensor& per_sample_weights) {
  const at::Tensor rows_contiguous = rows.contiguous();
  const int64_t* row_data = int64_data(rows_contiguous, "rows");
  const Lookup lookup(rows.numel(), offsets, weights, table_of_feature, per_sample_weights, mean);
  at::Tensor pooled = lookup.new_pooled();
  float* sums = pooled.data_ptr<float>();
  std::vector<Task> tasks = tasks_of(lookup);
  run_tasks(lookup.ids, tasks, [&](Task& task) {
    lookup.with_bags(task.feature, row_data, sums, [&](const auto& bags) { pool(bags, task.first, task.last); });
  });
  return pooled;
}

// Returns pooled, rows, absent [tables].
std::tuple<at::Tensor, at::Tensor, at::Tensor> find_and_pool(const at::Tensor& ids, const at::Tensor& offsets,
                                                             at::TensorList weights, at::IntArrayRef table_of_feature,
                                                             at::TensorList slots, at::TensorList side_rows,
                                                             at::IntArrayRef dense_rows, at::IntArrayRef share_buckets,
                                                             at::IntArrayRef seeds, at::IntArrayRef table_rows,
                                                             at::IntArrayRef row_begins, at::TensorList locks,
                                                             const OptionalTensor& per_sample_weights) {
  const size_t tables = weights.size();
  TORCH_CHECK(slots.size() == tables && side_rows.size() == tables && dense_rows.size() == tables &&
                  share_buckets.size() == tables && seeds.size() == tables && table_rows.size() == tables &&
                  row_begins.size() == tables,
              "recfx::find_and_pool needs one entry per table in every list");
  const at::Tensor ids_contiguous = ids.contiguous();
  const int64_t* id_data = int64_data(ids_contiguous, "ids");
  const Lookup lookup(ids.numel(), offsets, weights, table_of_feature, per_sample_weights, false);
  std::vector<std::optional<SlotTable>> views;  // nullopt: the ids are rows
  std::vector<DenseIds> dense;
  std::vector<AbsentAnswer> answers;
  for (size_t t = 0; t < tables; ++t) {
    const int64_t own_rows = weights[t].size(0);
    const int64_t rows = table_rows[t] == 0 ? own_rows : table_rows[t];
    TORCH_CHECK(row_begins[t] >= 0 && row_begins[t] <= rows - own_rows, "recfx::find_and_pool: a weight of ", own_rows,
                " rows from row ", row_begins[t], " on is not a slice of table ", t, " of ", rows, " rows");
    TORCH_CHECK(
        dense_rows[t] >= 0 && share_buckets[t] >= 0 && share_buckets[t] <= std::max<int64_t>(0, rows - dense_rows[t]),
        "recfx::find_and_pool: table ", t, " of ", rows, " rows has ", dense_rows[t], " dense rows and shares ",
        share_buckets[t], " buckets");
    const int64_t own_dense_rows = std::clamp<int64_t>(dense_rows[t] - row_begins[t], 0, own_rows);
    dense.push_back({own_dense_rows, row_begins[t]});
    views.push_back(slots[t].numel() == 0 ? std::nullopt : std::make_optional(slot_table(slots[t], side_rows[t])));
    answers.emplace_back(rows, dense_rows[t], share_buckets[t], seeds[t], row_begins[t], own_rows);
  }

  at::Tensor pooled = lookup.new_pooled();
  float* sums = pooled.data_ptr<float>();
  at::Tensor rows = at::empty({lookup.ids}, at::TensorOptions().dtype(at::kLong));
  int64_t* row_data = rows.data_ptr<int64_t>();
  const int64_t* borders = lookup.offsets;  // ids outside the bags belong to no table
  std::fill(row_data, row_data + borders[0], kNoRow);
  std::fill(row_data + borders[lookup.features * lookup.batch_size], row_data + lookup.ids, kNoRow);

  std::vector<IndexLock> index_locks;
  for (const at::Tensor& lock : locks) {
    index_locks.push_back(index_lock(lock));
  }
  const Locked locked(std::move(index_locks), false);
  std::vector<Task> tasks = tasks_of(lookup);
  run_tasks(lookup.ids, tasks, [&](Task& task) {
    const int64_t table = table_of_feature[task.feature];
    lookup.with_bags(task.feature, row_data, sums, [&](const auto& bags) {
      const int64_t begin = bags.offsets[task.first];
      const int64_t end = bags.offsets[task.last];
      if (views[table]) {
        find_range(id_data, row_data, begin, end, *views[table], dense[table]);
        task.absent = answer_absent(id_data, row_data, begin, end, answers[table]);
      } else {
        std::copy(id_data + begin, id_data + end, row_data + begin);
      }
      pool(bags, task.first, task.last);  // the rows found are still in this core's cache
    });
  });
  at::Tensor absent = at::zeros({static_cast<int64_t>(tables)}, at::TensorOptions().dtype(at::kLong));
  int64_t* absent_data = absent.data_ptr<int64_t>();
  for (const Task& task : tasks) {
    absent_data[table_of_feature[task.feature]] += task.absent;
  }
  return {pooled, rows, absent};
}

void pool_again_(const at::Tensor& pooled, const at::Tensor& rows, const at::Tensor& changed, const at::Tensor& offsets,
                 at::TensorList weights, at::IntArrayRef table_of_feature, const OptionalTensor& per_sample_weights) {
  const at::Tensor rows_contiguous = rows.contiguous();
  const int64_t* row_data = int64_data(rows_contiguous, "rows");
  const Lookup lookup(rows.numel(), offsets, weights, table_of_feature, per_sample_weights, false);
  TORCH_CHECK(changed.device().is_cpu() && changed.scalar_type() == at::kBool && changed.dim() == 1 &&
                  changed.numel() == lookup.ids,
              "recfx::pool_again_: changed must be bool [", lookup.ids, "] on the CPU");
  TORCH_CHECK(pooled.device().is_cpu() && pooled.scalar_type() == at::kFloat && pooled.is_contiguous() &&
                  pooled.dim() == 2 && pooled.size(0) == lookup.batch_size && pooled.size(1) == lookup.columns,
              "recfx::pool_again_: pooled must be contiguous float32 [", lookup.batch_size, ", ", lookup.columns,
              "] on the CPU");
  const at::Tensor changed_contiguous = changed.contiguous();
  const bool* changed_data = changed_contiguous.const_data_ptr<bool>();
  float* sums = pooled.data_ptr<float>();
  std::vector<Task> tasks = tasks_of(lookup);
  run_tasks(lookup.ids, tasks, [&](Task& task) {
    lookup.with_bags(task.feature, row_data, sums, [&](const auto& bags) {
      const bool* end = changed_data + bags.offsets[task.last];
      for (int64_t bag = task.first; bag < task.last; ++bag) {
        const bool* found = std::find(changed_data + bags.offsets[bag], end, true);
        while (bag < task.last && changed_data + bags.offsets[bag + 1] <= found) {
          ++bag;
        }
        if (bag < task.last) {
          pool(bags, bag, bag + 1);
        }
      }
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def(
      "pooled_lookup(Tensor rows, Tensor offsets, Tensor[] weights, int[] table_of_feature, bool mean, "
      "Tensor? per_sample_weights) -> Tensor");
  library.def(
      "find_and_pool(Tensor ids, Tensor offsets, Tensor[] weights, int[] table_of_feature, Tensor[] slots, "
      "Tensor[] side_rows, int[] dense_rows, int[] share_buckets, int[] seeds, int[] table_rows, int[] row_begins, "
      "Tensor[] locks, Tensor? per_sample_weights) "
      "-> (Tensor, Tensor, Tensor)");
  library.def(
      "pool_again_(Tensor(a!) pooled, Tensor rows, Tensor changed, Tensor offsets, Tensor[] weights, "
      "int[] table_of_feature, Tensor? per_sample_weights) -> ()");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) {
  library.impl("pooled_lookup", pooled_lookup);
  library.impl("find_and_pool", find_and_pool);
  library.impl("pool_again_", pool_again_);
}

}  // namespace recfx
