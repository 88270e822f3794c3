// What a process may do while it forks, and what is different in the child. This file does not use torch.
#pragma once

namespace recfx {

// Whether this process was forked after the library had been loaded.
bool is_forked_child();

// While an object of this class exists, other threads cannot fork: the child would find locks that nobody releases, and
// half-changed indexes. fork() waits until no object is left, and the constructor waits until a fork is done.
class NoFork {
 public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
};

}  // namespace recfx
