// Groups the positions of a batch by the row that they looked up, for all tables of a lookup at once.
//
// The rows of a table are cut into bins of equal width, and adjacent bins joined to groups of some thousand positions,
// which fit a core's cache: one table with many positions becomes many groups, and each of many small tables one. A
// group is sorted by row when it is worked on. Everything is stable, so the positions of a row keep the order of the
// batch, whatever the number of threads. This file does not use torch.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bag_tasks.h"

namespace recfx {

constexpr int64_t kPositionsPerGroup = 2048;
constexpr int64_t kPositionsPerBin = 16;
constexpr int64_t kMostBins = 4096;
constexpr int64_t kMostTasksPerTable = 64;

// One position of a batch.
struct Position {
  uint32_t row;  // from the first row of its group
  uint32_t bag;  // k * B + b: sample b of the k-th feature of its table

  void set_scale(float) {}
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

struct PositionGroup {
  int64_t table;
  int64_t first_row;
  int bits;  // of the rows from first_row on
  int64_t begin;
  int64_t end;
};

template <typename position_t>
class RowGroups {
 public:
  // rows: of all positions; those of -1 are left out. offsets: int64 [F * B + 1].
  // scale_of(position, bag length): what multiplies the gradient.
  // run_tasks(ids, count, run): calls run(0) to run(count - 1), in any order, on any threads.
  template <typename ScaleOf, typename RunTasks>
  RowGroups(const int64_t* rows, const int64_t* offsets, int64_t batch_size, const std::vector<GroupedTable>& tables,
            const ScaleOf& scale_of, const RunTasks& run_tasks)
      : rows_(rows), offsets_(offsets), batch_size_(batch_size) {
    for (size_t t = 0; t < tables.size(); ++t) {
      add_table(static_cast<int64_t>(t), tables[t]);
    }
    positions_ = std::make_unique_for_overwrite<position_t[]>(total_);
    spare_ = std::make_unique_for_overwrite<position_t[]>(total_);
    counts_.resize(chunks_.empty() ? 0 : chunks_.back().counts + plans_[chunks_.back().plan].bins);
    run_tasks(total_, static_cast<int64_t>(chunks_.size()), [&](int64_t k) { count(chunks_[k]); });
    for (const Chunk& chunk : chunks_) {
      if (chunk.out_of_range) {
        out_of_range_ = plans_[chunk.plan].table;
        return;
      }
    }
    run_tasks(total_, static_cast<int64_t>(plans_.size()), [&](int64_t k) { plan(plans_[k]); });
    run_tasks(total_, static_cast<int64_t>(chunks_.size()), [&](int64_t k) { scatter(chunks_[k], scale_of); });
    for (Plan& plan : plans_) {
      groups_.insert(groups_.end(), plan.groups.begin(), plan.groups.end());
    }
  }

  const std::vector<PositionGroup>& groups() const { return groups_; }
  int64_t positions() const { return total_; }

  // A table that a position reads beyond its last row; -1 if there is none. There are no groups then.
  int64_t out_of_range() const { return out_of_range_; }

  // The positions of a group by row; those of one row in the order of the batch. One thread per group.
  const position_t* sorted(const PositionGroup& group) {
    position_t* from = positions_.get() + group.begin;
    position_t* to = spare_.get() + group.begin;
    const int64_t count = group.end - group.begin;
    const int passes = (group.bits + kDigitBits - 1) / kDigitBits;
    const int digit = passes == 0 ? 0 : (group.bits + passes - 1) / passes;
    for (int pass = 0; pass < passes; ++pass) {
      uint32_t starts[1 << kDigitBits] = {};
      const int shift = pass * digit;
      const uint32_t mask = (1U << digit) - 1;
      for (int64_t i = 0; i < count; ++i) {
        ++starts[(from[i].row >> shift) & mask];
      }
      uint32_t sum = 0;
      for (uint32_t value = 0; value <= mask; ++value) {
        sum += std::exchange(starts[value], sum);
      }
      for (int64_t i = 0; i < count; ++i) {
        to[starts[(from[i].row >> shift) & mask]++] = from[i];
      }
      std::swap(from, to);
    }
    return from;
  }

 private:
  static constexpr int kDigitBits = 8;

  // One table.
  struct Plan {
    int64_t table;
    int64_t begin;  // of its positions
    int shift;      // from a row to its bin
    int64_t bins;
    int64_t rows;
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
    bool out_of_range = false;
  };

  void add_table(int64_t table, const GroupedTable& described) {
    int64_t ids = 0;
    for (const int64_t feature : described.features) {
      ids += offsets_[(feature + 1) * batch_size_] - offsets_[feature * batch_size_];
    }
    if (ids == 0) {
      return;
    }
    const int64_t wanted = ids < 2 * kPositionsPerGroup ? 1 : std::min(ids / kPositionsPerBin, kMostBins);
    const int row_bits = std::bit_width(static_cast<uint64_t>(std::max<int64_t>(described.rows - 1, 0)));
    const int bin_bits = std::min(row_bits, static_cast<int>(std::bit_width(static_cast<uint64_t>(wanted))) - 1);
    const int shift = std::min(row_bits - bin_bits, 31);  // the rows of a bin are numbered in 32 bits
    const int64_t bins = std::max<int64_t>((described.rows - 1) >> shift, 0) + 1;
    const int64_t per_task = std::max(kIdsPerTask, ids / kMostTasksPerTable);
    const size_t first = chunks_.size();
    for (size_t number = 0; number < described.features.size(); ++number) {
      std::vector<BagTask> tasks;
      const int64_t feature = described.features[number];
      add_bag_tasks(feature, offsets_ + feature * batch_size_, batch_size_, per_task, tasks);
      for (const BagTask& task : tasks) {
        chunks_.push_back({plans_.size(), task, static_cast<int64_t>(number), counts_end_});
        counts_end_ += bins;
      }
    }
    plans_.push_back({table, total_, shift, bins, described.rows, first, chunks_.size(), {}, {}});
    total_ += ids;
  }

  void count(Chunk& chunk) {
    const Plan& plan = plans_[chunk.plan];
    const int64_t* offsets = offsets_ + chunk.bags.feature * batch_size_;
    uint32_t* counts = counts_.data() + chunk.counts;
    for (int64_t i = offsets[chunk.bags.first]; i < offsets[chunk.bags.last]; ++i) {
      const int64_t row = rows_[i];
      if (row >= plan.rows) {
        chunk.out_of_range = true;
        return;
      }
      if (row >= 0) {
        ++counts[row >> plan.shift];
      }
    }
  }

  void plan(Plan& plan) {
    plan.group_of_bin.resize(plan.bins);
    std::vector<uint64_t> totals(plan.bins);
    for (size_t k = plan.first_chunk; k < plan.last_chunk; ++k) {
      const uint32_t* counts = counts_.data() + chunks_[k].counts;
      for (int64_t bin = 0; bin < plan.bins; ++bin) {
        totals[bin] += counts[bin];
      }
    }
    int64_t begin = plan.begin, end = plan.begin, first_bin = 0;
    for (int64_t bin = 0; bin < plan.bins; ++bin) {
      plan.group_of_bin[bin] = static_cast<uint32_t>(plan.groups.size());
      end += static_cast<int64_t>(totals[bin]);
      const int64_t rows = (bin + 1 - first_bin) << plan.shift;
      const bool is_full = end - begin >= kPositionsPerGroup || rows > (int64_t{1} << 31);
      if (is_full || bin + 1 == plan.bins) {
        const int bits = std::bit_width(static_cast<uint64_t>(std::min(rows, plan.rows) - 1));
        plan.groups.push_back({plan.table, first_bin << plan.shift, bits, begin, end});
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

  template <typename ScaleOf>
  void scatter(Chunk& chunk, const ScaleOf& scale_of) {
    const Plan& plan = plans_[chunk.plan];
    const int64_t* offsets = offsets_ + chunk.bags.feature * batch_size_;
    uint32_t* next = counts_.data() + chunk.counts;
    position_t* positions = positions_.get() + plan.begin;
    for (int64_t sample = chunk.bags.first; sample < chunk.bags.last; ++sample) {
      const auto bag = static_cast<uint32_t>(chunk.number * batch_size_ + sample);
      for (int64_t i = offsets[sample]; i < offsets[sample + 1]; ++i) {
        if (rows_[i] >= 0) {
          const uint32_t group = plan.group_of_bin[rows_[i] >> plan.shift];
          position_t position{};
          position.row = static_cast<uint32_t>(rows_[i] - plan.groups[group].first_row);
          position.bag = bag;
          if constexpr (position_t::kScaled) {
            position.set_scale(scale_of(i, offsets[sample + 1] - offsets[sample]));
          }
          positions[next[group]++] = position;
        }
      }
    }
  }

  const int64_t* rows_;
  const int64_t* offsets_;
  int64_t batch_size_;
  int64_t total_ = 0;
  int64_t out_of_range_ = -1;
  size_t counts_end_ = 0;
  std::vector<Plan> plans_;
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> counts_;
  std::unique_ptr<position_t[]> positions_;
  std::unique_ptr<position_t[]> spare_;
  std::vector<PositionGroup> groups_;
};

}  // namespace recfx
