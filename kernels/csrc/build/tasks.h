// Spreads tasks over threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "build/parallel.h"

namespace recfx {

// The number of ids for which it is worth waking one more thread. Smaller batches are done before other threads have
// started.
constexpr int64_t kIdsPerThread = 8192;

// Of the widest line that caches pass between cores: 128 bytes in the last cache of Kunpeng 920, 64 elsewhere.
constexpr int64_t kFloatsPerLine = 32;

inline int64_t threads_for(int64_t ids, int64_t tasks) {
  return std::min({static_cast<int64_t>(at::get_num_threads()), tasks, ids / kIdsPerThread + 1});
}

// Tasks differ in cost because tables have different widths, so each thread takes the next task when it is free. With a
// single thread, no parallel region is opened.
template <typename Run>
void run_tasks(int64_t ids, int64_t count, const Run& run) {
  std::atomic<int64_t> next{0};
  parallel_for(0, threads_for(ids, count), 1, [&](int64_t, int64_t) {
    for (int64_t k = next++; k < count; k = next++) {
      run(k);
    }
  });
}

// The same for tasks that need space to work in: run(k, space), with `floats` of it per thread. It is allocated before
// the first task begins, so that no task fails for want of memory after others have changed something.
template <typename Run>
void run_tasks_with_space(int64_t ids, int64_t count, int64_t floats, const Run& run) {
  const int64_t threads = threads_for(ids, count);
  const int64_t per_thread = (floats + kFloatsPerLine - 1) / kFloatsPerLine * kFloatsPerLine;  // no line is shared
  const auto space = std::make_unique_for_overwrite<float[]>(std::max<int64_t>(threads, 1) * per_thread);
  std::atomic<int64_t> next{0}, next_space{0};
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    float* own = space.get() + per_thread * next_space++;
    for (int64_t k = next++; k < count; k = next++) {
      run(k, own);
    }
  });
}

}  // namespace recfx
