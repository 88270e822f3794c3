// Checks the arguments that operators on pooled lookups share.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "index/checks.h"

namespace recfx {

// Kernels take tables of these dtypes. Those of one lookup have the same.
inline bool is_weight_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

inline void check_weights(at::TensorList weights) {
  TORCH_CHECK(!weights.empty(), "recfx: there are no weights");
  for (const at::Tensor& weight : weights) {
    TORCH_CHECK(weight.device().is_cpu() && weight.dim() == 2 && weight.is_contiguous() &&
                    weight.scalar_type() == weights[0].scalar_type() && is_weight_dtype(weight.scalar_type()),
                "recfx: weights must be contiguous [rows, dim] on the CPU, all float32, float16 or bfloat16");
  }
}

// Returns the batch size. offsets: contiguous int64 [F * B + 1].
inline int64_t checked_batch_size(const at::Tensor& offsets, int64_t features, int64_t ids) {
  const int64_t* data = int64_data(offsets, "offsets");
  TORCH_CHECK(features > 0 && offsets.numel() > 0 && (offsets.numel() - 1) % features == 0,
              "recfx: offsets must be [F * B + 1] for ", features, " features, got ", offsets.sizes());
  TORCH_CHECK(*data >= 0 && data[offsets.numel() - 1] <= ids && std::is_sorted(data, data + offsets.numel()),
              "recfx: offsets must ascend within the ", ids, " ids");
  return (offsets.numel() - 1) / features;
}

// Checks a lookup that does not pool: each id has a row of the output.
inline void check_unpooled(const at::Tensor& offsets, int64_t features, int64_t ids, bool mean, bool is_scaled) {
  const int64_t* data = offsets.const_data_ptr<int64_t>();
  TORCH_CHECK(offsets.numel() == features + 1 && data[0] == 0 && data[features] == ids,
              "recfx: without pooling, offsets must be [F + 1], from 0 to the ", ids, " ids, for ", features,
              " features, got ", offsets.sizes());
  TORCH_CHECK(!mean && !is_scaled, "recfx: without pooling, there are neither means nor per_sample_weights");
}

inline int64_t widest_of(at::TensorList weights) {
  int64_t widest = 0;
  for (const at::Tensor& weight : weights) {
    widest = std::max(widest, weight.size(1));
  }
  return widest;
}

// Where the columns of each feature begin, and their number: [F + 1].
inline std::vector<int64_t> checked_columns(at::TensorList weights, at::IntArrayRef table_of_feature) {
  std::vector<int64_t> first{0};
  for (const int64_t table : table_of_feature) {
    TORCH_CHECK(0 <= table && table < static_cast<int64_t>(weights.size()), "recfx: there is no table ", table);
    first.push_back(first.back() + weights[table].size(1));
  }
  return first;
}

inline void check_gradients(const at::Tensor& gradients, int64_t rows, int64_t columns) {
  TORCH_CHECK(gradients.device().is_cpu() && gradients.scalar_type() == at::kFloat && gradients.is_contiguous() &&
                  gradients.dim() == 2 && gradients.size(0) == rows && gradients.size(1) == columns,
              "recfx: gradients must be contiguous float32 [", rows, ", ", columns, "] on the CPU, got ",
              gradients.sizes());
}

inline void check_per_sample_weights(const at::Tensor& given, int64_t ids, bool mean) {
  TORCH_CHECK(given.device().is_cpu() && given.scalar_type() == at::kFloat && given.dim() == 1 && given.numel() == ids,
              "recfx: per_sample_weights must be float32 [", ids, "] on the CPU");
  TORCH_CHECK(!mean, "recfx: per_sample_weights are for sums, not for means");
}

// A row that was looked up, and that the table does not have (any more). IndexError in Python, which knows the names.
[[noreturn]] inline void refuse_row(const char* name, int64_t row, int64_t table, int64_t rows) {
  TORCH_CHECK_INDEX(false, "recfx::", name, ": row ", row, " is beyond the end of table ", table, ", which has ", rows,
                    " rows");
}

}  // namespace recfx
