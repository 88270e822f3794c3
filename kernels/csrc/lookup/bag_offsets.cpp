// Where the bags of a batch begin, and whether its lengths and ids are valid. Contract: kernels/lookup/bag_offsets.py.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <tuple>
#include <vector>

#include "build/parallel.h"

namespace recfx {
namespace {

// The same numbers as in kernels/lookup/bag_offsets.py.
enum Fault : int64_t { kNone = 0, kNegativeLength = 1, kWrongTotal = 2, kOutOfRange = 3 };

constexpr int64_t kIdsPerTask = 16384;
constexpr int64_t kIdsPerBlock = 512;
constexpr int64_t kAllInRange = std::numeric_limits<int64_t>::max();

// The position of the first of ids[begin, end) outside [0, rows), or kAllInRange. There are no branches inside a block,
// so that the compiler vectorises it; if a block is bad, it is read again.
template <typename id_t>
int64_t first_bad(const id_t* ids, int64_t begin, int64_t end, int64_t rows) {
  for (int64_t block = begin; block < end; block += kIdsPerBlock) {
    const int64_t block_end = std::min(block + kIdsPerBlock, end);
    uint64_t bad = 0;
    for (int64_t i = block; i < block_end; ++i) {
      const uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
      bad |= id | (static_cast<uint64_t>(rows) - 1 - id);  // sets the sign bit if id < 0 or id >= rows
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

// borders: where the ids of each key begin and end, ascending.
template <typename id_t>
int64_t first_bad_of_keys(const id_t* ids, const std::vector<int64_t>& borders, const int64_t* rows_per_key) {
  const int64_t keys = static_cast<int64_t>(borders.size()) - 1;
  std::atomic<int64_t> first{kAllInRange};
  parallel_for(borders.front(), borders.back(), kIdsPerTask, [&](int64_t begin, int64_t end) {
    int64_t key = std::upper_bound(borders.begin(), borders.end(), begin) - borders.begin() - 1;
    for (; key < keys && borders[key] < end; ++key) {
      if (rows_per_key[key] < 0) {
        continue;
      }
      const int64_t found =
          first_bad(ids, std::max(begin, borders[key]), std::min(end, borders[key + 1]), rows_per_key[key]);
      if (found != kAllInRange) {
        int64_t known = first.load();
        while (found < known && !first.compare_exchange_weak(known, found)) {
        }
        return;
      }
    }
  });
  return first.load();
}

struct Found {
  Fault fault;
  int64_t position;
};

// Sums lengths into offsets[0, bags]. Stops at the first that is negative or goes past the last id, so nothing
// overflows.
template <typename Length>
Found sum_lengths(const Length& length_of, int64_t bags, int64_t ids, int64_t* offsets) {
  int64_t total = 0;
  offsets[0] = 0;
  for (int64_t bag = 0; bag < bags; ++bag) {
    const int64_t length = length_of(bag);
    if (static_cast<uint64_t>(length) > static_cast<uint64_t>(ids - total)) {
      return {length < 0 ? kNegativeLength : kWrongTotal, bag};
    }
    total += length;
    offsets[bag + 1] = total;
  }
  return total == ids ? Found{kNone, 0} : Found{kWrongTotal, bags};
}

template <typename bag_t>
Found sum_bags(const bag_t* data, bool are_offsets, int64_t bags, int64_t ids, int64_t* offsets) {
  if (!are_offsets) {
    return sum_lengths([&](int64_t bag) { return static_cast<int64_t>(data[bag]); }, bags, ids, offsets);
  }
  const auto difference = [&](int64_t bag) -> int64_t {
    const int64_t begin = data[bag];
    const int64_t end = data[bag + 1];
    int64_t length;
    if (__builtin_sub_overflow(end, begin, &length)) {  // either far too long or negative
      return end > begin ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
    }
    return length;
  };
  return sum_lengths(difference, bags, ids, offsets);
}

std::tuple<at::Tensor, at::Tensor> bag_offsets(const at::Tensor& values, const at::Tensor& bags, bool are_offsets,
                                               at::IntArrayRef bags_per_key, const at::Tensor& rows_per_key) {
  const int64_t keys = rows_per_key.numel();
  TORCH_CHECK(values.device().is_cpu() && bags.device().is_cpu() && rows_per_key.device().is_cpu(),
              "recfx::bag_offsets: everything must be on the CPU");
  TORCH_CHECK(values.dim() == 1 && (values.scalar_type() == at::kLong || values.scalar_type() == at::kInt),
              "recfx::bag_offsets: values must be int64 or int32 [n]");
  TORCH_CHECK(bags.dim() == 1 && (bags.scalar_type() == at::kLong || bags.scalar_type() == at::kInt),
              "recfx::bag_offsets: bags must be int64 or int32, and one-dimensional");
  TORCH_CHECK(rows_per_key.dim() == 1 && rows_per_key.scalar_type() == at::kLong,
              "recfx::bag_offsets: rows_per_key must be int64 [F]");
  TORCH_CHECK(bags_per_key.size() == 1 || static_cast<int64_t>(bags_per_key.size()) == keys,
              "recfx::bag_offsets: bags_per_key must have 1 or ", keys, " entries, got ", bags_per_key.size());
  std::vector<int64_t> first_bag{0};
  for (int64_t key = 0; key < keys; ++key) {
    const int64_t count = bags_per_key[bags_per_key.size() == 1 ? 0 : key];
    TORCH_CHECK(count >= 0 && count <= bags.numel() - first_bag.back(),
                "recfx::bag_offsets: bags_per_key must be at least 0 "
                "and add up to the number of bags");
    first_bag.push_back(first_bag.back() + count);
  }
  const int64_t count = first_bag.back();
  TORCH_CHECK(bags.numel() == count + (are_offsets ? 1 : 0),
              "recfx::bag_offsets: bags_per_key must add up to the bags: ", count, ", but there are ", bags.numel(),
              are_offsets ? " offsets" : " lengths");
  const at::Tensor values_contiguous = values.contiguous();
  const at::Tensor bags_contiguous = bags.contiguous();
  const at::Tensor rows_contiguous = rows_per_key.contiguous();
  const int64_t ids = values.numel();

  at::Tensor offsets_tensor = at::empty({count + 1}, rows_per_key.options());
  int64_t* offsets = offsets_tensor.mutable_data_ptr<int64_t>();
  Found found = bags.scalar_type() == at::kLong
                    ? sum_bags(bags_contiguous.const_data_ptr<int64_t>(), are_offsets, count, ids, offsets)
                    : sum_bags(bags_contiguous.const_data_ptr<int32_t>(), are_offsets, count, ids, offsets);
  if (found.fault != kNone) {
    std::fill(offsets, offsets + count + 1, 0);
  } else {
    std::vector<int64_t> borders;
    for (const int64_t bag : first_bag) {
      borders.push_back(offsets[bag]);
    }
    const int64_t* rows = rows_contiguous.const_data_ptr<int64_t>();
    const int64_t first = values.scalar_type() == at::kLong
                              ? first_bad_of_keys(values_contiguous.const_data_ptr<int64_t>(), borders, rows)
                              : first_bad_of_keys(values_contiguous.const_data_ptr<int32_t>(), borders, rows);
    if (first != kAllInRange) {
      found = {kOutOfRange, first};
    }
  }
  at::Tensor fault = at::empty({2}, rows_per_key.options());
  fault.mutable_data_ptr<int64_t>()[0] = found.fault;
  fault.mutable_data_ptr<int64_t>()[1] = found.position;
  return {offsets_tensor, fault};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def(
      "bag_offsets(Tensor values, Tensor bags, bool are_offsets, int[] bags_per_key, Tensor rows_per_key) -> "
      "(Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) { library.impl("bag_offsets", bag_offsets); }

}  // namespace recfx
