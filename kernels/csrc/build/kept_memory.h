// Memory for what one batch needs while it is worked on, kept for the next batch of the same thread: the system takes
// longer to provide it anew than it takes to fill it. This file does not use torch.
#pragma once

#include <cstdint>
#include <vector>

namespace recfx {

// Each Purpose has memory of its own, so that two uses within one batch do not meet.
template <typename Purpose>
int64_t* kept_memory(int64_t numbers) {
  static thread_local std::vector<int64_t> kept;
  if (static_cast<int64_t>(kept.size()) < numbers) {
    kept.resize(numbers);
  }
  return kept.data();
}

}  // namespace recfx
