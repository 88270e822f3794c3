// The bags of a batch, and tasks of some of them. This file does not use torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace recfx {

constexpr int64_t kIdsPerTask = 4096;

// Where the bags of a batch are. If rows are not pooled, each id is a bag: bags have the numbers of their ids then.
struct BatchBags {
  const int64_t* offsets;  // [F * B + 1]; [F + 1] if rows are not pooled
  int64_t batch_size;      // B; 1 if rows are not pooled
  bool unpooled = false;

  int64_t first_of(int64_t feature) const { return unpooled ? offsets[feature] : 0; }
  int64_t end_of(int64_t feature) const { return unpooled ? offsets[feature + 1] : batch_size; }
  // Where the ids of a bag begin, and those of the bag before it end.
  int64_t begin(int64_t feature, int64_t bag) const { return unpooled ? bag : offsets[feature * batch_size + bag]; }
  int64_t ids_of(int64_t feature) const { return offsets[(feature + 1) * batch_size] - offsets[feature * batch_size]; }
};

// Some adjacent bags of one feature.
struct BagTask {
  int64_t feature;
  int64_t first;
  int64_t last;
};

// Adds tasks of about ids_per_task ids each, for some bags, which have so many ids.
inline void add_bag_tasks(const BagTask& bags, int64_t ids, int64_t ids_per_task, std::vector<BagTask>& tasks) {
  const int64_t count = bags.last - bags.first;
  const int64_t pieces = std::clamp<int64_t>(ids / ids_per_task, 1, std::max<int64_t>(count, 1));
  for (int64_t piece = 0; piece < pieces && count > 0; ++piece) {
    tasks.push_back({bags.feature, bags.first + piece * count / pieces, bags.first + (piece + 1) * count / pieces});
  }
}

inline void add_bag_tasks(const BatchBags& bags, int64_t feature, int64_t ids_per_task, std::vector<BagTask>& tasks) {
  const BagTask all{feature, bags.first_of(feature), bags.end_of(feature)};
  add_bag_tasks(all, bags.ids_of(feature), ids_per_task, tasks);
}

// offsets: int64 [batch_size + 1], of the feature.
inline void add_bag_tasks(int64_t feature, const int64_t* offsets, int64_t batch_size, int64_t ids_per_task,
                          std::vector<BagTask>& tasks) {
  add_bag_tasks({feature, 0, batch_size}, offsets[batch_size] - offsets[0], ids_per_task, tasks);
}

}  // namespace recfx
