// at::parallel_for, also where it would never return: in a process that was forked.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

#include "forks.h"

namespace recfx {

// OpenMP's threads are not there in a child, and GNU's OpenMP waits for them for ever if the parent has used them.
template <typename Work>
void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const Work& work) {
  if (!is_forked_child()) {
    at::parallel_for(begin, end, grain_size, work);
  } else if (begin < end) {
    work(begin, end);
  }
}

}  // namespace recfx
