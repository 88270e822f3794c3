// Checks tensors, and turns them into the plain pointers and views that the loops take.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "index_lock.h"
#include "slot_table.h"

namespace recfx {

inline int64_t* int64_data(const at::Tensor& tensor, const char* name, int64_t dimensions = 1) {
  TORCH_CHECK(tensor.device().is_cpu(), "recfx: ", name, " must be on the CPU, got ", tensor.device());
  TORCH_CHECK(tensor.scalar_type() == at::kLong, "recfx: ", name, " must be int64, got ", tensor.scalar_type());
  TORCH_CHECK(tensor.dim() == dimensions, "recfx: ", name, " must have ", dimensions, " dimension(s), got ",
              tensor.dim());
  TORCH_CHECK(tensor.is_contiguous(), "recfx: ", name, " must be contiguous");
  return static_cast<int64_t*>(tensor.data_ptr());
}

inline SlotTable slot_table(const at::Tensor& slots, const at::Tensor& side_row) {
  static_assert(sizeof(Slot) == 2 * sizeof(int64_t));
  int64_t* data = int64_data(slots, "slots", 2);
  const int64_t count = slots.size(0);
  TORCH_CHECK(slots.size(1) == 2, "recfx: slots must be [slots, 2], got ", slots.sizes());
  TORCH_CHECK(count > 0 && (count & (count - 1)) == 0, "recfx: slots must be a power of two, got ", count);
  int64_t* side = int64_data(side_row, "side_row");
  TORCH_CHECK(side_row.numel() == 1, "recfx: side_row must be [1], got ", side_row.sizes());
  return {reinterpret_cast<Slot*>(data), count, side};
}

inline IndexLock index_lock(const at::Tensor& lock) {
  TORCH_CHECK(lock.numel() == 1, "recfx: lock must be [1], got ", lock.sizes());
  return IndexLock(int64_data(lock, "lock"));
}

}  // namespace recfx
