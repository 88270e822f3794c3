// Fills everything in an index that is derived from its state, and reports what is wrong with the state. Contract:
// kernels/index/index_rebuild.py.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "index/find_in_groups.h"
#include "index/index_buffers.h"

namespace recfx {
namespace {

// kernels/index/index_rebuild.py has the same numbers.
enum class Problem : int64_t { kNone, kUnknownState, kDenseRow, kDenseId, kWrongBucket, kDuplicateId, kScore };

struct Found {
  Problem problem = Problem::kNone;
  int64_t row = -1;
};

// Calls work(row, its bucket) for every row of the slice, in order; the bucket of dense rows is -1.
template <typename Work>
Found each_row(const Index& index, Work work) {
  const RowSlice& slice = index.slice;
  int64_t next_bucket = slice.first_bucket;
  for (int64_t row = 0; row < slice.rows(); ++row) {
    while (row >= slice.own_dense_rows && row >= slice.bucket_begin(next_bucket)) {
      ++next_bucket;
    }
    const Problem problem = work(row, row < slice.own_dense_rows ? -1 : next_bucket - 1);
    if (problem != Problem::kNone) {
      return {problem, row};
    }
  }
  return {};
}

Problem place_problem(const Index& index, int64_t id, int64_t bucket) {
  if (bucket < 0) {
    return Problem::kDenseRow;
  }
  if (index.slice.is_dense(id)) {
    return Problem::kDenseId;
  }
  return index.bucket_of(id) == bucket ? Problem::kNone : Problem::kWrongBucket;
}

Found rebuild_rows(Index& index) {
  return each_row(index, [&](int64_t row, int64_t bucket) {
    if (row + kLookahead < index.slice.rows() && is_taken(index.row_state[row + kLookahead])) {
      index.table.prefetch(index.table.home(index.row_ids[row + kLookahead]));
    }
    const int64_t id = index.row_ids[row];
    if (index.row_state[row] == kNeverUsed || index.row_state[row] == kFreed) {
      if (bucket >= 0) {
        index.free_rows.give_back(row);
      }
      return Problem::kNone;
    }
    if (index.row_state[row] != kTaken && !is_uninitialized(index.row_state[row])) {
      return Problem::kUnknownState;
    }
    const Problem problem = place_problem(index, id, bucket);
    if (problem != Problem::kNone) {
      return problem;
    }
    if (index.table.find(id) != kNoRow) {
      return Problem::kDuplicateId;
    }
    if (index.policy.evict) {
      const int64_t score = index.row_scores[row];
      if (score < 0 || index.score_rule().last_batch(score) > index.counts[kBatches]) {
        return Problem::kScore;
      }
    }
    index.table.insert(id, row);
    ++index.taken_in(bucket);
    *index.uninitialized += is_uninitialized(index.row_state[row]);
    return Problem::kNone;
  });
}

Found rebuild_candidates(Index& index) {
  Candidates& candidates = *index.candidates;
  return each_row(index, [&](int64_t place, int64_t bucket) {
    const int64_t id = candidates.ids[place];
    if (candidates.counts[place] == 0) {
      if (bucket >= 0) {
        candidates.free_places.give_back(place);
      }
      return Problem::kNone;
    }
    if (candidates.counts[place] < 0) {
      return Problem::kUnknownState;
    }
    const Problem problem = place_problem(index, id, bucket);
    if (problem != Problem::kNone) {
      return problem;
    }
    if (candidates.table.find(id) != kNoRow || index.table.find(id) != kNoRow) {
      return Problem::kDuplicateId;
    }
    if (candidates.order[place] < 0 || first_batch(candidates.order[place]) > index.counts[kBatches]) {
      return Problem::kScore;
    }
    candidates.table.insert(id, place);
    return Problem::kNone;
  });
}

// Returns [3] = (problem, lowest row or place that has it, 1 if it is the place of a candidate).
at::Tensor rebuild(at::TensorList buffers, at::IntArrayRef policy) {
  Index index = index_views(buffers, policy).at(0);
  for (const Buffer each : {kSlotGroups, kVictimHeads, kCandidateSlotGroups, kOldestHeads}) {
    buffers[each].fill_(-1);
  }
  for (const Buffer each : {kSideRow, kCandidateSideRow}) {
    buffers[each].narrow(0, 0, std::min<int64_t>(buffers[each].numel(), 1)).fill_(-1);  // what follows is the seed
  }
  for (const Buffer each : {kFreeRows, kBucketTaken, kFreePlaces, kLock, kUninitialized}) {
    buffers[each].fill_(0);
  }
  Found found = rebuild_rows(index);
  const bool in_rows = found.problem != Problem::kNone;
  if (!in_rows && index.candidates) {
    found = rebuild_candidates(index);
  }
  at::Tensor status = at::empty({3}, at::TensorOptions().dtype(at::kLong));
  int64_t* data = static_cast<int64_t*>(status.data_ptr());
  data[0] = static_cast<int64_t>(found.problem);
  data[1] = found.row;
  data[2] = found.problem != Problem::kNone && !in_rows;
  return status;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) { library.def("rebuild(Tensor(a!)[] buffers, int[] policy) -> Tensor"); }

TORCH_LIBRARY_IMPL(recfx, CPU, library) { library.impl("rebuild", rebuild); }

}  // namespace recfx
