// Initial weights of new rows. Contract: kernels/step/row_initialization.py; the reference in ATen gives the same bits.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>

#include "build/parallel.h"
#include "index/mix64.h"

namespace recfx {
namespace {

template <typename weight_t>
void fill_row(weight_t* row, int64_t dim, uint64_t mixed_id, uint64_t first_column, float low, float span) {
  for (int64_t j = 0; j < dim; ++j) {
    const uint64_t bits = mix64(mixed_id + (first_column + static_cast<uint64_t>(j) + 1) * 0x9E3779B97F4A7C15ULL);
    const float uniform = static_cast<float>(static_cast<int32_t>(bits >> 40)) * 0x1p-24f;
    row[j] = static_cast<weight_t>(low + span * uniform);  // built with -ffp-contract=off: two roundings, as in ATen
  }
}

void init_rows_(const at::Tensor& weight, const at::Tensor& rows, const at::Tensor& ids, int64_t key, double low,
                double high, int64_t first_column) {
  TORCH_CHECK(weight.device().is_cpu() && rows.device().is_cpu() && ids.device().is_cpu(),
              "recfx::init_rows_: weight, rows and ids must be on the CPU");
  TORCH_CHECK(weight.dim() == 2 && weight.stride(1) == 1,
              "recfx::init_rows_: weight must be [rows, dim], with contiguous rows");
  TORCH_CHECK(rows.dim() == 1 && ids.dim() == 1 && rows.numel() == ids.numel() && rows.scalar_type() == at::kLong &&
                  ids.scalar_type() == at::kLong,
              "recfx::init_rows_: rows and ids must be int64 [n], got ", rows.sizes(), " and ", ids.sizes());
  TORCH_CHECK(first_column >= 0, "recfx::init_rows_: first_column must not be negative, got ", first_column);
  const at::Tensor rows_contiguous = rows.contiguous();
  const at::Tensor ids_contiguous = ids.contiguous();
  const int64_t* row_data = rows_contiguous.const_data_ptr<int64_t>();
  const int64_t* id_data = ids_contiguous.const_data_ptr<int64_t>();
  const int64_t count = rows.numel();
  const int64_t dim = weight.size(1);
  const int64_t stride = weight.stride(0);
  for (int64_t i = 0; i < count; ++i) {  // before anything is written
    TORCH_CHECK(row_data[i] >= 0 && row_data[i] < weight.size(0), "recfx::init_rows_: row ", row_data[i],
                " is outside a weight of ", weight.size(0), " rows");
  }
  const float low_float = static_cast<float>(low);
  const float span = static_cast<float>(high) - low_float;
  const int64_t rows_per_task = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, dim));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, weight.scalar_type(), "recfx::init_rows_", [&] {
    scalar_t* data = static_cast<scalar_t*>(weight.data_ptr());
    parallel_for(0, count, rows_per_task, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint64_t mixed_id = mix64(static_cast<uint64_t>(id_data[i]) ^ static_cast<uint64_t>(key));
        fill_row(data + row_data[i] * stride, dim, mixed_id, static_cast<uint64_t>(first_column), low_float, span);
      }
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def(
      "init_rows_(Tensor(a!) weight, Tensor rows, Tensor ids, int key, float low, float high, int first_column=0) -> "
      "()");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) { library.impl("init_rows_", init_rows_); }

}  // namespace recfx
