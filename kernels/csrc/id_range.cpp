// The range check of ids that go into a table without looking at an index. Contract and reference: kernels/id_range.py.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>

namespace recfx {
namespace {

constexpr int64_t kIdsPerTask = 16384;
constexpr int64_t kIdsPerBlock = 512;
constexpr int64_t kAllInRange = std::numeric_limits<int64_t>::max();

// Position of the first of ids[begin, end) outside [0, rows), or kAllInRange. The blocks have no branch inside, so that
// the compiler vectorises them; the bad block, if there is one, is read again.
template <typename id_t>
int64_t first_bad(const id_t* ids, int64_t begin, int64_t end, int64_t rows) {
  for (int64_t block = begin; block < end; block += kIdsPerBlock) {
    const int64_t block_end = std::min(block + kIdsPerBlock, end);
    uint64_t bad = 0;
    for (int64_t i = block; i < block_end; ++i) {
      const uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
      bad |= id | (static_cast<uint64_t>(rows) - 1 - id);  // sign bit set where id < 0 or, failing that, id >= rows
    }
    if (bad >> 63) {
      for (int64_t i = block; i < block_end; ++i) {
        if (ids[i] < 0 || ids[i] >= rows) {
          return i;
        }
      }
    }
  }
  return kAllInRange;
}

template <typename id_t>
int64_t first_bad_of_keys(const id_t* ids, const int64_t* offsets, const int64_t* rows_per_key, int64_t keys) {
  std::atomic<int64_t> first{kAllInRange};
  at::parallel_for(offsets[0], offsets[keys], kIdsPerTask, [&](int64_t begin, int64_t end) {
    int64_t key = std::upper_bound(offsets, offsets + keys + 1, begin) - offsets - 1;
    for (; key < keys && offsets[key] < end; ++key) {
      if (rows_per_key[key] < 0) {
        continue;
      }
      const int64_t found =
          first_bad(ids, std::max(begin, offsets[key]), std::min(end, offsets[key + 1]), rows_per_key[key]);
      if (found != kAllInRange) {
        int64_t known = first.load();
        while (found < known && !first.compare_exchange_weak(known, found)) {
        }
        return;
      }
    }
  });
  const int64_t result = first.load();
  return result == kAllInRange ? -1 : result;
}

at::Tensor first_out_of_range(const at::Tensor& values, const at::Tensor& key_offsets, const at::Tensor& rows_per_key) {
  const int64_t keys = rows_per_key.numel();
  TORCH_CHECK(values.device().is_cpu() && key_offsets.device().is_cpu() && rows_per_key.device().is_cpu(),
              "recfx::first_out_of_range: everything must be on the CPU");
  TORCH_CHECK(values.dim() == 1 && (values.scalar_type() == at::kLong || values.scalar_type() == at::kInt),
              "recfx::first_out_of_range: values must be int64 or int32 [n]");
  TORCH_CHECK(key_offsets.dim() == 1 && rows_per_key.dim() == 1 && key_offsets.numel() == keys + 1 &&
                  key_offsets.scalar_type() == at::kLong && rows_per_key.scalar_type() == at::kLong,
              "recfx::first_out_of_range: key_offsets must be int64 [F+1] and rows_per_key int64 [F], got ",
              key_offsets.sizes(), " and ", rows_per_key.sizes());
  const at::Tensor values_contiguous = values.contiguous();
  const at::Tensor offsets_contiguous = key_offsets.contiguous();
  const at::Tensor rows_contiguous = rows_per_key.contiguous();
  const int64_t* offsets = offsets_contiguous.const_data_ptr<int64_t>();
  TORCH_CHECK(offsets[0] >= 0 && offsets[keys] <= values.numel() && std::is_sorted(offsets, offsets + keys + 1),
              "recfx::first_out_of_range: key_offsets must ascend within the ", values.numel(), " values");
  const int64_t* rows = rows_contiguous.const_data_ptr<int64_t>();
  const int64_t first = values.scalar_type() == at::kLong
      ? first_bad_of_keys(values_contiguous.const_data_ptr<int64_t>(), offsets, rows, keys)
      : first_bad_of_keys(values_contiguous.const_data_ptr<int32_t>(), offsets, rows, keys);
  at::Tensor result = at::empty({}, key_offsets.options());
  *static_cast<int64_t*>(result.data_ptr()) = first;
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def("first_out_of_range(Tensor values, Tensor key_offsets, Tensor rows_per_key) -> Tensor");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) {
  library.impl("first_out_of_range", first_out_of_range);
}

}  // namespace recfx
