// The operators of the hash index. Contract, and a reference in ATen: kernels/hash_index.py.
//
// Determinism: reads run on all threads and touch nothing; whatever changes the index runs on one thread, in the order
// of the ids.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>
#include <vector>

#include "checks.h"
#include "find.h"
#include "free_rows.h"
#include "mix64.h"
#include "slot_table.h"

namespace recfx {
namespace {

constexpr int64_t kIdsPerTask = 2048;

// Everything that an index is made of: views of the buffers that HashIndex owns.
struct Index {
  SlotTable table;
  int64_t* row_ids;
  uint8_t* row_state;
  FreeRows free_rows;
  int64_t* bucket_taken;
  int64_t rows;
  int64_t dense_rows;
  int64_t buckets;
  uint64_t mixed_seed;

  Index(const at::Tensor& slots, const at::Tensor& side_row, const at::Tensor& row_ids_tensor,
        const at::Tensor& row_state_tensor, const at::Tensor& free_rows_tensor, const at::Tensor& bucket_taken_tensor,
        int64_t dense_rows, int64_t seed)
      : table(slot_table(slots, side_row)),
        row_ids(int64_data(row_ids_tensor, "row_ids")),
        row_state(static_cast<uint8_t*>(row_state_tensor.data_ptr())),
        free_rows(reinterpret_cast<uint64_t*>(int64_data(free_rows_tensor, "free_rows")), row_ids_tensor.numel()),
        bucket_taken(int64_data(bucket_taken_tensor, "bucket_taken")),
        rows(row_ids_tensor.numel()),
        dense_rows(dense_rows),
        buckets(bucket_taken_tensor.numel()),
        mixed_seed(mix64(static_cast<uint64_t>(seed))) {
    TORCH_CHECK(row_state_tensor.device().is_cpu() && row_state_tensor.scalar_type() == at::kByte &&
                    row_state_tensor.dim() == 1 && row_state_tensor.is_contiguous() &&
                    row_state_tensor.numel() == rows,
                "recfx: row_state must be uint8 [", rows, "] on the CPU, as long as row_ids");
    TORCH_CHECK(free_rows_tensor.numel() == free_rows.total_words(), "recfx: free_rows must hold ",
                free_rows.total_words(), " words for ", rows, " rows, got ", free_rows_tensor.numel());
    TORCH_CHECK(dense_rows >= 0 && dense_rows < rows, "recfx: dense_rows must be in [0, ", rows, "), got ", dense_rows);
    TORCH_CHECK(buckets >= 1 && buckets <= rows - dense_rows, "recfx: there must be 1 to ", rows - dense_rows,
                " buckets, got ", buckets);
    TORCH_CHECK(slots.size(0) > rows - dense_rows, "recfx: there must be more slots than rows, got ", slots.size(0),
                " slots for ", rows - dense_rows, " rows");
  }

  bool is_dense(int64_t id) const {
    return id >= 0 && id < dense_rows;
  }
  int64_t bucket_of(int64_t id) const {
    return mixed_modulo(id, mixed_seed, buckets);
  }
  int64_t bucket_begin(int64_t bucket) const {
    return dense_rows + bucket * (rows - dense_rows) / buckets;
  }

  void put(int64_t id, int64_t row, int64_t bucket) {
    table.insert(id, row);
    row_ids[row] = id;
    row_state[row] = 1;
    free_rows.take(row);
    ++bucket_taken[bucket];
  }

  // The row that the id had, or -1.
  int64_t remove(int64_t id) {
    const int64_t row = table.erase(id);
    if (row != kNoRow) {
      row_ids[row] = kEmptyId;
      row_state[row] = 0;
      free_rows.give_back(row);
      --bucket_taken[bucket_of(id)];
    }
    return row;
  }
};

at::Tensor find(const at::Tensor& ids, const at::Tensor& slots, const at::Tensor& side_row, int64_t dense_rows) {
  const at::Tensor ids_contiguous = ids.contiguous();
  const int64_t* id_data = int64_data(ids_contiguous, "ids");
  const SlotTable table = slot_table(slots, side_row);
  at::Tensor rows = at::empty(ids.sizes(), at::TensorOptions().dtype(at::kLong));
  int64_t* row_data = static_cast<int64_t*>(rows.data_ptr());
  at::parallel_for(0, ids.numel(), kIdsPerTask, [&](int64_t begin, int64_t end) {
    find_range(id_data, row_data, begin, end, table, dense_rows);
  });
  return rows;
}

// All tables of a collection in one parallel region: a region a table would wait for its slowest thread once a table.
// -> rows, absent [tables]
std::tuple<at::Tensor, at::Tensor> find_tables(const at::Tensor& ids, at::IntArrayRef begins, at::IntArrayRef ends,
                                               at::TensorList slots, at::TensorList side_rows,
                                               at::IntArrayRef dense_rows) {
  const size_t tables = begins.size();
  TORCH_CHECK(ends.size() == tables && slots.size() == tables && side_rows.size() == tables &&
                  dense_rows.size() == tables,
              "recfx: find_tables needs one entry a table in every list");
  const at::Tensor ids_contiguous = ids.contiguous();
  const int64_t* id_data = int64_data(ids_contiguous, "ids");
  at::Tensor rows = ids_contiguous.clone();
  int64_t* row_data = static_cast<int64_t*>(rows.data_ptr());
  at::Tensor absent = at::zeros({static_cast<int64_t>(tables)}, at::TensorOptions().dtype(at::kLong));

  struct Task {
    size_t table;
    int64_t begin;
    int64_t end;
    int64_t absent;
  };
  std::vector<SlotTable> views;
  std::vector<Task> tasks;
  for (size_t t = 0; t < tables; ++t) {
    TORCH_CHECK(0 <= begins[t] && begins[t] <= ends[t] && ends[t] <= ids.numel(), "recfx: table ", t, " has ids ",
                begins[t], " to ", ends[t], " of ", ids.numel());
    views.push_back(slot_table(slots[t], side_rows[t]));
    for (int64_t begin = begins[t]; begin < ends[t]; begin += kIdsPerTask) {
      tasks.push_back({t, begin, std::min(begin + kIdsPerTask, ends[t]), 0});
    }
  }
  at::parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      Task& task = tasks[k];
      find_range(id_data, row_data, task.begin, task.end, views[task.table], dense_rows[task.table]);
      for (int64_t i = task.begin; i < task.end; ++i) {
        task.absent += row_data[i] == kNoRow;
      }
    }
  });
  int64_t* absent_data = static_cast<int64_t*>(absent.data_ptr());
  for (const Task& task : tasks) {
    absent_data[task.table] += task.absent;
  }
  return {rows, absent};
}

// -> rows, new_rows, status [2] = (bucket that is full or -1, answers shared)
std::tuple<at::Tensor, at::Tensor, at::Tensor> find_or_insert(
    const at::Tensor& ids, const at::Tensor& slots, const at::Tensor& side_row, const at::Tensor& row_ids,
    const at::Tensor& row_state, const at::Tensor& free_rows, const at::Tensor& bucket_taken, int64_t dense_rows,
    int64_t seed, bool share) {
  Index index(slots, side_row, row_ids, row_state, free_rows, bucket_taken, dense_rows, seed);
  const at::Tensor ids_contiguous = ids.contiguous();
  const int64_t* id_data = int64_data(ids_contiguous, "ids");
  at::Tensor rows = find(ids_contiguous, slots, side_row, dense_rows);
  int64_t* row_data = static_cast<int64_t*>(rows.data_ptr());

  std::vector<int64_t> missing;  // positions
  for (int64_t i = 0; i < rows.numel(); ++i) {
    if (row_data[i] == kNoRow) {
      missing.push_back(i);
    }
  }

  const uint64_t mixed_share_seed = mix64(static_cast<uint64_t>(seed) + 1);
  std::vector<int64_t> new_rows;
  int64_t full_bucket = -1;
  int64_t shared = 0;
  for (size_t m = 0; m < missing.size(); ++m) {
    if (m + kLookahead < missing.size()) {
      index.table.prefetch(index.table.home(id_data[missing[m + kLookahead]]));
    }
    const int64_t id = id_data[missing[m]];
    int64_t row = index.table.find(id);  // an earlier one of this batch may have put it there
    if (row == kNoRow) {
      const int64_t bucket = index.bucket_of(id);
      const int64_t begin = index.bucket_begin(bucket);
      const int64_t end = index.bucket_begin(bucket + 1);
      row = index.free_rows.lowest(begin, end);
      if (row != kNoRow) {
        index.put(id, row, bucket);
        new_rows.push_back(row);
      } else if (share) {
        row = begin + mixed_modulo(id, mixed_share_seed, end - begin);
        ++shared;
      } else {
        full_bucket = bucket;
        break;
      }
    }
    row_data[missing[m]] = row;
  }

  if (full_bucket >= 0) {
    for (auto row = new_rows.rbegin(); row != new_rows.rend(); ++row) {
      index.remove(index.row_ids[*row]);
    }
    new_rows.clear();
    rows.fill_(kNoRow);
  }
  at::Tensor new_rows_tensor = at::empty({static_cast<int64_t>(new_rows.size())}, rows.options());
  std::copy(new_rows.begin(), new_rows.end(), static_cast<int64_t*>(new_rows_tensor.data_ptr()));
  at::Tensor status = at::empty({2}, rows.options());
  static_cast<int64_t*>(status.data_ptr())[0] = full_bucket;
  static_cast<int64_t*>(status.data_ptr())[1] = shared;
  return {rows, new_rows_tensor, status};
}

// -> the rows that the ids had, -1 where there was none
at::Tensor erase(const at::Tensor& ids, const at::Tensor& slots, const at::Tensor& side_row, const at::Tensor& row_ids,
                 const at::Tensor& row_state, const at::Tensor& free_rows, const at::Tensor& bucket_taken,
                 int64_t dense_rows, int64_t seed) {
  Index index(slots, side_row, row_ids, row_state, free_rows, bucket_taken, dense_rows, seed);
  const at::Tensor ids_contiguous = ids.contiguous();
  const int64_t* id_data = int64_data(ids_contiguous, "ids");
  at::Tensor rows = at::empty(ids.sizes(), at::TensorOptions().dtype(at::kLong));
  int64_t* row_data = static_cast<int64_t*>(rows.data_ptr());
  const int64_t count = ids.numel();
  for (int64_t i = 0; i < count; ++i) {
    if (i + kLookahead < count) {
      index.table.prefetch(index.table.home(id_data[i + kLookahead]));
    }
    row_data[i] = index.is_dense(id_data[i]) ? kNoRow : index.remove(id_data[i]);
  }
  return rows;
}

// The same numbers stand in kernels/hash_index.py.
enum class Problem : int64_t { kNone, kUnknownState, kDenseRow, kDenseId, kWrongBucket, kDuplicateId };

// Fills slots, side_row, free_rows and bucket_taken from row_ids and row_state -> [2] = (problem, lowest row with one)
at::Tensor rebuild(const at::Tensor& slots, const at::Tensor& side_row, const at::Tensor& row_ids,
                   const at::Tensor& row_state, const at::Tensor& free_rows, const at::Tensor& bucket_taken,
                   int64_t dense_rows, int64_t seed) {
  Index index(slots, side_row, row_ids, row_state, free_rows, bucket_taken, dense_rows, seed);
  slots.fill_(-1);
  side_row.fill_(-1);
  free_rows.fill_(0);
  bucket_taken.fill_(0);
  Problem problem = Problem::kNone;
  int64_t problem_row = -1;
  int64_t bucket = 0;  // that the row is in
  for (int64_t row = 0; row < index.rows; ++row) {
    if (row + kLookahead < index.rows && index.row_state[row + kLookahead] != 0) {
      index.table.prefetch(index.table.home(index.row_ids[row + kLookahead]));
    }
    const uint8_t state = index.row_state[row];
    const int64_t id = index.row_ids[row];
    if (row >= dense_rows) {
      while (row >= index.bucket_begin(bucket + 1)) {
        ++bucket;
      }
    }
    if (state == 0) {
      if (row >= dense_rows) {
        index.free_rows.give_back(row);
      }
      continue;
    }
    if (state != 1) {
      problem = Problem::kUnknownState;
    } else if (row < dense_rows) {
      problem = Problem::kDenseRow;
    } else if (index.is_dense(id)) {
      problem = Problem::kDenseId;
    } else if (index.bucket_of(id) != bucket) {
      problem = Problem::kWrongBucket;
    } else if (index.table.find(id) != kNoRow) {
      problem = Problem::kDuplicateId;
    } else {
      index.table.insert(id, row);
      ++index.bucket_taken[bucket];
      continue;
    }
    problem_row = row;
    break;
  }
  at::Tensor status = at::empty({2}, row_ids.options());
  static_cast<int64_t*>(status.data_ptr())[0] = static_cast<int64_t>(problem);
  static_cast<int64_t*>(status.data_ptr())[1] = problem_row;
  return status;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def("find(Tensor ids, Tensor slots, Tensor side_row, int dense_rows) -> Tensor");
  library.def(
      "find_tables(Tensor ids, int[] begins, int[] ends, Tensor[] slots, Tensor[] side_rows, int[] dense_rows) "
      "-> (Tensor, Tensor)");
  library.def(
      "find_or_insert(Tensor ids, Tensor(a!) slots, Tensor(b!) side_row, Tensor(c!) row_ids, Tensor(d!) row_state, "
      "Tensor(e!) free_rows, Tensor(f!) bucket_taken, int dense_rows, int seed, bool share) "
      "-> (Tensor, Tensor, Tensor)");
  library.def(
      "erase(Tensor ids, Tensor(a!) slots, Tensor(b!) side_row, Tensor(c!) row_ids, Tensor(d!) row_state, "
      "Tensor(e!) free_rows, Tensor(f!) bucket_taken, int dense_rows, int seed) -> Tensor");
  library.def(
      "rebuild(Tensor(a!) slots, Tensor(b!) side_row, Tensor row_ids, Tensor row_state, Tensor(c!) free_rows, "
      "Tensor(d!) bucket_taken, int dense_rows, int seed) -> Tensor");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) {
  library.impl("find", find);
  library.impl("find_tables", find_tables);
  library.impl("find_or_insert", find_or_insert);
  library.impl("erase", erase);
  library.impl("rebuild", rebuild);
}

}  // namespace recfx
