// A lock that several readers, or a single writer, can hold. It is one int64 of a buffer, so that the operators need no
// state of their own. This file does not use torch.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "build/forks.h"

namespace recfx {

// Counts the readers, and is negative while a writer is at work. A waiting writer keeps new readers out, as it might
// otherwise wait forever.
//
// Memory order. Whoever takes the lock must see what those did who held it before. They release it with
// memory_order_release, and whoever takes it reads with memory_order_acquire what the last of them left, or what
// read-modify-write operations made of that: these, the relaxed fetch_or of a waiting writer among them, continue the
// release sequences that they find. So a writer sees what was done before all readers left, and a reader sees what the
// last writer did even if other readers came in between. Loads before a compare_exchange only say what to expect, so
// they are relaxed. unlock() is a plain store, which ends the release sequences of readers who left before: this writer
// has acquired them. A bit kWaiting that the store wipes out is set again, because who set it has not stopped trying.
class IndexLock {
 public:
  explicit IndexLock(int64_t* cell) : cell_(cell) {}

  void lock_shared() {
    std::atomic_ref<int64_t> state(*cell_);
    for (int64_t seen = state.load(std::memory_order_relaxed);; seen = state.load(std::memory_order_relaxed)) {
      if (seen >= 0 && seen < kWaiting && state.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire)) {
        return;
      }
      std::this_thread::yield();
    }
  }

  void unlock_shared() { std::atomic_ref<int64_t>(*cell_).fetch_sub(1, std::memory_order_release); }

  void lock() {
    std::atomic_ref<int64_t> state(*cell_);
    for (int64_t seen = state.load(std::memory_order_relaxed);; seen = state.load(std::memory_order_relaxed)) {
      const bool free = seen == 0 || seen == kWaiting;
      if (free && state.compare_exchange_weak(seen, kWriting, std::memory_order_acquire)) {
        return;
      }
      state.fetch_or(kWaiting, std::memory_order_relaxed);
      std::this_thread::yield();
    }
  }

  void unlock() { std::atomic_ref<int64_t>(*cell_).store(0, std::memory_order_release); }

 private:
  static constexpr int64_t kWaiting = int64_t{1} << 62;
  static constexpr int64_t kWriting = std::numeric_limits<int64_t>::min();

  static_assert(std::atomic_ref<int64_t>::is_always_lock_free);  // forked processes share cells

  int64_t* cell_;
};

// Holds the locks of several indexes, and keeps the process from forking meanwhile. All callers lock tables in their
// order in the collection, so there are no deadlocks.
class Locked {
 public:
  Locked(std::vector<IndexLock> locks, bool exclusive) : locks_(std::move(locks)), exclusive_(exclusive) {
    for (IndexLock& lock : locks_) {
      exclusive_ ? lock.lock() : lock.lock_shared();
    }
  }
  ~Locked() {
    for (IndexLock& lock : locks_) {
      exclusive_ ? lock.unlock() : lock.unlock_shared();
    }
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  NoFork no_fork_;  // taken before the first lock, and released after the last one
  std::vector<IndexLock> locks_;
  bool exclusive_;
};

}  // namespace recfx
