// Ids that are to be inserted into an index's slot groups or erased from them, by several threads at once. This file
// does not use torch.
#pragma once

#include <cstdint>
#include <vector>

#include "index/slot_groups.h"

namespace recfx {

// The groups are divided into ranges of equal size. Each range is changed by one thread, which leaves alone what
// concerns groups beyond the end of its range; that is done afterwards. What the groups hold in the end, and where,
// does not depend on the number of threads.
class SlotChanges {
 public:
  void divide(int64_t ranges) { of_range_.resize(ranges); }

  void insert(const SlotGroups& groups, int64_t id, int64_t row) { add(groups, {id, row}); }
  void erase(const SlotGroups& groups, int64_t id) { add(groups, {id, kNoRow}); }

  // Makes the changes of one range, except for those that concern groups of others. Cannot fail.
  void make(SlotGroups& groups, size_t range) {
    constexpr size_t kAhead = 16;
    const uint64_t end = (range + 1) * groups.count() / of_range_.size();
    std::vector<Change>& changes = of_range_[range];
    size_t left = 0;
    for (size_t i = 0; i < changes.size(); ++i) {
      if (i + kAhead < changes.size()) {
        groups.prefetch(groups.home(changes[i + kAhead].id));
      }
      const Change each = changes[i];
      if (groups.stays_before(each.id, end)) {
        make_one(groups, each);
      } else {
        changes[left++] = each;
      }
    }
    changes.resize(left);
  }

  // Makes the changes that are left, when all ranges of all parts of the table have been done. Cannot fail.
  void make_rest(SlotGroups& groups) {
    for (const std::vector<Change>& changes : of_range_) {
      for (const Change& each : changes) {
        make_one(groups, each);
      }
    }
  }

 private:
  struct Change {
    int64_t id;
    int64_t row;  // kNoRow: the id is erased
  };

  static void make_one(SlotGroups& groups, const Change& change) {
    if (change.row == kNoRow) {
      groups.erase(change.id);
    } else {
      groups.insert(change.id, change.row);
    }
  }

  void add(const SlotGroups& groups, Change change) {
    const size_t range = groups.home(change.id) * of_range_.size() / groups.count();
    of_range_[range].push_back(change);
  }

  std::vector<std::vector<Change>> of_range_;
};

}  // namespace recfx
