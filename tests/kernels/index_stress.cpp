// Readers and writers of one evicting index on several threads, for the thread sanitizer. No torch, no OpenMP: neither
// can be instrumented. Built and run by test_thread_safety.py and by `make tsan`.
//
// `index_stress` must finish without a word from the sanitizer. `index_stress without-lock` leaves the lock out: then
// the sanitizer must complain, or it would not have noticed anything in the first place.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "index/find_in_groups.h"
#include "index/index_lock.h"
#include "index/table_batch.h"

using namespace recfx;

namespace {

constexpr int64_t kRows = 500;
constexpr int64_t kBucketCount = 16;  // of 31 or 32 rows: words of free rows, and groups, are shared by several parts
constexpr int64_t kGroupCount = 137;  // 548 slots for 500 rows: many ids are far from home, beyond the end of a range
constexpr int64_t kUniverse = 4 * kRows;
constexpr int64_t kBatchSize = 96;

void check(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "FAILED: %s\n", what);
    std::exit(1);
  }
}

// The buffers that HashIndex would own.
struct Buffers {
  std::vector<SlotGroup> slot_groups = std::vector<SlotGroup>(
      kGroupCount, SlotGroup{{kEmptyId, kEmptyId, kEmptyId, kEmptyId}, {kNoRow, kNoRow, kNoRow, kNoRow}});
  std::vector<SlotGroup> candidate_slot_groups = slot_groups;
  std::array<int64_t, 2> side_row = {kNoRow, 7};  // and the seed
  std::array<int64_t, 2> candidate_side_row = {kNoRow, 8};
  std::vector<int64_t> row_ids = std::vector<int64_t>(kRows, kEmptyId);
  std::vector<uint8_t> row_state = std::vector<uint8_t>(kRows, kNeverUsed);
  std::vector<uint64_t> free_rows = std::vector<uint64_t>(FreeRows(nullptr, kRows).total_words(), 0);
  std::vector<uint64_t> free_places = free_rows;
  std::vector<int64_t> bucket_taken = std::vector<int64_t>(kBucketCount, 0);
  std::vector<int64_t> counts = std::vector<int64_t>(kCounters, 0);
  std::vector<int64_t> row_scores = std::vector<int64_t>(kRows, 0);
  std::vector<LowestRows::Entry> victims = entries();
  std::vector<LowestRows::Entry> oldest = entries();
  std::vector<LowestRows::Head> victim_heads = heads();
  std::vector<LowestRows::Head> oldest_heads = heads();
  std::vector<int64_t> candidate_ids = row_ids;
  std::vector<int32_t> candidate_counts = std::vector<int32_t>(kRows, 0);
  std::vector<int64_t> candidate_order = row_scores;
  int64_t lock = 0;
  int64_t uninitialized = 0;

  static std::vector<LowestRows::Entry> entries() {
    return std::vector<LowestRows::Entry>(LowestRows::entries_before(kRows, kBucketCount));
  }
  static std::vector<LowestRows::Head> heads() {
    return std::vector<LowestRows::Head>(kBucketCount, LowestRows::Head{LowestRows::kUnknown, {}});
  }
};

Index view(Buffers& of, bool lfu, int64_t admit_after) {
  Index index{
      .policy = {.seed = 0,
                 .share = false,
                 .evict = true,
                 .lfu = lfu,
                 .admit_after = admit_after,
                 .share_unseen = false,
                 .mark_new = true},
      .slice = RowSlice(kRows, 0, kBucketCount, 0, kRows),
      .table = SlotGroups(of.slot_groups.data(), kGroupCount, of.side_row.data()),
      .row_ids = of.row_ids.data(),
      .row_state = of.row_state.data(),
      .free_rows = FreeRows(of.free_rows.data(), kRows),
      .bucket_taken = of.bucket_taken.data(),
      .counts = of.counts.data(),
      .uninitialized = &of.uninitialized,
      .row_scores = of.row_scores.data(),
      .victims = LowestRows(of.victims.data(), of.victim_heads.data()),
      .candidates = std::nullopt,
  };
  if (admit_after > 1) {
    index.candidates = Candidates{
        .table = SlotGroups(of.candidate_slot_groups.data(), kGroupCount, of.candidate_side_row.data()),
        .ids = of.candidate_ids.data(),
        .counts = of.candidate_counts.data(),
        .order = of.candidate_order.data(),
        .free_places = FreeRows(of.free_places.data(), kRows),
        .oldest = LowestRows(of.oldest.data(), of.oldest_heads.data()),
    };
  }
  return index;
}

// Runs work(begin, end) on pieces of [0, count), each on a thread of its own, or all on this one.
template <typename Work>
void on_threads(int threads, int64_t count, Work work) {
  if (threads == 1) {
    return work(0, count);
  }
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([=] { work(count * t / threads, count * (t + 1) / threads); });
  }
  for (std::thread& each : pool) {
    each.join();
  }
}

std::vector<int64_t> draw(std::mt19937_64& random) {
  std::vector<int64_t> ids(kBatchSize);
  for (int64_t& id : ids) {
    const int64_t drawn = static_cast<int64_t>(random() % kUniverse);
    id = drawn % 3 == 0 ? drawn % 16 - 1 : drawn;  // a third of them popular, and -1 among these
  }
  return ids;
}

// One batch of training, as the operator does it.
void train(Index& index, const std::vector<int64_t>& ids, int threads, bool take_back, bool with_lock) {
  std::vector<int64_t> rows(ids.size());
  std::vector<int64_t> scores(ids.size());
  const std::vector<int64_t> scores_before(index.row_scores, index.row_scores + kRows);
  const int64_t parts = index.candidates ? 1 : kParts;
  const auto on_parts = [&](const auto& work) {
    on_threads(threads, parts, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        work(part);
      }
    });
  };
  TableBatch batch(index, ids.data(), rows.data(), kBatchSize, std::numeric_limits<int64_t>::max(), nullptr, 0, 0,
                   scores.data(), parts);
  on_threads(threads, kBatchSize, [&](int64_t begin, int64_t end) {
    find_range(ids.data(), rows.data(), begin, end, index.table, {0});
    if (batch.touches_while_finding(threads)) {
      batch.touch_ids(begin, end);
    }
  });
  if (batch.touches_afterwards(threads)) {
    on_threads(threads, threads, [&](int64_t share, int64_t) { batch.touch_share(share, threads); });
  }
  std::vector<std::vector<int64_t>> missing(parts);
  for (int64_t i = 0; i < kBatchSize; ++i) {
    if (rows[i] == kNoRow) {
      missing[batch.part_of(ids[i])].push_back(i);
    }
  }
  on_parts([&](int64_t part) {
    batch.plan(part, missing[part]);
    batch.allocate(part);
  });
  if (take_back || batch.full_bucket() != TableBatch::kNone) {
    batch.undo();
    batch.undo_touches(0, kBatchSize);
    check(!with_lock || std::equal(scores_before.begin(), scores_before.end(), index.row_scores),
          "scores are restored");
    return;
  }
  on_parts([&](int64_t part) { batch.change_slots(part); });
  batch.finish_slots();
  on_parts([&](int64_t part) { batch.commit(part); });
}

// Forgets some of these ids, as the operator does it.
void erase(Index& index, const std::vector<int64_t>& ids) {
  for (size_t i = 0; i < ids.size(); i += 5) {
    index.remove(ids[i]);
    index.candidates ? index.remove_candidate(ids[i]) : void();
  }
}

void check_consistent(const Index& index) {
  int64_t taken = 0, uninitialized = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    uninitialized += is_uninitialized(index.row_state[row]);
    if (is_taken(index.row_state[row])) {
      ++taken;
      check(index.table.find(index.row_ids[row]) == row, "a row's id is found in it");
      check(index.row_scores[row] > 0, "a row that is taken has a score");
    }
  }
  int64_t counted = 0;
  for (int64_t bucket = 0; bucket < kBucketCount; ++bucket) {
    counted += index.bucket_taken[bucket];
  }
  check(counted == taken, "rows taken are counted");
  check(*index.uninitialized == uninitialized && uninitialized > 0, "rows that are not initialised are counted");
}

void free_all(Buffers& buffers) {
  FreeRows free_rows(buffers.free_rows.data(), kRows);
  FreeRows free_places(buffers.free_places.data(), kRows);
  for (int64_t row = 0; row < kRows; ++row) {
    free_rows.give_back(row);
    free_places.give_back(row);
  }
}

// What an index holds, and where, must not depend on the number of threads.
void compare_threads(bool lfu) {
  Buffers of[2];
  std::mt19937_64 random(7);
  free_all(of[0]);
  free_all(of[1]);
  for (int step = 0; step < 150; ++step) {
    const std::vector<int64_t> ids = draw(random);
    for (const int which : {0, 1}) {
      Index index = view(of[which], lfu, 1);
      train(index, ids, which == 0 ? 1 : 4, step % 7 == 6, true);
      step % 5 == 4 ? erase(index, ids) : void();
    }
    const size_t bytes = kGroupCount * sizeof(SlotGroup);
    check(std::memcmp(of[0].slot_groups.data(), of[1].slot_groups.data(), bytes) == 0, "slots are the same");
    check(of[0].side_row == of[1].side_row, "the row of id -1 is the same");
    check(of[0].row_ids == of[1].row_ids && of[0].row_state == of[1].row_state, "rows are the same");
    check(of[0].row_scores == of[1].row_scores, "scores are the same");
    check(of[0].free_rows == of[1].free_rows, "free rows are the same");
    check(of[0].bucket_taken == of[1].bucket_taken && of[0].counts == of[1].counts, "counts are the same");
    check_consistent(view(of[1], lfu, 1));
  }
  check(of[0].counts[kEvicted] > 0, "ids were evicted");
}

void stress(bool lfu, int64_t admit_after, bool with_lock) {
  Buffers buffers;
  free_all(buffers);
  auto write = [&](int number) {
    std::mt19937_64 random(number);
    for (int step = 0; step < 60; ++step) {
      Index index = view(buffers, lfu, admit_after);
      IndexLock lock(&buffers.lock);
      with_lock ? lock.lock() : void();
      const std::vector<int64_t> ids = draw(random);
      train(index, ids, 2, step % 7 == 6, with_lock);
      step % 5 == 4 ? erase(index, ids) : void();
      with_lock ? lock.unlock() : void();
    }
  };
  auto read = [&](int number) {
    std::mt19937_64 random(100 + number);
    std::vector<int64_t> rows(kBatchSize);
    for (int step = 0; step < 400; ++step) {
      const Index index = view(buffers, lfu, admit_after);
      const std::vector<int64_t> ids = draw(random);
      check(std::atomic_ref<int64_t>(buffers.uninitialized).load(std::memory_order_relaxed) >= 0, "a count of rows");
      IndexLock lock(&buffers.lock);
      with_lock ? lock.lock_shared() : void();
      find_range(ids.data(), rows.data(), 0, kBatchSize, index.table, {0});
      for (int64_t i = 0; i < kBatchSize; ++i) {
        check(!with_lock || rows[i] == kNoRow || index.row_ids[rows[i]] == ids[i], "a row found is the id's own");
      }
      with_lock ? lock.unlock_shared() : void();
    }
  };
  std::vector<std::thread> threads;
  for (int number = 0; number < 2; ++number) {
    threads.emplace_back(write, number);
    threads.emplace_back(read, number);
  }
  for (std::thread& each : threads) {
    each.join();
  }
  if (with_lock) {
    const Index index = view(buffers, lfu, admit_after);
    check_consistent(index);
    check(buffers.lock == 0, "the lock is free again");
    check(buffers.counts[kBatches] > 0, "batches were counted");
  }
}

}  // namespace

int main(int count, char** arguments) {
  const bool with_lock = !(count > 1 && std::strcmp(arguments[1], "without-lock") == 0);
  for (const bool lfu : {false, true}) {
    with_lock ? compare_threads(lfu) : void();
    for (const int64_t admit_after : {1, 2}) {
      stress(lfu, admit_after, with_lock);
    }
  }
  std::puts("done");
  return 0;
}
