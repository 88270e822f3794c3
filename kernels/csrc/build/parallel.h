// at::parallel_for that also works in a forked process, where at::parallel_for would never return.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

#include "build/forks.h"

namespace recfx {

// OpenMP's threads do not exist in a forked child, and GNU OpenMP waits for them forever if the parent has used them.
template <typename Work>
void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const Work& work) {
  if (!is_forked_child()) {
    at::parallel_for(begin, end, grain_size, work);
  } else if (begin < end) {
    work(begin, end);
  }
}

// Calls work(k) for each k below `count`, on all threads.
template <typename Work>
void parallel_for_each(int64_t count, const Work& work) {
  parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      work(k);
    }
  });
}

}  // namespace recfx
