// The gradient of pooled lookups with respect to their per-sample weights. Contract:
// kernels/lookup/per_sample_weights.py.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "build/tasks.h"
#include "build/vector_paths.h"
#include "lookup/bag_tasks.h"
#include "lookup/lookup_checks.h"
#include "lookup/pool.h"
#include "lookup/row_values.h"

namespace recfx {
namespace {

// The sum of products, in 16 interleaved sums that are then added pairwise, whatever the machine's vectors.
template <int native, typename weight_t>
RECFX_INLINE float dot(const weight_t* row, const float* gradient, int64_t dim) {
  constexpr int kSums = 16;
  typename Vectors<native>::Floats parts[kSums / native] = {};  // in registers: loops over it are unrolled
  int64_t j = 0;
  for (; j + kSums <= dim; j += kSums) {
#pragma GCC unroll 4
    for (int part = 0; part < kSums / native; ++part) {
      typename Vectors<native>::Floats values, gradients;
      load<native>(row + j + part * native, values);
      load<native>(gradient + j + part * native, gradients);
      parts[part] += values * gradients;
    }
  }
  float sums[kSums];
  std::memcpy(sums, parts, sizeof(sums));
  for (int k = 0; j < dim; ++j, ++k) {
    Vectors<1>::Floats value;
    load<1>(row + j, value);
    sums[k] += value[0] * gradient[j];
  }
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) {
      sums[k] += sums[k + half];
    }
  }
  return sums[0];
}

template <int native, typename weight_t>
RECFX_INLINE void products_of_bags(const weight_t* weight, int64_t dim, const int64_t* rows, const int64_t* offsets,
                                   int64_t first, int64_t last, const float* gradients, int64_t columns, float* found) {
  const int64_t last_id = offsets[last] - 1;
  for (int64_t bag = first; bag < last; ++bag) {
    for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
      fetch_row(weight + std::max<int64_t>(rows[std::min(i + kWideAhead, last_id)], 0) * dim, dim);
      found[i] = rows[i] < 0 ? 0.0F : dot<native>(weight + rows[i] * dim, gradients + bag * columns, dim);
    }
  }
}

at::Tensor per_sample_weight_gradients(const at::Tensor& rows, const at::Tensor& offsets, const at::Tensor& gradients,
                                       at::TensorList weights, at::IntArrayRef table_of_feature) {
  const at::Tensor rows_contiguous = rows.contiguous(), offsets_contiguous = offsets.contiguous();
  const int64_t* row_data = int64_data(rows_contiguous, "rows");
  const int64_t* offset_data = int64_data(offsets_contiguous, "offsets");
  const auto features = static_cast<int64_t>(table_of_feature.size());
  const int64_t batch_size = checked_batch_size(offsets_contiguous, features, rows.numel());
  check_weights(weights);
  const std::vector<int64_t> first_columns = checked_columns(weights, table_of_feature);
  check_gradients(gradients, batch_size, first_columns.back());
  at::Tensor found = at::zeros({rows.numel()}, at::TensorOptions().dtype(at::kFloat));
  float* found_data = found.data_ptr<float>();
  std::vector<BagTask> tasks;
  for (int64_t feature = 0; feature < features; ++feature) {
    add_bag_tasks(feature, offset_data + feature * batch_size, batch_size, kIdsPerTask, tasks);
  }
  std::atomic<bool> is_wrong{false};
  const auto largest_row = [&](const BagTask& task) {
    const int64_t* bags = offset_data + task.feature * batch_size;
    const int64_t* end = row_data + bags[task.last];
    const int64_t* largest = std::max_element(row_data + bags[task.first], end);
    return largest == end ? -1 : *largest;
  };
  run_tasks(rows.numel(), static_cast<int64_t>(tasks.size()), [&](int64_t k) {
    const BagTask& task = tasks[k];
    const at::Tensor& weight = weights[table_of_feature[task.feature]];
    if (largest_row(task) >= weight.size(0)) {
      is_wrong = true;
      return;
    }
    const auto run = [&](const auto* data) {
      on_widest_vectors([&](auto native) RECFX_INLINE_LAMBDA {
        products_of_bags<native.value>(
            data, weight.size(1), row_data, offset_data + task.feature * batch_size, task.first, task.last,
            gradients.const_data_ptr<float>() + first_columns[task.feature], gradients.size(1), found_data);
      });
    };
    switch (weight.scalar_type()) {
      case at::kFloat:
        return run(static_cast<const float*>(weight.const_data_ptr()));
      case at::kHalf:
        return run(static_cast<const uint16_t*>(weight.const_data_ptr()));
      default:
        return run(static_cast<const BFloat16*>(weight.const_data_ptr()));
    }
  });
  for (size_t k = 0; is_wrong && k < tasks.size(); ++k) {
    const int64_t table = table_of_feature[tasks[k].feature];
    if (largest_row(tasks[k]) >= weights[table].size(0)) {
      refuse_row("per_sample_weight_gradients", largest_row(tasks[k]), table, weights[table].size(0));
    }
  }
  return found;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def(
      "per_sample_weight_gradients(Tensor rows, Tensor offsets, Tensor gradients, Tensor[] weights, "
      "int[] table_of_feature) -> Tensor");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) { library.impl("per_sample_weight_gradients", per_sample_weight_gradients); }

}  // namespace recfx
