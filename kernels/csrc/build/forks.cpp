// See forks.h.
#include "build/forks.h"

#include <pthread.h>

#include <atomic>
#include <cstdint>

#include "index/index_lock.h"

namespace recfx {
namespace {

int64_t fork_cell = 0;  // held shared by whatever a fork must not interrupt, and exclusively during a fork
std::atomic<bool> forked{false};

void before_fork() { IndexLock(&fork_cell).lock(); }

void in_parent() { IndexLock(&fork_cell).unlock(); }

void in_child() {
  forked.store(true, std::memory_order_relaxed);
  IndexLock(&fork_cell).unlock();
}

const int registered = pthread_atfork(before_fork, in_parent, in_child);

}  // namespace

bool is_forked_child() { return forked.load(std::memory_order_relaxed); }

NoFork::NoFork() { IndexLock(&fork_cell).lock_shared(); }

NoFork::~NoFork() { IndexLock(&fork_cell).unlock_shared(); }

}  // namespace recfx
