#include "watcher.h"

#include <cstdio>
#include <exception>
#include <utility>

namespace serve {

void say_version(const char* what, const ServedModel& model) {
  const FileStamp stamp = model.stamp();
  const auto written = std::chrono::seconds(stamp.seconds) + std::chrono::nanoseconds(stamp.nanoseconds);
  const std::chrono::duration<double> age = std::chrono::system_clock::now().time_since_epoch() - written;
  const std::string number = model.in_chain() ? std::to_string(model.in_chain()->number) : "-";
  std::fprintf(stderr, "%s\t%s\t%s\t%s\t%.3f\n", what, model.version().c_str(), number.c_str(), model.path().c_str(),
               age.count());
}

Watcher::Watcher(std::string path, double seconds, const std::string& deltas, CurrentModel& current)
    : path_(std::move(path)),
      reloads_(seconds > 0),
      every_(reloads_ ? seconds : 1),
      current_(current),
      seen_(current.get()->stamp()) {
  if (!deltas.empty()) {
    deltas_.emplace(deltas);
    apply_deltas();
  }
  if (reloads_ || deltas_) {
    thread_ = std::thread([this] { run(); });
  }
}

Watcher::~Watcher() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Watcher::run() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, every_, [this] { return stops_; })) {
    lock.unlock();
    if (reloads_) {
      reload();
    }
    if (deltas_) {
      apply_deltas();
    }
    lock.lock();
  }
}

bool Watcher::stops() {
  const std::lock_guard lock(mutex_);
  return stops_;
}

void Watcher::reload() {
  const FileStamp found = stamp_at(path_);
  if (found == seen_ || found == FileStamp()) {
    return;
  }
  seen_ = found;
  try {
    const auto model = std::make_shared<const ServedModel>(path_, current_.get().get());
    seen_ = model->stamp();
    model->warm_up();
    current_.set(model);
    say_version("reloaded", *model);
  } catch (const std::exception& error) {
    const std::string why = error.what();
    if (found != failed_ || why != why_failed_) {
      std::fprintf(stderr, "not reloaded\t%s\n", why.c_str());
    }
    failed_ = found;
    why_failed_ = why;
    for (const char* reason : {"[no_file]", "[cannot_read]", "[out_of_memory]"}) {
      if (why.ends_with(reason)) {
        seen_ = FileStamp();  // it may be loaded soon, without becoming another file
      }
    }
  }
}

// One after the other, until none follows what is served, or one cannot be applied.
void Watcher::apply_deltas() {
  while (!stops()) {
    const std::shared_ptr<const ServedModel> served = current_.get();
    const std::optional<std::string> path = deltas_->next(served->in_chain());
    if (!path) {
      return;
    }
    try {
      const std::shared_ptr<const ServedModel> next = served->with_delta(*path);
      current_.set(next);
      say_version("applied", *next);
      deltas_->done(*path);
    } catch (const std::exception& error) {
      deltas_->refuse(*path, error.what());
      return;
    }
  }
}

}  // namespace serve
