// The operators of the hash index. Contract: kernels/index/hash_index.py.
// Determinism: each bucket of an index is changed by one thread, in the order of the ids. Scores are touched on all
// threads, and the result does not depend on the order of touches.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "build/kept_memory.h"
#include "build/parallel.h"
#include "build/tasks.h"
#include "index/checks.h"
#include "index/find_in_groups.h"
#include "index/index_buffers.h"
#include "index/table_batch.h"

namespace recfx {
namespace {

constexpr int64_t kIdsPerTask = 2048;
// Ids that are searched at once for one without a row.
constexpr int64_t kAbsentBlock = 16;

at::TensorOptions int64_options() { return at::TensorOptions().dtype(at::kLong); }

int64_t* mutable_int64(const at::Tensor& tensor) { return static_cast<int64_t*>(tensor.data_ptr()); }

Locked write_lock(at::TensorList buffers) {
  std::vector<IndexLock> locks;
  for (size_t first = 0; first < buffers.size(); first += kBuffers) {
    locks.push_back(index_lock(buffers[first + kLock]));
  }
  return {std::move(locks), true};
}

constexpr int64_t kNoPosition = -1;

// An id without a row.
struct Missing {
  int64_t position;  // in the table's range of ids
  int64_t part;      // of the batch
};

// A range of one table's ids. All tables of a collection share one parallel region: with one region per table, every
// table would wait for its slowest thread.
struct Task {
  size_t table;
  int64_t begin;
  int64_t end;
  int64_t absent = 0;
  std::vector<Missing> missing = {};
  int64_t foreign = kNoPosition;  // the first of these whose id belongs to another slice of the table
  bool is_touched = false;        // whether the scores of the rows found are those of this batch
};

std::vector<Task> tasks_of(int64_t ids, at::IntArrayRef begins, at::IntArrayRef ends) {
  std::vector<Task> tasks;
  for (size_t t = 0; t < begins.size(); ++t) {
    TORCH_CHECK(0 <= begins[t] && begins[t] <= ends[t] && ends[t] <= ids, "recfx: table ", t, " has ids ", begins[t],
                " to ", ends[t], " of ", ids);
    for (int64_t begin = begins[t]; begin < ends[t]; begin += kIdsPerTask) {
      tasks.push_back({t, begin, std::min(begin + kIdsPerTask, ends[t])});
    }
  }
  return tasks;
}

// Allocates an answer for every id. Ids outside all ranges are returned unchanged.
at::Tensor rows_of(const at::Tensor& ids, at::IntArrayRef begins, at::IntArrayRef ends) {
  int64_t answered = 0;
  for (size_t t = 0; t < begins.size(); ++t) {
    answered += ends[t] - begins[t];
  }
  return answered == ids.numel() ? at::empty(ids.sizes(), int64_options()) : ids.clone();
}

template <typename Each, typename Work>
void run(int64_t ids, std::vector<Each>& tasks, const Work& work) {
  run_tasks(ids, static_cast<int64_t>(tasks.size()), [&](int64_t k) { work(tasks[k]); });
}

// A part of one table's batch.
struct Part {
  size_t table;
  int64_t number;
};

struct ScoresBefore;

at::Tensor find(const at::Tensor& ids, const at::Tensor& groups, const at::Tensor& side_row, int64_t dense_rows,
                const std::optional<at::Tensor>& lock, int64_t dense_begin) {
  const at::Tensor contiguous = ids.contiguous();
  const int64_t* data = int64_data(contiguous, "ids");
  const SlotGroups table = slot_groups(groups, side_row);
  at::Tensor rows = at::empty(ids.sizes(), int64_options());
  int64_t* row_data = mutable_int64(rows);
  const Locked locked(lock ? std::vector<IndexLock>{index_lock(*lock)} : std::vector<IndexLock>{}, false);
  parallel_for(0, ids.numel(), kIdsPerTask, [&](int64_t begin, int64_t end) {
    find_range(data, row_data, begin, end, table, {dense_rows, dense_begin});
  });
  return rows;
}

// Returns rows, absent [tables].
std::tuple<at::Tensor, at::Tensor> find_tables(const at::Tensor& ids, at::IntArrayRef begins, at::IntArrayRef ends,
                                               at::TensorList groups, at::TensorList side_rows, at::TensorList locks,
                                               at::IntArrayRef dense_rows, at::OptionalIntArrayRef dense_begins) {
  const size_t tables = begins.size();
  TORCH_CHECK(ends.size() == tables && groups.size() == tables && side_rows.size() == tables &&
                  locks.size() == tables && dense_rows.size() == tables &&
                  (!dense_begins || dense_begins->size() == tables),
              "recfx: find_tables needs one entry per table in every list");
  const at::Tensor contiguous = ids.contiguous();
  const int64_t* data = int64_data(contiguous, "ids");
  std::vector<Task> tasks = tasks_of(ids.numel(), begins, ends);
  std::vector<SlotGroups> views;
  std::vector<IndexLock> index_locks;
  for (size_t t = 0; t < tables; ++t) {
    views.push_back(slot_groups(groups[t], side_rows[t]));
    index_locks.push_back(index_lock(locks[t]));
  }
  at::Tensor rows = rows_of(contiguous, begins, ends);
  int64_t* row_data = mutable_int64(rows);
  at::Tensor absent = at::zeros({static_cast<int64_t>(tables)}, int64_options());
  {
    const Locked locked(std::move(index_locks), false);
    run(ids.numel(), tasks, [&](Task& task) {
      const DenseIds dense{dense_rows[task.table], dense_begins ? (*dense_begins)[task.table] : 0};
      find_range(data, row_data, task.begin, task.end, views[task.table], dense);
      task.absent = std::count(row_data + task.begin, row_data + task.end, kNoRow);
    });
  }
  for (const Task& task : tasks) {
    mutable_int64(absent)[task.table] += task.absent;
  }
  return {rows, absent};
}

// Notes which of the task's ids have no row, and whether one of them belongs to another slice of the table.
// table_begin: the position of the table's first id.
void note_missing(Task& task, const Index& index, const TableBatch& batch, const int64_t* ids, const int64_t* rows,
                  int64_t table_begin) {
  int64_t absent[kIdsPerTask];
  int64_t absent_count = 0;
  for (int64_t block = task.begin; block < task.end; block += kAbsentBlock) {
    const int64_t end = std::min(block + kAbsentBlock, task.end);
    int64_t signs = 0;  // of all rows together: every machine's vectors can do this
    for (int64_t i = block; i < end; ++i) {
      signs |= rows[i];
    }
    for (int64_t i = signs < 0 ? block : end; i < end; ++i) {  // a branch would be mispredicted
      absent[absent_count] = i;
      absent_count += rows[i] == kNoRow;
    }
  }
  task.missing.reserve(absent_count);
  for (int64_t k = 0; k < absent_count; ++k) {
    const int64_t i = absent[k];
    if (index.is_foreign(ids[i])) {
      task.foreign = i;
      break;
    }
    task.missing.push_back({i - table_begin, batch.part_of(ids[i])});
  }
}

// The positions of a part's ids that have no row.
std::vector<int64_t> missing_of(const Part& part, const std::vector<Task>& tasks) {
  std::vector<int64_t> positions;
  const auto of_table = [](const Task& task, size_t table) { return task.table < table; };
  auto task = std::lower_bound(tasks.begin(), tasks.end(), part.table, of_table);
  for (; task != tasks.end() && task->table == part.table; ++task) {
    for (const Missing& each : task->missing) {
      if (each.part == part.number) {
        positions.push_back(each.position);
      }
    }
  }
  return positions;
}

using Inserted = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using ListedRows = std::optional<std::vector<at::Tensor>>;

// Takes their rows from ids that have not been seen for too long; returns these ids, table by table.
at::Tensor expire(int64_t ids, std::deque<TableBatch>& batches) {
  std::vector<std::vector<int64_t>> expired(batches.size());
  if (std::any_of(batches.begin(), batches.end(), [](const TableBatch& batch) { return batch.expires(); })) {
    run_tasks(ids, static_cast<int64_t>(batches.size()), [&](int64_t t) {
      if (batches[t].expires()) {
        batches[t].expire(expired[t]);
      }
    });
  }
  int64_t count = 0;
  for (const std::vector<int64_t>& of_table : expired) {
    count += static_cast<int64_t>(of_table.size());
  }
  at::Tensor all = at::empty({count}, int64_options());
  int64_t* next = mutable_int64(all);
  for (const std::vector<int64_t>& of_table : expired) {
    next = std::copy(of_table.begin(), of_table.end(), next);
  }
  return all;
}

// Returns rows, new_rows, their previous states and ids, report [tables, 2] = (new rows, full bucket or -1), and the
// ids that have expired.
Inserted find_or_insert(const at::Tensor& ids, at::IntArrayRef begins, at::IntArrayRef ends, at::TensorList buffers,
                        at::IntArrayRef policies, at::IntArrayRef oldest_in_flight, const ListedRows& rows_in_flight,
                        at::OptionalIntArrayRef oldest_listed) {
  const at::Tensor contiguous = ids.contiguous();
  const int64_t* data = int64_data(contiguous, "ids");
  const int64_t tables = static_cast<int64_t>(begins.size());
  TORCH_CHECK(ends.size() == begins.size() && oldest_in_flight.size() == begins.size() &&
                  buffers.size() == begins.size() * kBuffers,
              "recfx: find_or_insert needs one entry per table in every list");
  TORCH_CHECK(!rows_in_flight || (rows_in_flight->size() == begins.size() && oldest_listed.has_value() &&
                                  oldest_listed->size() == begins.size()),
              "recfx: find_or_insert needs the rows in flight, and the oldest batch among them, of every table");
  std::vector<Task> tasks = tasks_of(ids.numel(), begins, ends);
  at::Tensor rows = rows_of(contiguous, begins, ends);
  int64_t* row_data = mutable_int64(rows);

  const Locked locked = write_lock(buffers);
  std::vector<Index> indexes = index_views(buffers, policies);
  const bool evicts = std::any_of(indexes.begin(), indexes.end(), [](const Index& each) { return each.policy.evict; });
  int64_t* const scores = evicts ? kept_memory<ScoresBefore>(ids.numel()) : nullptr;
  std::deque<TableBatch> batches;
  std::vector<Part> parts;
  for (int64_t t = 0; t < tables; ++t) {
    const at::Tensor listed = rows_in_flight ? (*rows_in_flight)[t] : at::empty({0}, int64_options());
    batches.emplace_back(indexes[t], data + begins[t], row_data + begins[t], ends[t] - begins[t], oldest_in_flight[t],
                         int64_data(listed, "rows_in_flight"), listed.numel(), rows_in_flight ? (*oldest_listed)[t] : 0,
                         evicts ? scores + begins[t] : nullptr, TableBatch::parts_for(indexes[t], ends[t] - begins[t]));
    for (int64_t part = 0; part < batches[t].parts(); ++part) {
      parts.push_back({static_cast<size_t>(t), part});
    }
  }
  const int64_t threads = threads_for(ids.numel(), std::numeric_limits<int64_t>::max());
  const auto undo = [&] {
    for (TableBatch& batch : batches) {
      batch.undo();
    }
    for (const Task& task : tasks) {
      if (task.is_touched) {
        batches[task.table].undo_touches(task.begin - begins[task.table], task.end - begins[task.table]);
      }
    }
  };
  at::Tensor report, new_rows, states_before, ids_before, expired;
  bool full = false;
  try {
    expired = expire(ids.numel(), batches);
    run(ids.numel(), tasks, [&](Task& task) {
      const Index& index = indexes[task.table];
      TableBatch& batch = batches[task.table];
      find_range(data, row_data, task.begin, task.end, index.table,
                 {index.slice.own_dense_rows, index.slice.row_begin});
      note_missing(task, index, batch, data, row_data, begins[task.table]);
      if (batch.touches_while_finding(threads)) {  // the rows found are still in this core's cache
        batch.touch_ids(task.begin - begins[task.table], task.end - begins[task.table]);
        task.is_touched = true;
      }
    });
    for (const Task& task : tasks) {
      const RowSlice& slice = indexes[task.table].slice;
      TORCH_CHECK(task.foreign == kNoPosition, "recfx: find_or_insert: id ", data[task.foreign], " of table ",
                  task.table, " belongs to another slice of the table than rows ", slice.row_begin, " to ",
                  slice.row_end);
    }
    if (std::any_of(batches.begin(), batches.end(),
                    [&](const TableBatch& batch) { return batch.touches_afterwards(threads); })) {
      run_tasks(ids.numel(), tables * threads, [&](int64_t k) {
        if (batches[k % tables].touches_afterwards(threads)) {
          batches[k % tables].touch_share(k / tables, threads);
        }
      });
      for (Task& task : tasks) {
        task.is_touched |= batches[task.table].touches_afterwards(threads);
      }
    }
    run(ids.numel(), parts, [&](const Part& part) {
      TableBatch& batch = batches[part.table];
      batch.plan(part.number, missing_of(part, tasks));
      batch.allocate(part.number);
    });
    report = at::empty({tables, 2}, int64_options());
    int64_t new_row_count = 0;
    for (int64_t t = 0; t < tables; ++t) {
      const int64_t given = batches[t].given_count();
      full = full || batches[t].full_bucket() != TableBatch::kNone;
      new_row_count += given;
      mutable_int64(report)[2 * t] = given;
      mutable_int64(report)[2 * t + 1] = batches[t].full_bucket();
    }
    new_row_count = full ? 0 : new_row_count;
    new_rows = at::empty({new_row_count}, int64_options());
    states_before = at::empty({new_row_count}, at::TensorOptions().dtype(at::kByte));
    ids_before = at::empty({new_row_count}, int64_options());
  } catch (...) {  // out of memory, or an id of another slice
    undo();
    throw;
  }
  if (full) {
    undo();
    rows.fill_(kNoRow);
    return {rows, new_rows, states_before, ids_before, report, expired};
  }
  run(ids.numel(), parts, [&](const Part& range) { batches[range.table].change_slots(range.number); });
  for (TableBatch& batch : batches) {
    batch.finish_slots();
  }
  run(ids.numel(), parts, [&](const Part& part) { batches[part.table].commit(part.number); });
  int64_t position = 0;
  for (const TableBatch& batch : batches) {
    batch.each_given([&](const TableBatch::Given& each) {
      mutable_int64(new_rows)[position] = each.row;
      static_cast<uint8_t*>(states_before.data_ptr())[position] =
          is_taken(each.state_before) ? kTaken : each.state_before;
      mutable_int64(ids_before)[position++] = each.id_before;
    });
  }
  return {rows, new_rows, states_before, ids_before, report, expired};
}

// Adds to the first counts of several tables at once. Readers of one index may do it at the same time.
void add_counts(at::TensorList counts, at::IntArrayRef amounts) {
  const size_t per_table = counts.empty() ? 0 : amounts.size() / counts.size();
  TORCH_CHECK(per_table * counts.size() == amounts.size(), "recfx: add_counts needs as many amounts for every table");
  for (const at::Tensor& each : counts) {
    TORCH_CHECK(each.numel() >= static_cast<int64_t>(per_table), "recfx: add_counts: a table has ", each.numel(),
                " counts, but ", per_table, " amounts");
  }
  const int64_t* amount = amounts.data();
  for (const at::Tensor& each : counts) {
    int64_t* data = int64_data(each, "counts");
    for (size_t i = 0; i < per_table; ++i) {
      std::atomic_ref<int64_t>(data[i]).fetch_add(*amount++, std::memory_order_relaxed);
    }
  }
}

// Whether any of these numbers, one per table, is not 0.
at::Tensor any_nonzero(at::TensorList cells) {
  at::Tensor answer = at::empty({}, at::TensorOptions().dtype(at::kBool));
  *answer.data_ptr<bool>() = std::any_of(cells.begin(), cells.end(), [](const at::Tensor& cell) {
    TORCH_CHECK(cell.numel() == 1, "recfx: any_nonzero takes one number per table, got ", cell.sizes());
    return std::atomic_ref<int64_t>(*int64_data(cell, "cell")).load(std::memory_order_relaxed) != 0;
  });
  return answer;
}

// Marks rows as initialised: rows[begins[t], ends[t]) are those of table t. Rows that are not new stay as they are.
void mark_initialized(at::TensorList buffers, at::IntArrayRef policies, const at::Tensor& rows, at::IntArrayRef begins,
                      at::IntArrayRef ends) {
  const int64_t* row_data = int64_data(rows, "rows");
  const Locked locked = write_lock(buffers);
  std::vector<Index> indexes = index_views(buffers, policies);
  TORCH_CHECK(begins.size() == indexes.size() && ends.size() == indexes.size(),
              "recfx: mark_initialized needs one entry per table in every list");
  for (size_t t = 0; t < indexes.size(); ++t) {
    const int64_t row_count = indexes[t].slice.rows();
    TORCH_CHECK(0 <= begins[t] && begins[t] <= ends[t] && ends[t] <= rows.numel(), "recfx: table ", t, " has rows ",
                begins[t], " to ", ends[t], " of ", rows.numel());
    for (int64_t i = begins[t]; i < ends[t]; ++i) {  // before anything is changed
      TORCH_CHECK(row_data[i] >= 0 && row_data[i] < row_count, "recfx: row ", row_data[i], " is outside a table of ",
                  row_count, " rows");
    }
  }
  for (size_t t = 0; t < indexes.size(); ++t) {
    Index& index = indexes[t];
    for (int64_t i = begins[t]; i < ends[t]; ++i) {
      uint8_t& state = index.row_state[row_data[i]];
      if (is_uninitialized(state)) {
        state = kTaken;
        index.count_uninitialized(-1);
      }
    }
  }
}

// Returns the rows that the ids had, -1 for ids that had none.
at::Tensor erase(const at::Tensor& ids, at::TensorList buffers, at::IntArrayRef policy) {
  const at::Tensor contiguous = ids.contiguous();
  const int64_t* data = int64_data(contiguous, "ids");
  const Locked locked = write_lock(buffers);
  Index index = index_views(buffers, policy).at(0);
  at::Tensor rows = at::empty(ids.sizes(), int64_options());
  const int64_t count = ids.numel();
  for (int64_t i = 0; i < count; ++i) {
    if (i + kLookahead < count) {
      index.table.prefetch(index.table.home(data[i + kLookahead]));
    }
    mutable_int64(rows)[i] = index.slice.is_dense(data[i]) ? kNoRow : index.remove(data[i]);
    if (index.candidates) {
      index.remove_candidate(data[i]);
    }
  }
  return rows;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def(
      "find(Tensor ids, Tensor slot_groups, Tensor side_row, int dense_rows, Tensor? lock=None, "
      "int dense_begin=0) -> Tensor");
  library.def(
      "find_tables(Tensor ids, int[] begins, int[] ends, Tensor[] slot_groups, Tensor[] side_rows, Tensor[] locks, "
      "int[] dense_rows, int[]? dense_begins=None) -> (Tensor, Tensor)");
  library.def(
      "find_or_insert(Tensor ids, int[] begins, int[] ends, Tensor(a!)[] buffers, int[] policies, "
      "int[] oldest_in_flight, Tensor[]? rows_in_flight=None, int[]? oldest_listed=None) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("add_counts(Tensor(a!)[] counts, int[] amounts) -> ()");
  library.def("any_nonzero(Tensor[] cells) -> Tensor");
  library.def("mark_initialized(Tensor(a!)[] buffers, int[] policies, Tensor rows, int[] begins, int[] ends) -> ()");
  library.def("erase(Tensor ids, Tensor(a!)[] buffers, int[] policy) -> Tensor");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) {
  library.impl("find", find);
  library.impl("find_tables", find_tables);
  library.impl("find_or_insert", find_or_insert);
  library.impl("add_counts", add_counts);
  library.impl("any_nonzero", any_nonzero);
  library.impl("mark_initialized", mark_initialized);
  library.impl("erase", erase);
}

}  // namespace recfx
