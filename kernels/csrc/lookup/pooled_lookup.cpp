// Lookups of all tables of a group, pooled or not, in one parallel region. Contract: kernels/lookup/pooled_lookup.py.
// Determinism: one thread sums each bag, in float32 and in the order of its ids.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <tuple>
#include <vector>

#include "build/kept_memory.h"
#include "build/tasks.h"
#include "index/absent_answer.h"
#include "index/find_in_groups.h"
#include "lookup/bag_tasks.h"
#include "lookup/lookup_checks.h"
#include "lookup/pool.h"

namespace recfx {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// The arguments that all three operators share, checked.
struct Lookup {
  at::Tensor offsets_tensor;
  at::Tensor scale_tensor;
  at::TensorList weights;
  at::IntArrayRef table_of_feature;
  const float* scale = nullptr;
  int64_t ids;
  int64_t features;
  BatchBags batch;
  bool mean;
  std::vector<std::vector<int64_t>> shapes;  // of the outputs: one, or one per feature if rows are not pooled
  std::vector<int64_t> first_column;         // per feature, in the output that it goes to

  Lookup(int64_t ids, const at::Tensor& offsets_given, at::TensorList weights, at::IntArrayRef table_of_feature,
         const OptionalTensor& scale_given, bool mean, bool unpooled)
      : offsets_tensor(offsets_given.contiguous()),
        weights(weights),
        table_of_feature(table_of_feature),
        ids(ids),
        features(static_cast<int64_t>(table_of_feature.size())),
        mean(mean) {
    const int64_t* offsets = int64_data(offsets_tensor, "offsets");
    batch = {offsets, checked_batch_size(offsets_tensor, features, ids), unpooled};
    check_weights(weights);
    first_column = checked_columns(weights, table_of_feature);
    if (unpooled) {
      check_unpooled(offsets_tensor, features, ids, mean, scale_given.has_value());
      for (int64_t feature = 0; feature < features; ++feature) {
        shapes.push_back({batch.ids_of(feature), weights[table_of_feature[feature]].size(1)});
      }
      first_column.assign(features, 0);
    } else {
      shapes.push_back({batch.batch_size, first_column.back()});
    }
    if (scale_given.has_value()) {
      check_per_sample_weights(*scale_given, ids, mean);
      scale_tensor = scale_given->contiguous();
      scale = scale_tensor.const_data_ptr<float>();
    }
  }

  std::vector<at::Tensor> new_outputs() const {
    std::vector<at::Tensor> outputs;
    for (const std::vector<int64_t>& shape : shapes) {
      outputs.push_back(at::empty(shape, at::TensorOptions().dtype(at::kFloat)));
    }
    return outputs;
  }

  template <typename weight_t>
  Bags<weight_t> bags(int64_t feature, const int64_t* rows, const std::vector<float*>& outputs) const {
    const at::Tensor& weight = weights[table_of_feature[feature]];
    const int64_t output = batch.unpooled ? feature : 0;
    return {static_cast<const weight_t*>(weight.const_data_ptr()),
            weight.size(1),
            rows,
            scale,
            batch.unpooled ? nullptr : batch.offsets + feature * batch.batch_size,
            mean,
            outputs[output] + first_column[feature],
            shapes[output][1],
            batch.first_of(feature)};
  }

  // Calls run(bags) for one feature, with bags of the weights' type.
  template <typename Run>
  void with_bags(int64_t feature, const int64_t* rows, const std::vector<float*>& outputs, const Run& run) const {
    switch (weights[0].scalar_type()) {
      case at::kFloat:
        return run(bags<float>(feature, rows, outputs));
      case at::kHalf:
        return run(bags<uint16_t>(feature, rows, outputs));
      default:
        return run(bags<BFloat16>(feature, rows, outputs));
    }
  }
};

std::vector<float*> float_data(at::TensorList outputs) {
  std::vector<float*> data;
  for (const at::Tensor& output : outputs) {
    data.push_back(output.data_ptr<float>());
  }
  return data;
}

// Tasks of about kIdsPerTask ids each.
std::vector<BagTask> tasks_of(const Lookup& lookup) {
  std::vector<BagTask> tasks;
  for (int64_t feature = 0; feature < lookup.features; ++feature) {
    add_bag_tasks(lookup.batch, feature, kIdsPerTask, tasks);
  }
  return tasks;
}

std::vector<at::Tensor> pooled_lookup(const at::Tensor& rows, const at::Tensor& offsets, at::TensorList weights,
                                      at::IntArrayRef table_of_feature, bool mean,
                                      const OptionalTensor& per_sample_weights, bool unpooled) {
  const at::Tensor rows_contiguous = rows.contiguous();
  const int64_t* row_data = int64_data(rows_contiguous, "rows");
  const Lookup lookup(rows.numel(), offsets, weights, table_of_feature, per_sample_weights, mean, unpooled);
  std::vector<at::Tensor> outputs = lookup.new_outputs();
  const std::vector<float*> output_data = float_data(outputs);
  const std::vector<BagTask> tasks = tasks_of(lookup);
  run_tasks(lookup.ids, static_cast<int64_t>(tasks.size()), [&](int64_t k) {
    const BagTask& task = tasks[k];
    lookup.with_bags(task.feature, row_data, output_data, [&](const auto& bags) { pool(bags, task.first, task.last); });
  });
  return outputs;
}

struct RowsNobodyAsksFor;

// Returns outputs, rows, absent [tables].
std::tuple<std::vector<at::Tensor>, at::Tensor, at::Tensor> find_and_pool(
    const at::Tensor& ids, const at::Tensor& offsets, at::TensorList weights, at::IntArrayRef table_of_feature,
    at::TensorList slot_groups_of, at::TensorList side_rows, at::IntArrayRef dense_rows, at::IntArrayRef share_buckets,
    at::IntArrayRef seeds, at::IntArrayRef table_rows, at::IntArrayRef row_begins, at::TensorList locks,
    const OptionalTensor& per_sample_weights, bool keep_rows, bool unpooled) {
  const size_t tables = weights.size();
  TORCH_CHECK(slot_groups_of.size() == tables && side_rows.size() == tables && dense_rows.size() == tables &&
                  share_buckets.size() == tables && seeds.size() == tables && table_rows.size() == tables &&
                  row_begins.size() == tables,
              "recfx::find_and_pool needs one entry per table in every list");
  const at::Tensor ids_contiguous = ids.contiguous();
  const int64_t* id_data = int64_data(ids_contiguous, "ids");
  const Lookup lookup(ids.numel(), offsets, weights, table_of_feature, per_sample_weights, false, unpooled);
  std::vector<std::optional<SlotGroups>> views;  // nullopt: the ids are rows
  std::vector<DenseIds> dense;
  std::vector<AbsentAnswer> answers;
  for (size_t t = 0; t < tables; ++t) {
    const int64_t own_rows = weights[t].size(0);
    const int64_t rows = table_rows[t] == 0 ? own_rows : table_rows[t];
    TORCH_CHECK(row_begins[t] >= 0 && row_begins[t] <= rows - own_rows, "recfx::find_and_pool: a weight of ", own_rows,
                " rows from row ", row_begins[t], " on is not a slice of table ", t, " of ", rows, " rows");
    TORCH_CHECK(dense_rows[t] >= 0 && std::abs(share_buckets[t]) <= std::max<int64_t>(0, rows - dense_rows[t]),
                "recfx::find_and_pool: table ", t, " of ", rows, " rows has ", dense_rows[t], " dense rows and shares ",
                share_buckets[t], " buckets");
    const int64_t own_dense_rows = std::clamp<int64_t>(dense_rows[t] - row_begins[t], 0, own_rows);
    dense.push_back({own_dense_rows, row_begins[t]});
    views.push_back(slot_groups_of[t].numel() == 0 ? std::nullopt
                                                   : std::make_optional(slot_groups(slot_groups_of[t], side_rows[t])));
    answers.emplace_back(rows, dense_rows[t], share_buckets[t], seeds[t], row_begins[t], own_rows);
  }

  std::vector<at::Tensor> outputs = lookup.new_outputs();
  const std::vector<float*> output_data = float_data(outputs);
  at::Tensor rows = at::empty({keep_rows ? lookup.ids : 0}, at::TensorOptions().dtype(at::kLong));
  int64_t* row_data = keep_rows ? rows.data_ptr<int64_t>() : kept_memory<RowsNobodyAsksFor>(lookup.ids);
  const int64_t* borders = lookup.batch.offsets;  // ids outside the bags belong to no table
  std::fill(row_data, row_data + borders[0], kNoRow);
  std::fill(row_data + borders[lookup.features * lookup.batch.batch_size], row_data + lookup.ids, kNoRow);

  std::vector<IndexLock> index_locks;
  for (const at::Tensor& lock : locks) {
    index_locks.push_back(index_lock(lock));
  }
  const Locked locked(std::move(index_locks), false);
  const std::vector<BagTask> tasks = tasks_of(lookup);
  std::vector<int64_t> absent_of_task(tasks.size());
  run_tasks(lookup.ids, static_cast<int64_t>(tasks.size()), [&](int64_t k) {
    const BagTask& task = tasks[k];
    const int64_t table = table_of_feature[task.feature];
    lookup.with_bags(task.feature, row_data, output_data, [&](const auto& bags) {
      const int64_t begin = lookup.batch.begin(task.feature, task.first);
      const int64_t end = lookup.batch.begin(task.feature, task.last);
      if (views[table]) {
        find_range(id_data, row_data, begin, end, *views[table], dense[table]);
        absent_of_task[k] = answer_absent(id_data, row_data, begin, end, answers[table]);
      } else {
        std::copy(id_data + begin, id_data + end, row_data + begin);
      }
      pool(bags, task.first, task.last);  // the rows found are still in this core's cache
    });
  });
  at::Tensor absent = at::zeros({static_cast<int64_t>(tables)}, at::TensorOptions().dtype(at::kLong));
  int64_t* absent_data = absent.data_ptr<int64_t>();
  for (size_t k = 0; k < tasks.size(); ++k) {
    absent_data[table_of_feature[tasks[k].feature]] += absent_of_task[k];
  }
  return {outputs, rows, absent};
}

void pool_again_(at::TensorList outputs, const at::Tensor& rows, const at::Tensor& changed, const at::Tensor& offsets,
                 at::TensorList weights, at::IntArrayRef table_of_feature, const OptionalTensor& per_sample_weights,
                 bool unpooled) {
  const at::Tensor rows_contiguous = rows.contiguous();
  const int64_t* row_data = int64_data(rows_contiguous, "rows");
  const Lookup lookup(rows.numel(), offsets, weights, table_of_feature, per_sample_weights, false, unpooled);
  TORCH_CHECK(changed.device().is_cpu() && changed.scalar_type() == at::kBool && changed.dim() == 1 &&
                  changed.numel() == lookup.ids,
              "recfx::pool_again_: changed must be bool [", lookup.ids, "] on the CPU");
  TORCH_CHECK(outputs.size() == lookup.shapes.size(), "recfx::pool_again_: the lookup has ", lookup.shapes.size(),
              " outputs, got ", outputs.size());
  for (size_t k = 0; k < outputs.size(); ++k) {
    TORCH_CHECK(outputs[k].device().is_cpu() && outputs[k].scalar_type() == at::kFloat && outputs[k].is_contiguous() &&
                    outputs[k].sizes() == at::IntArrayRef(lookup.shapes[k]),
                "recfx::pool_again_: output ", k, " must be contiguous float32 ", at::IntArrayRef(lookup.shapes[k]),
                " on the CPU");
  }
  const at::Tensor changed_contiguous = changed.contiguous();
  const bool* changed_data = changed_contiguous.const_data_ptr<bool>();
  const std::vector<float*> output_data = float_data(outputs);
  const std::vector<BagTask> tasks = tasks_of(lookup);
  run_tasks(lookup.ids, static_cast<int64_t>(tasks.size()), [&](int64_t k) {
    const BagTask& task = tasks[k];
    const auto begin = [&](int64_t bag) { return changed_data + lookup.batch.begin(task.feature, bag); };
    lookup.with_bags(task.feature, row_data, output_data, [&](const auto& bags) {
      for (int64_t bag = task.first; bag < task.last; ++bag) {
        const bool* found = std::find(begin(bag), begin(task.last), true);
        while (bag < task.last && begin(bag + 1) <= found) {
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
      "Tensor? per_sample_weights, bool unpooled=False) -> Tensor[]");
  library.def(
      "find_and_pool(Tensor ids, Tensor offsets, Tensor[] weights, int[] table_of_feature, Tensor[] slot_groups, "
      "Tensor[] side_rows, int[] dense_rows, int[] share_buckets, int[] seeds, int[] table_rows, int[] row_begins, "
      "Tensor[] locks, Tensor? per_sample_weights, bool keep_rows=True, bool unpooled=False) "
      "-> (Tensor[], Tensor, Tensor)");
  library.def(
      "pool_again_(Tensor(a!)[] outputs, Tensor rows, Tensor changed, Tensor offsets, Tensor[] weights, "
      "int[] table_of_feature, Tensor? per_sample_weights, bool unpooled=False) -> ()");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) {
  library.impl("pooled_lookup", pooled_lookup);
  library.impl("find_and_pool", find_and_pool);
  library.impl("pool_again_", pool_again_);
}

}  // namespace recfx
