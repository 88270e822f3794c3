// Checks tensors, and turns them into the plain pointers and views that the loops take.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "index/index_lock.h"
#include "index/slot_groups.h"

namespace recfx {

inline int64_t* int64_data(const at::Tensor& tensor, const char* name, int64_t dimensions = 1) {
  TORCH_CHECK(tensor.device().is_cpu(), "recfx: ", name, " must be on the CPU, got ", tensor.device());
  TORCH_CHECK(tensor.scalar_type() == at::kLong, "recfx: ", name, " must be int64, got ", tensor.scalar_type());
  TORCH_CHECK(tensor.dim() == dimensions, "recfx: ", name, " must have ", dimensions, " dimension(s), got ",
              tensor.dim());
  TORCH_CHECK(tensor.is_contiguous(), "recfx: ", name, " must be contiguous");
  return static_cast<int64_t*>(tensor.data_ptr());
}

inline SlotGroups slot_groups(const at::Tensor& groups, const at::Tensor& side_row) {
  static_assert(sizeof(SlotGroup) == 2 * kGroupSlots * sizeof(int64_t));
  int64_t* data = int64_data(groups, "slot_groups", 2);
  const int64_t count = groups.size(0);
  TORCH_CHECK(groups.size(1) == 2 * kGroupSlots, "recfx: slot_groups must be [groups, ", 2 * kGroupSlots, "], got ",
              groups.sizes());
  TORCH_CHECK(0 < count && count <= (int64_t{1} << 32), "recfx: there must be 1 to 2 ** 32 slot groups, got ", count);
  int64_t* side = int64_data(side_row, "side_row");
  TORCH_CHECK(side_row.numel() == 2, "recfx: side_row must be [2], got ", side_row.sizes());
  return {reinterpret_cast<SlotGroup*>(data), count, side};
}

inline IndexLock index_lock(const at::Tensor& lock) {
  TORCH_CHECK(lock.numel() == 1, "recfx: lock must be [1], got ", lock.sizes());
  return IndexLock(int64_data(lock, "lock"));
}

}  // namespace recfx
