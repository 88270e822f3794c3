// Ids that are rows themselves. This file does not use torch.
#pragma once

#include <cstdint>

namespace recfx {

// The dense ids [begin, begin + rows), which are rows themselves, in this order. Other ids are looked up.
struct DenseIds {
  int64_t rows;
  int64_t begin = 0;
};

}  // namespace recfx
