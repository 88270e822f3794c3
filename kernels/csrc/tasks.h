// Spreads tasks over threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "parallel.h"

namespace recfx {

// The number of ids for which it is worth waking one more thread. Smaller batches are done before other threads have
// started.
constexpr int64_t kIdsPerThread = 8192;

// Tasks differ in cost because tables have different widths, so each thread takes the next task when it is free. With a
// single thread, no parallel region is opened.
template <typename Run>
void run_tasks(int64_t ids, int64_t count, const Run& run) {
  const int64_t threads = std::min({static_cast<int64_t>(at::get_num_threads()), count, ids / kIdsPerThread + 1});
  std::atomic<int64_t> next{0};
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t k = next++; k < count; k = next++) {
      run(k);
    }
  });
}

}  // namespace recfx
