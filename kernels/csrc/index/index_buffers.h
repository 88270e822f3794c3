// Turns the tensors that the operators take into the views that the index consists of, and checks them.
#pragma once

#include <ATen/core/Tensor.h>

#include "index/checks.h"
#include "index/index.h"
#include "index/index_lock.h"

namespace recfx {

// The order in which an index's tensors are passed: IndexBuffers in kernels/index/index_buffers.py.
enum Buffer {
  kSlotGroups,
  kSideRow,
  kRowIds,
  kRowState,
  kFreeRows,
  kBucketTaken,
  kCountsBuffer,
  kLock,
  kRowScores,
  kVictims,
  kVictimHeads,
  kCandidateSlotGroups,
  kCandidateSideRow,
  kCandidateIds,
  kCandidateCounts,
  kCandidateOrder,
  kFreePlaces,
  kOldest,
  kOldestHeads,
  kUninitialized,
  kBuffers
};

// The order in which an index's numbers are passed: IndexPolicy in kernels/index/index_buffers.py.
enum PolicyNumber {
  kDenseRows,
  kSeed,
  kOnFull,
  kEvictRule,
  kAdmitAfter,
  kUnseen,
  kTableRows,
  kBucketsOfTable,
  kRowBegin,
  kRowEnd,
  kMarkNew,
  kTtlBatches,
  kPolicyNumbers
};

template <typename T>
T* buffer_data(const at::Tensor& tensor, const char* name, at::ScalarType type, int64_t elements) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == type, "recfx: ", name,
              " must be ", type, ", contiguous and on the CPU, got ", tensor.scalar_type(), " on ", tensor.device());
  TORCH_CHECK(elements < 0 || tensor.numel() == elements, "recfx: ", name, " must have ", elements, " elements, got ",
              tensor.numel());
  return static_cast<T*>(tensor.data_ptr());
}

inline int64_t* longs(const at::Tensor& tensor, const char* name, int64_t elements = -1) {
  return buffer_data<int64_t>(tensor, name, at::kLong, elements);
}

inline FreeRows free_rows_view(const at::Tensor& words, const char* name, int64_t rows) {
  FreeRows view(reinterpret_cast<uint64_t*>(longs(words, name)), rows);
  TORCH_CHECK(words.numel() == view.total_words(), "recfx: ", name, " must hold ", view.total_words(), " words for ",
              rows, " rows, got ", words.numel());
  return view;
}

inline LowestRows lowest_rows_view(const at::Tensor& entries, const at::Tensor& heads, const char* name,
                                   int64_t index_rows, int64_t buckets) {
  static_assert(sizeof(LowestRows::Entry) == 3 * sizeof(int64_t) && sizeof(LowestRows::Head) == 3 * sizeof(int64_t));
  const int64_t capacity = LowestRows::entries_before(index_rows, buckets);
  return {reinterpret_cast<LowestRows::Entry*>(longs(entries, name, 3 * capacity)),
          reinterpret_cast<LowestRows::Head*>(longs(heads, name, 3 * buckets))};
}

inline RowSlice row_slice(const at::IntArrayRef numbers) {
  const int64_t table_rows = numbers[kTableRows];
  const int64_t dense_rows = numbers[kDenseRows];
  const int64_t buckets = numbers[kBucketsOfTable];
  TORCH_CHECK(0 <= dense_rows && dense_rows < table_rows, "recfx: dense_rows must be in [0, ", table_rows, "), got ",
              dense_rows);
  TORCH_CHECK(1 <= buckets && buckets <= table_rows - dense_rows, "recfx: there must be 1 to ", table_rows - dense_rows,
              " buckets, got ", buckets);
  const int64_t begin = numbers[kRowBegin];
  const int64_t end = numbers[kRowEnd];
  TORCH_CHECK(0 <= begin && begin < end && end <= table_rows, "recfx: rows ", begin, " to ", end,
              " are not a slice of a table of ", table_rows, " rows");
  const RowSlice slice(table_rows, dense_rows, buckets, begin, end);
  TORCH_CHECK(slice.may_be_border(begin) && slice.may_be_border(end), "recfx: rows ", begin, " to ", end,
              " are not a slice: its borders must be among the dense rows or at the borders of buckets");
  return slice;
}

// One slot at least is empty, so that searches end.
inline void check_slots(const at::Tensor& groups, const char* name, int64_t index_rows) {
  TORCH_CHECK(groups.dim() == 2 && groups.numel() / 2 > index_rows, "recfx: ", name,
              " must have more slots than rows, got ", groups.sizes(), " for ", index_rows, " rows");
}

inline Index index_view(const at::TensorList buffers, const at::IntArrayRef numbers) {
  const Policy policy{
      .seed = numbers[kSeed],
      .share = numbers[kOnFull] == 1,
      .evict = numbers[kOnFull] == 2,
      .lfu = numbers[kEvictRule] == 1,
      .admit_after = numbers[kAdmitAfter],
      .share_unseen = numbers[kUnseen] != 0,
      .keeps_last_row = numbers[kUnseen] == 2,
      .mark_new = numbers[kMarkNew] == 1,
      .ttl_batches = numbers[kTtlBatches],
  };
  const RowSlice slice = row_slice(numbers);
  const int64_t rows = slice.rows();
  const int64_t buckets = slice.own_buckets();
  const int64_t index_rows = slice.own_index_rows();
  check_slots(buffers[kSlotGroups], "slot_groups", index_rows);
  Index index{
      .policy = policy,
      .slice = slice,
      .table = slot_groups(buffers[kSlotGroups], buffers[kSideRow]),
      .row_ids = longs(buffers[kRowIds], "row_ids", rows),
      .row_state = buffer_data<uint8_t>(buffers[kRowState], "row_state", at::kByte, rows),
      .free_rows = free_rows_view(buffers[kFreeRows], "free_rows", rows),
      .bucket_taken = longs(buffers[kBucketTaken], "bucket_taken", buckets),
      .counts = longs(buffers[kCountsBuffer], "counts", kCounters),
      .uninitialized = longs(buffers[kUninitialized], "uninitialized", 1),
      .row_scores = longs(buffers[kRowScores], "row_scores", policy.evict ? rows : 0),
      .victims = std::nullopt,
      .candidates = std::nullopt,
  };
  if (policy.evict) {
    index.victims = lowest_rows_view(buffers[kVictims], buffers[kVictimHeads], "victims", index_rows, buckets);
  }
  if (policy.admit_after > 1) {
    check_slots(buffers[kCandidateSlotGroups], "candidate_slot_groups", index_rows);
    index.candidates = Candidates{
        .table = slot_groups(buffers[kCandidateSlotGroups], buffers[kCandidateSideRow]),
        .ids = longs(buffers[kCandidateIds], "candidate_ids", rows),
        .counts = buffer_data<int32_t>(buffers[kCandidateCounts], "candidate_counts", at::kInt, rows),
        .order = longs(buffers[kCandidateOrder], "candidate_order", rows),
        .free_places = free_rows_view(buffers[kFreePlaces], "free_places", rows),
        .oldest = lowest_rows_view(buffers[kOldest], buffers[kOldestHeads], "oldest", index_rows, buckets),
    };
  }
  return index;
}

// Makes one view per table from the lists of all tables.
inline std::vector<Index> index_views(at::TensorList buffers, at::IntArrayRef numbers) {
  TORCH_CHECK(buffers.size() % kBuffers == 0 && numbers.size() == buffers.size() / kBuffers * kPolicyNumbers,
              "recfx: an index takes ", static_cast<int>(kBuffers), " tensors and ", static_cast<int>(kPolicyNumbers),
              " numbers, got ", buffers.size(), " and ", numbers.size());
  std::vector<Index> views;
  for (size_t t = 0; t * kBuffers < buffers.size(); ++t) {
    views.push_back(
        index_view(buffers.slice(t * kBuffers, kBuffers), numbers.slice(t * kPolicyNumbers, kPolicyNumbers)));
  }
  return views;
}

}  // namespace recfx
