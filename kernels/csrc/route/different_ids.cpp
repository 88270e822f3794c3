// The different ids of each key of a batch, and sums of the rows that belong to the same one. Contract:
// kernels/route/different_ids.py. What is written does not depend on the number of threads.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "build/parallel.h"
#include "index/slot_hash.h"

namespace recfx {
namespace {

constexpr int64_t kRowsPerTask = 1024;
constexpr int64_t kEmpty = -1;

// With a seed that whoever chooses the ids does not know. What is found does not depend on it.
const SeededHash& hash_of_process() {
  static const SeededHash hash(static_cast<int64_t>(uint64_t{std::random_device()()} << 32 | std::random_device()()));
  return hash;
}

// One key: an open table of the places of its different ids, at most half full.
int64_t find_first(const int64_t* ids, int64_t count, bool* is_first, int64_t* numbers) {
  const SeededHash hash = hash_of_process();
  const uint64_t slots = std::bit_ceil(2 * static_cast<uint64_t>(count));
  std::vector<int64_t> place_in(slots, kEmpty);
  int64_t different = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t slot = hash.place(ids[i], slots);
    while (place_in[slot] != kEmpty && ids[place_in[slot]] != ids[i]) {
      slot = (slot + 1) & (slots - 1);
    }
    is_first[i] = place_in[slot] == kEmpty;
    if (is_first[i]) {
      place_in[slot] = i;
      numbers[i] = different++;
    } else {
      numbers[i] = numbers[place_in[slot]];
    }
  }
  return different;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> different_ids(const at::Tensor& ids, at::IntArrayRef ids_per_key,
                                                             c10::List<bool> chosen_keys) {
  const std::vector<bool> chosen = chosen_keys.vec();
  TORCH_CHECK(ids.device().is_cpu() && ids.dim() == 1 && ids.scalar_type() == at::kLong,
              "recfx::different_ids: ids must be int64 [n], on the CPU");
  TORCH_CHECK(chosen.size() == ids_per_key.size(), "recfx::different_ids: there are ", ids_per_key.size(),
              " keys, but it is said of ", chosen.size(), " whether their ids are compared");
  const int64_t keys = static_cast<int64_t>(ids_per_key.size());
  std::vector<int64_t> begins{0};
  for (const int64_t count : ids_per_key) {
    TORCH_CHECK(count >= 0 && count <= ids.numel() - begins.back(),
                "recfx::different_ids: ids_per_key must be at least 0 and add up to the ids");
    begins.push_back(begins.back() + count);
  }
  TORCH_CHECK(begins.back() == ids.numel(), "recfx::different_ids: ids_per_key add up to ", begins.back(),
              ", but there are ", ids.numel(), " ids");
  const at::Tensor contiguous = ids.contiguous();
  const int64_t* all_ids = contiguous.const_data_ptr<int64_t>();
  at::Tensor is_first = at::empty({ids.numel()}, ids.options().dtype(at::kBool));
  at::Tensor numbers = at::empty({ids.numel()}, ids.options());
  at::Tensor different = at::empty({keys}, ids.options());
  bool* first = is_first.mutable_data_ptr<bool>();
  int64_t* number = numbers.mutable_data_ptr<int64_t>();
  int64_t* counted = different.mutable_data_ptr<int64_t>();
  parallel_for_each(keys, [&](int64_t key) {
    const int64_t start = begins[key];
    const int64_t count = ids_per_key[key];
    if (chosen[key]) {
      counted[key] = find_first(all_ids + start, count, first + start, number + start);
      return;
    }
    std::fill(first + start, first + start + count, true);
    std::iota(number + start, number + start + count, 0);
    counted[key] = count;
  });
  return {is_first, numbers, different};
}

at::Tensor sum_rows(const at::Tensor& rows, const at::Tensor& places, int64_t count) {
  TORCH_CHECK(rows.device().is_cpu() && rows.dim() == 2 && rows.scalar_type() == at::kFloat,
              "recfx::sum_rows: rows must be float32 [n, D], on the CPU");
  TORCH_CHECK(places.device().is_cpu() && places.dim() == 1 && places.scalar_type() == at::kLong &&
                  places.numel() == rows.size(0) && count >= 0,
              "recfx::sum_rows: places must be int64 [", rows.size(0), "], on the CPU");
  const at::Tensor places_contiguous = places.contiguous();
  const at::Tensor rows_contiguous = rows.contiguous();
  const int64_t* place = places_contiguous.const_data_ptr<int64_t>();
  const float* row = rows_contiguous.const_data_ptr<float>();
  const int64_t n = rows.size(0);
  const int64_t dim = rows.size(1);
  // Where the rows of each place begin, once they are in the order of places.
  std::vector<int64_t> begins(count + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK(0 <= place[i] && place[i] < count, "recfx::sum_rows: place ", place[i], " is outside 0 to ", count - 1);
    ++begins[place[i] + 1];
  }
  for (int64_t to = 0; to < count; ++to) {
    begins[to + 1] += begins[to];
  }
  std::vector<int64_t> order(n);
  std::vector<int64_t> next(begins.begin(), begins.end() - 1);
  for (int64_t i = 0; i < n; ++i) {
    order[next[place[i]]++] = i;
  }
  at::Tensor sums = at::zeros({count, dim}, rows.options());
  float* sum = sums.mutable_data_ptr<float>();
  parallel_for(0, count, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t to = begin; to < end; ++to) {
      float* own = sum + to * dim;
      for (int64_t k = begins[to]; k < begins[to + 1]; ++k) {
        const float* added = row + order[k] * dim;
        for (int64_t column = 0; column < dim; ++column) {
          own[column] += added[column];
        }
      }
    }
  });
  return sums;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def("different_ids(Tensor ids, int[] ids_per_key, bool[] chosen) -> (Tensor, Tensor, Tensor)");
  library.def("sum_rows(Tensor rows, Tensor places, int count) -> Tensor");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) {
  library.impl("different_ids", different_ids);
  library.impl("sum_rows", sum_rows);
}

}  // namespace recfx
