// Finds the lowest rows of a bucket repeatedly, at a cost that is linear in the number of rows asked for. This file
// does not use torch.
// A scan of the bucket sorts the lowest few rows (the run), and keeps the highest key among them as `bound`. The key of
// a row only grows, unless the row gets a new owner, which `add` is told about; it then goes into a heap beside the
// run. So every row with a key up to `bound` is in the run or in the heap, under its key or a lower one, and an entry
// that is taken off with the current key of its row is the lowest row of the bucket. The bucket is scanned again when
// both are empty: one step per row of the bucket each time 1/16 of its rows have been evicted or used.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "index/scores.h"

namespace recfx {

// A view of buffers, which it does not own: `entries` [sum of capacities] and `heads` [buckets]. The first half of a
// bucket's entries are the run, lowest last; the others are the heap.
class LowestRows {
 public:
  struct Entry {
    Key key;
    int64_t row;
  };
  struct Head {
    int64_t sizes;  // of the run, and of the heap * 2 ** 32; kUnknown: the bucket must be scanned
    Key bound;

    int64_t run() const { return sizes & 0xffffffff; }
    int64_t heap() const { return sizes >> 32; }
    void resize(int64_t run, int64_t heap) { sizes = heap << 32 | run; }
  };
  static constexpr int64_t kUnknown = -1;
  static constexpr int64_t kNoScore = -1;

  LowestRows(Entry* entries, Head* heads) : entries_(entries), heads_(heads) {}

  // The number of entries of all buckets before the one that begins at index row `begin`;
  // kernels/index/index_buffers.py has the same. Every bucket has two at least.
  static int64_t entries_before(int64_t begin, int64_t bucket) { return begin / 8 + 2 * bucket; }

  void forget(int64_t bucket) { heads_[bucket].sizes = kUnknown; }

  // Returns the lowest row that is not blocked, -1 if there is none. Appends blocked rows that it comes across to
  // `aside`; they must be passed to `add` once they may no longer be blocked. Rows whose key has a score above `most`
  // are left alone.
  // rows: score(row) -> kNoScore for a row without an owner; stored_score(row) -> any number for such a row;
  // key_score(score) -> what is compared first; key(row, score); blocked(row, score); prefetch(row)
  template <typename Rows>
  int64_t take(int64_t bucket, int64_t begin, int64_t end, int64_t dense_rows, const Rows& rows,
               std::vector<int64_t>& aside, int64_t most = kHighest) {
    Head& head = heads_[bucket];
    const Part part = part_of(bucket, begin, end, dense_rows);
    for (bool scanned = false;; scanned = true) {
      while (head.sizes > 0) {
        if (lowest(head, part).key.score > most) {
          return -1;
        }
        const Entry entry = pop(head, part, rows);
        const int64_t score = rows.score(entry.row);
        if (score == kNoScore) {
          continue;
        }
        const Key key = rows.key(entry.row, score);
        if (key != entry.key) {
          add_entry(head, part, {key, entry.row});
        } else if (rows.blocked(entry.row, score)) {
          aside.push_back(entry.row);
        } else {
          return entry.row;
        }
      }
      if (scanned) {
        return -1;
      }
      scan(head, part, begin, end, rows, aside);
    }
  }

  // To be called when the key of a row of the bucket may have become lower, or the row is no longer blocked.
  void add(int64_t bucket, int64_t begin, int64_t end, int64_t dense_rows, Key key, int64_t row) {
    add_entry(heads_[bucket], part_of(bucket, begin, end, dense_rows), {key, row});
  }

 private:
  static constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();
  static constexpr int64_t kAhead = 4;    // entries of the run; those that were used since are skipped
  static constexpr int64_t kChunk = 256;  // rows
  static constexpr int64_t kSamples = 256;
  static constexpr int64_t kWorthSamples = 16 * kSamples;  // rows of a bucket

  // The entries of one bucket.
  struct Part {
    Entry* run;
    int64_t run_capacity;
    int64_t capacity;

    Entry* heap() const { return run + run_capacity; }
    int64_t heap_capacity() const { return capacity - run_capacity; }
  };

  static bool later(const Entry& a, const Entry& b) { return a.key > b.key; }
  static bool earlier(const Entry& a, const Entry& b) { return a.key < b.key; }

  Part part_of(int64_t bucket, int64_t begin, int64_t end, int64_t dense_rows) const {
    const int64_t before = entries_before(begin - dense_rows, bucket);
    const int64_t capacity = entries_before(end - dense_rows, bucket + 1) - before;
    return {entries_ + before, capacity / 2, capacity};
  }

  // The lowest entry of the run and the heap, of which one at least is not empty.
  static const Entry& lowest(const Head& head, const Part& part) {
    return is_in_heap(head, part) ? part.heap()[0] : part.run[head.run() - 1];
  }
  static bool is_in_heap(const Head& head, const Part& part) {
    return head.heap() > 0 && (head.run() == 0 || part.heap()[0].key < part.run[head.run() - 1].key);
  }

  // Takes it off.
  template <typename Rows>
  static Entry pop(Head& head, const Part& part, const Rows& rows) {
    const int64_t run = head.run();
    const int64_t heap = head.heap();
    if (is_in_heap(head, part)) {
      std::pop_heap(part.heap(), part.heap() + heap, later);
      head.resize(run, heap - 1);
      return part.heap()[heap - 1];
    }
    if (run > kAhead) {
      rows.prefetch(part.run[run - 1 - kAhead].row);  // read when the bucket is next asked, or soon after
    }
    head.resize(run - 1, heap);
    return part.run[run - 1];
  }

  static void add_entry(Head& head, const Part& part, Entry entry) {
    if (head.sizes == kUnknown || entry.key > head.bound) {
      return;
    }
    const int64_t heap = head.heap();
    if (heap == part.heap_capacity()) {
      head.sizes = kUnknown;
      return;
    }
    part.heap()[heap] = entry;
    std::push_heap(part.heap(), part.heap() + heap + 1, later);
    head.resize(head.run(), heap + 1);
  }

  // Collects rows that are low enough in all entries of the bucket, and whenever these are full, drops the upper half.
  template <typename Rows>
  static void scan(Head& head, const Part& part, int64_t begin, int64_t end, const Rows& rows,
                   std::vector<int64_t>& aside) {
    Entry* const first = part.run;
    const size_t aside_before = aside.size();
    Key limit = likely_limit(part, begin, end, rows);
    int64_t count = 0;
    const auto drop_upper_half = [&] {
      std::nth_element(first, first + part.run_capacity - 1, first + count, earlier);
      count = part.run_capacity;
      limit = first[count - 1].key;
    };
    for (;;) {
      for (int64_t chunk = begin; chunk < end; chunk += kChunk) {
        // Most rows are too high by their score alone, so nothing else about them is read.
        int64_t low[kChunk];
        int64_t low_count = 0;
        for (int64_t row = chunk; row < std::min(chunk + kChunk, end); ++row) {
          low[low_count] = row;
          low_count += rows.key_score(rows.stored_score(row)) <= limit.score;
        }
        for (int64_t i = 0; i < low_count; ++i) {
          const int64_t row = low[i];
          const int64_t score = rows.score(row);
          if (score == kNoScore) {
            continue;
          }
          const Key key = rows.key(row, score);
          if (key > limit) {
            continue;
          }
          if (rows.blocked(row, score)) {
            aside.push_back(row);
            continue;
          }
          first[count++] = {key, row};
          if (count == part.capacity) {
            drop_upper_half();
          }
        }
      }
      if (count > 0 || limit.score == kHighest) {
        break;
      }
      limit = {kHighest, kHighest};  // what was likely was wrong
      aside.resize(aside_before);
    }
    if (count > part.run_capacity) {
      drop_upper_half();
    }
    std::sort(first, first + count, later);
    head.resize(count, 0);
    head.bound = limit;
  }

  // A key that probably so many rows are below as are wanted, or some more.
  template <typename Rows>
  static Key likely_limit(const Part& part, int64_t begin, int64_t end, const Rows& rows) {
    if (end - begin < kWorthSamples) {
      return {kHighest, kHighest};
    }
    int64_t samples[kSamples];
    for (int64_t i = 0; i < kSamples; ++i) {
      samples[i] = rows.key_score(rows.stored_score(begin + i * ((end - begin) / kSamples)));
    }
    int64_t* const rank = samples + std::min(kSamples - 1, 2 * kSamples * part.run_capacity / (end - begin));
    std::nth_element(samples, rank, samples + kSamples);
    return {*rank, kHighest};
  }

  Entry* entries_;
  Head* heads_;
};

}  // namespace recfx
