// Finds the lowest rows of a bucket repeatedly, at a cost that is linear in the number of rows asked for. This file
// does not use torch.
// A scan of the bucket keeps the lowest few rows in a heap, and their highest key as `bound`. The key of a row only
// grows, unless the row gets a new owner, which `add` is told about. So every row with a key up to `bound` is in the
// heap, under its key or a lower one, and an entry that comes off the heap with the current key of its row is the
// lowest row of the bucket. The bucket is scanned again when the heap is empty: one step per row of the bucket each
// time 1/32 of its rows have been evicted or used.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "scores.h"

namespace recfx {

// A view of buffers, which it does not own: `entries` [sum of capacities] and `heads` [buckets].
class LowestRows {
 public:
  struct Entry {
    Key key;
    int64_t row;
  };
  struct Head {
    int64_t size;  // kUnknown: the bucket must be scanned
    Key bound;
  };
  static constexpr int64_t kUnknown = -1;
  static constexpr int64_t kNoScore = -1;

  LowestRows(Entry* entries, Head* heads) : entries_(entries), heads_(heads) {}

  // The number of entries of all buckets before the one that begins at index row `begin`; kernels/index_buffers.py has
  // the same.
  static int64_t entries_before(int64_t begin, int64_t bucket) { return begin / 16 + bucket; }

  void forget(int64_t bucket) { heads_[bucket].size = kUnknown; }

  // Returns the lowest row that is not blocked, -1 if there is none. Appends blocked rows that it comes across to
  // `aside`; they must be passed to `add` once they may no longer be blocked.
  // rows: score(row) -> kNoScore for a row without an owner; key(row, score); blocked(row, score)
  template <typename Rows>
  int64_t take(int64_t bucket, int64_t begin, int64_t end, int64_t dense_rows, const Rows& rows,
               std::vector<int64_t>& aside) {
    Head& head = heads_[bucket];
    Entry* heap = entries_ + entries_before(begin - dense_rows, bucket);
    const int64_t capacity = entries_before(end - dense_rows, bucket + 1) - entries_before(begin - dense_rows, bucket);
    for (bool scanned = false;; scanned = true) {
      while (head.size > 0) {
        std::pop_heap(heap, heap + head.size, later);
        const Entry entry = heap[--head.size];
        const int64_t score = rows.score(entry.row);
        if (score == kNoScore) {
          continue;
        }
        const Key key = rows.key(entry.row, score);
        if (key != entry.key) {
          add_entry(head, heap, capacity, {key, entry.row});
        } else if (rows.blocked(entry.row, score)) {
          aside.push_back(entry.row);
        } else {
          return entry.row;
        }
      }
      if (scanned) {
        return -1;
      }
      scan(head, heap, (capacity + 1) / 2, begin, end, rows, aside);
    }
  }

  // To be called when the key of a row of the bucket may have become lower, or the row is no longer blocked.
  void add(int64_t bucket, int64_t begin, int64_t end, int64_t dense_rows, Key key, int64_t row) {
    Entry* heap = entries_ + entries_before(begin - dense_rows, bucket);
    const int64_t capacity = entries_before(end - dense_rows, bucket + 1) - entries_before(begin - dense_rows, bucket);
    add_entry(heads_[bucket], heap, capacity, {key, row});
  }

 private:
  static bool later(const Entry& a, const Entry& b) { return a.key > b.key; }
  static bool earlier(const Entry& a, const Entry& b) { return a.key < b.key; }

  static void add_entry(Head& head, Entry* heap, int64_t capacity, Entry entry) {
    if (head.size == kUnknown || entry.key > head.bound) {
      return;
    }
    if (head.size == capacity) {
      head.size = kUnknown;
      return;
    }
    heap[head.size++] = entry;
    std::push_heap(heap, heap + head.size, later);
  }

  template <typename Rows>
  static void scan(Head& head, Entry* heap, int64_t wanted, int64_t begin, int64_t end, const Rows& rows,
                   std::vector<int64_t>& aside) {
    int64_t size = 0;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t score = rows.score(row);
      // Most rows are too high by their score alone, so nothing else about them is read.
      if (score == kNoScore || (size == wanted && rows.key_score(score) > heap[0].key.score)) {
        continue;
      }
      const Key key = rows.key(row, score);
      if (size == wanted && key > heap[0].key) {
        continue;
      }
      if (rows.blocked(row, score)) {
        aside.push_back(row);
      } else if (size < wanted) {
        heap[size++] = {key, row};
        std::push_heap(heap, heap + size, earlier);
      } else {
        std::pop_heap(heap, heap + size, earlier);
        heap[size - 1] = {key, row};
        std::push_heap(heap, heap + size, earlier);
      }
    }
    constexpr int64_t highest = std::numeric_limits<int64_t>::max();
    head = {size, size < wanted ? Key{highest, highest} : heap[0].key};
    std::sort_heap(heap, heap + size, earlier);  // ascending order is a heap with the lowest row on top
  }

  Entry* entries_;
  Head* heads_;
};

}  // namespace recfx
