// Cuts the bags of a batch into tasks, and spreads tasks over threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "parallel.h"

namespace recfx {

constexpr int64_t kIdsPerTask = 4096;

// The number of ids for which it is worth waking one more thread. Smaller batches are done before other threads have
// started.
constexpr int64_t kIdsPerThread = 8192;

// Some adjacent bags of one feature.
struct BagTask {
  int64_t feature;
  int64_t first;
  int64_t last;
};

// Adds tasks of about ids_per_task ids each. offsets: int64 [batch_size + 1], of the feature.
inline void add_bag_tasks(int64_t feature, const int64_t* offsets, int64_t batch_size, int64_t ids_per_task,
                          std::vector<BagTask>& tasks) {
  const int64_t ids = offsets[batch_size] - offsets[0];
  const int64_t pieces = std::clamp<int64_t>(ids / ids_per_task, 1, std::max<int64_t>(batch_size, 1));
  for (int64_t piece = 0; piece < pieces && batch_size > 0; ++piece) {
    tasks.push_back({feature, piece * batch_size / pieces, (piece + 1) * batch_size / pieces});
  }
}

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
