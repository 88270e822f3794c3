// Groups the positions of a batch by the row that they looked up, for all tables of a lookup at once.
//
// A group is sorted by row when it is worked on, in a core's cache. A table with few positions is one group. The rows
// of a table with many are cut into bins of equal width, and adjacent bins joined to groups. Everything is stable, so
// the positions of a row keep the order of the batch, whatever the size of groups and the number of threads. This file
// does not use torch.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lookup/bag_tasks.h"

namespace recfx {

constexpr int64_t kFewestPerGroup = 2048;
constexpr int64_t kMostPerGroup = 24576;  // half a megabyte with the space to sort them
constexpr int64_t kGroupsPerThread = 8;   // so that the last ones to finish are not waited for
constexpr int64_t kPositionsPerBin = 16;
constexpr int64_t kMostBins = 4096;
constexpr int64_t kMostTasksPerTable = 64;

// One position of a batch.
struct Position {
  uint32_t row;  // from the first row of its group
  uint32_t bag;  // k * B + b: sample b of the k-th feature of its table; the id's number if rows are not pooled

  static constexpr float scale() { return 1.0F; }
  static constexpr bool kScaled = false;
};

struct ScaledPosition {
  uint32_t row;
  uint32_t bag;
  float by;  // what multiplies the bag's gradient

  void set_scale(float given) { by = given; }
  float scale() const { return by; }
  static constexpr bool kScaled = true;
};

// One table, as far as its rows go.
struct GroupedTable {
  int64_t rows;
  std::vector<int64_t> features;  // that read it, ascending; none if its positions are left out
};

// A row that its table does not have.
struct RowBeyond {
  int64_t table;
  int64_t row;
};

struct PositionGroup {
  int64_t table;
  size_t plan;
  int64_t first_row;
  int bits;  // of the rows from first_row on
  int64_t begin;
  int64_t end;
};

// Sorts by row, stably, and returns where the result is: at `from` or at `to`.
template <typename position_t>
position_t* sort_by_row(position_t* from, position_t* to, int64_t count, int bits) {
  constexpr int kDigitBits = 9;
  constexpr int kMostPasses = (32 + kDigitBits - 1) / kDigitBits;
  constexpr int64_t kInsertUpTo = 24;
  if (count <= kInsertUpTo) {
    for (int64_t i = 1; i < count; ++i) {
      const position_t position = from[i];
      int64_t k = i;
      for (; k > 0 && from[k - 1].row > position.row; --k) {
        from[k] = from[k - 1];
      }
      from[k] = position;
    }
    return from;
  }
  const int passes = (bits + kDigitBits - 1) / kDigitBits;
  const int digit = passes == 0 ? 0 : (bits + passes - 1) / passes;
  const uint32_t mask = (1U << digit) - 1;
  uint32_t starts[kMostPasses][1 << kDigitBits];
  for (int pass = 0; pass < passes; ++pass) {
    std::fill(starts[pass], starts[pass] + mask + 1, 0);
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int pass = 0; pass < passes; ++pass) {
      ++starts[pass][(from[i].row >> (pass * digit)) & mask];
    }
  }
  for (int pass = 0; pass < passes; ++pass) {
    uint32_t sum = 0;
    for (uint32_t value = 0; value <= mask; ++value) {
      sum += std::exchange(starts[pass][value], sum);
    }
    for (int64_t i = 0; i < count; ++i) {
      to[starts[pass][(from[i].row >> (pass * digit)) & mask]++] = from[i];
    }
    std::swap(from, to);
  }
  return from;
}

// The positions of one group: [begin, end).
template <typename position_t>
struct SortedPositions {
  const position_t* begin;
  const position_t* end;
};

template <typename position_t, typename ScaleOf>
class RowGroups {
 public:
  // rows: of all positions; those of -1 are left out.
  // scale_of(position, bag length): what multiplies the gradient.
  // run_tasks(ids, count, run): calls run(0) to run(count - 1), in any order, on any of the threads.
  template <typename RunTasks>
  RowGroups(const int64_t* rows, const BatchBags& batch, const std::vector<GroupedTable>& tables,
            const ScaleOf& scale_of, int64_t threads, const RunTasks& run_tasks)
      : rows_(rows), batch_(batch), tables_(tables), scale_of_(scale_of) {
    for (const GroupedTable& table : tables) {
      total_ += ids_of(table);
    }
    per_group_ = std::clamp(total_ / (threads * kGroupsPerThread), kFewestPerGroup, kMostPerGroup);
    for (size_t t = 0; t < tables.size(); ++t) {
      add_table(static_cast<int64_t>(t));
    }
    positions_ = std::make_unique_for_overwrite<position_t[]>(total_);
    spare_ = std::make_unique_for_overwrite<position_t[]>(total_);
    counts_.resize(counts_end_);
    run_tasks(total_, static_cast<int64_t>(chunks_.size()), [&](int64_t k) { count(chunks_[k]); });
    for (const Chunk& chunk : chunks_) {
      if (chunk.beyond >= 0) {
        beyond_ = {plans_[chunk.plan].table, chunk.beyond};
        return;
      }
    }
    const auto plans = static_cast<int64_t>(plans_.size());
    const auto chunks = static_cast<int64_t>(chunks_.size());
    if (counts_end_ > 0) {
      run_tasks(total_, plans, [&](int64_t k) { cut(plans_[k]); });
      run_tasks(total_, chunks, [&](int64_t k) { scatter(chunks_[k]); });
    }
    for (const Plan& plan : plans_) {
      groups_.insert(groups_.end(), plan.groups.begin(), plan.groups.end());
    }
  }

  const std::vector<PositionGroup>& groups() const { return groups_; }
  int64_t positions() const { return total_; }

  // A position that reads beyond the last row of its table. There are no groups then.
  const std::optional<RowBeyond>& beyond() const { return beyond_; }

  // The positions of a group by row; those of one row in the order of the batch. One thread per group.
  SortedPositions<position_t> sorted(const PositionGroup& group) {
    position_t* from = positions_.get() + group.begin;
    position_t* end = positions_.get() + group.end;
    if (plans_[group.plan].bins == 0) {
      end = from;
      const GroupedTable& table = tables_[group.table];
      for (size_t number = 0; number < table.features.size(); ++number) {
        const int64_t feature = table.features[number];
        const BagTask all{feature, batch_.first_of(feature), batch_.end_of(feature)};
        for_positions(all, static_cast<int64_t>(number), [&](int64_t row, const position_t& position) {
          *end = position;
          end->row = static_cast<uint32_t>(row);
          end += row >= 0;
        });
      }
    }
    const int64_t count = end - from;
    const position_t* begin = sort_by_row(from, spare_.get() + group.begin, count, group.bits);
    return {begin, begin + count};
  }

 private:
  // One table.
  struct Plan {
    int64_t table;
    int64_t begin;  // of its positions
    int shift;      // from a row to its bin
    int64_t bins;   // 0: the table is one group
    size_t first_chunk;
    size_t last_chunk;
    std::vector<uint32_t> group_of_bin;
    std::vector<PositionGroup> groups;
  };

  // Some bags of one feature. `counts` are first the positions of each bin, and then where those of each group go.
  struct Chunk {
    size_t plan;
    BagTask bags;
    int64_t number;  // of the feature among those of its table
    size_t counts;
    int64_t beyond = -1;  // the largest row, if the table does not have it
  };

  int64_t ids_of(const GroupedTable& table) const {
    int64_t ids = 0;
    for (const int64_t feature : table.features) {
      ids += batch_.ids_of(feature);
    }
    return ids;
  }

  void add_table(int64_t number) {
    const GroupedTable& table = tables_[number];
    const int64_t ids = ids_of(table);
    if (ids == 0) {
      return;
    }
    const auto last_row = static_cast<uint64_t>(std::max<int64_t>(table.rows - 1, 0));
    const int row_bits = std::bit_width(last_row);
    const bool is_one_group = ids <= per_group_ && row_bits <= 32;
    const int64_t wanted = std::clamp<int64_t>(ids / kPositionsPerBin, 1, kMostBins);
    const int bin_bits = std::min(row_bits, static_cast<int>(std::bit_width(static_cast<uint64_t>(wanted))) - 1);
    const int shift = std::min(row_bits - bin_bits, 31);  // the rows of a bin are numbered in 32 bits
    const int64_t bins = is_one_group ? 0 : static_cast<int64_t>(last_row >> shift) + 1;
    const int64_t per_task = std::max(kIdsPerTask, ids / kMostTasksPerTable);
    const size_t first = chunks_.size(), plan = plans_.size();
    for (size_t k = 0; k < table.features.size(); ++k) {
      std::vector<BagTask> tasks;
      add_bag_tasks(batch_, table.features[k], per_task, tasks);
      for (const BagTask& task : tasks) {
        chunks_.push_back({plan, task, static_cast<int64_t>(k), counts_end_});
        counts_end_ += bins;
      }
    }
    plans_.push_back({number, placed_, shift, bins, first, chunks_.size(), {}, {}});
    if (is_one_group) {
      plans_.back().groups.push_back({number, plan, 0, row_bits, placed_, placed_ + ids});
    }
    placed_ += ids;
  }

  // Calls run(row, position) for all positions of some bags, also for those of row -1.
  template <typename Run>
  void for_positions(const BagTask& bags, int64_t number, const Run& run) const {
    position_t position{};
    if (batch_.unpooled) {
      for (int64_t i = bags.first; i < bags.last; ++i) {
        position.bag = static_cast<uint32_t>(i);
        run(rows_[i], position);
      }
      return;
    }
    const int64_t* offsets = batch_.offsets + bags.feature * batch_.batch_size;
    for (int64_t sample = bags.first; sample < bags.last; ++sample) {
      position.bag = static_cast<uint32_t>(number * batch_.batch_size + sample);
      for (int64_t i = offsets[sample]; i < offsets[sample + 1]; ++i) {
        if constexpr (position_t::kScaled) {
          position.set_scale(scale_of_(i, offsets[sample + 1] - offsets[sample]));
        }
        run(rows_[i], position);
      }
    }
  }

  void count(Chunk& chunk) {
    const Plan& plan = plans_[chunk.plan];
    const int64_t begin = batch_.begin(chunk.bags.feature, chunk.bags.first);
    const int64_t end = batch_.begin(chunk.bags.feature, chunk.bags.last);
    int64_t largest = -1;
    for (int64_t i = begin; i < end; ++i) {
      largest = std::max(largest, rows_[i]);
    }
    if (largest >= tables_[plan.table].rows) {
      chunk.beyond = largest;
      return;
    }
    if (plan.bins == 0) {
      return;
    }
    uint32_t* counts = counts_.data() + chunk.counts;
    for (int64_t i = begin; i < end; ++i) {
      if (rows_[i] >= 0) {
        ++counts[rows_[i] >> plan.shift];
      }
    }
  }

  // Joins bins to groups.
  void cut(Plan& plan) {
    if (plan.bins == 0) {
      return;
    }
    plan.group_of_bin.resize(plan.bins);
    std::vector<uint64_t> totals(plan.bins);
    for (size_t k = plan.first_chunk; k < plan.last_chunk; ++k) {
      const uint32_t* counts = counts_.data() + chunks_[k].counts;
      for (int64_t bin = 0; bin < plan.bins; ++bin) {
        totals[bin] += counts[bin];
      }
    }
    const size_t number = static_cast<size_t>(&plan - plans_.data());
    const int64_t last_row = std::max<int64_t>(tables_[plan.table].rows - 1, 0);
    int64_t begin = plan.begin, end = plan.begin, first_bin = 0;
    for (int64_t bin = 0; bin < plan.bins; ++bin) {
      plan.group_of_bin[bin] = static_cast<uint32_t>(plan.groups.size());
      end += static_cast<int64_t>(totals[bin]);
      const int64_t rows = (bin + 1 - first_bin) << plan.shift;
      const bool is_full = end - begin >= per_group_ || rows > (int64_t{1} << 31);
      if (is_full || bin + 1 == plan.bins) {
        const int bits = std::bit_width(static_cast<uint64_t>(std::min(rows - 1, last_row)));
        plan.groups.push_back({plan.table, number, first_bin << plan.shift, bits, begin, end});
        begin = end;
        first_bin = bin + 1;
      }
    }
    std::vector<int64_t> next;
    for (const PositionGroup& group : plan.groups) {
      next.push_back(group.begin - plan.begin);
    }
    for (size_t k = plan.first_chunk; k < plan.last_chunk; ++k) {
      uint32_t* counts = counts_.data() + chunks_[k].counts;
      size_t group = 0;
      for (int64_t bin = 0; bin < plan.bins;) {
        int64_t sum = 0;
        for (; bin < plan.bins && plan.group_of_bin[bin] == group; ++bin) {
          sum += counts[bin];
        }
        counts[group] = static_cast<uint32_t>(next[group]);  // there are no more groups than bins so far
        next[group++] += sum;
      }
    }
  }

  void scatter(const Chunk& chunk) {
    const Plan& plan = plans_[chunk.plan];
    if (plan.bins == 0) {
      return;
    }
    uint32_t* next = counts_.data() + chunk.counts;
    position_t* positions = positions_.get() + plan.begin;
    for_positions(chunk.bags, chunk.number, [&](int64_t row, const position_t& position) {
      if (row >= 0) {
        const uint32_t group = plan.group_of_bin[row >> plan.shift];
        position_t& placed = positions[next[group]++];
        placed = position;
        placed.row = static_cast<uint32_t>(row - plan.groups[group].first_row);
      }
    });
  }

  const int64_t* rows_;
  const BatchBags batch_;
  const std::vector<GroupedTable>& tables_;
  const ScaleOf scale_of_;
  int64_t total_ = 0;
  int64_t per_group_ = 0;
  int64_t placed_ = 0;
  std::optional<RowBeyond> beyond_;
  size_t counts_end_ = 0;
  std::vector<Plan> plans_;
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> counts_;
  std::unique_ptr<position_t[]> positions_;
  std::unique_ptr<position_t[]> spare_;
  std::vector<PositionGroup> groups_;
};

}  // namespace recfx
