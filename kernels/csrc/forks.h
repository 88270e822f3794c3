// What a process may do while it forks, and what is different in the child. No torch in here.
#pragma once

namespace recfx {

// Whether the process was forked since the library was loaded.
bool is_forked_child();

// Holding one keeps other threads from forking: a child made meanwhile would find locks held that nobody lets go, and
// indexes half changed. fork() waits until nobody holds one, and nobody gets one until it is done.
class NoFork {
 public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
};

}  // namespace recfx
