// Cuts the bags of a batch into tasks. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace recfx {

constexpr int64_t kIdsPerTask = 4096;

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

}  // namespace recfx
