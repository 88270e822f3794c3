// Newer versions while serving: another file in the place of the model's, and deltas.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "deltas.h"
#include "served_model.h"

namespace serve {

// Says on standard error which version there is now: its eight digits, its number in the chain, its file, and the
// seconds since that was written.
void say_version(const char* what, const ServedModel& model);

// The model that new requests are answered by. Requests that have begun keep the one that they have.
class CurrentModel {
 public:
  explicit CurrentModel(std::shared_ptr<const ServedModel> model) : model_(std::move(model)) {}

  std::shared_ptr<const ServedModel> get() const {
    const std::lock_guard lock(mutex_);
    return model_;
  }

  void set(std::shared_ptr<const ServedModel> model) {
    const std::lock_guard lock(mutex_);
    model_.swap(model);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const ServedModel> model_;
};

// Loads a newer file and applies deltas as soon as they are there, in a thread of its own. What cannot be loaded
// changes nothing but the log.
class Watcher {
 public:
  // Looks for a newer file at `path` every `seconds`, unless they are 0, and for deltas in a folder, unless its name is
  // empty. Those that are there already are applied before it returns, so that a server that is started again does not
  // go back to the base.
  Watcher(std::string path, double seconds, const std::string& deltas, CurrentModel& current);
  ~Watcher();

 private:
  void run();
  void reload();
  void apply_deltas();
  bool stops();

  const std::string path_;
  const bool reloads_;
  const std::chrono::duration<double> every_;
  CurrentModel& current_;
  std::optional<DeltaFolder> deltas_;
  FileStamp seen_;
  FileStamp failed_;  // and why: said once
  std::string why_failed_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stops_ = false;
  std::thread thread_;
};

}  // namespace serve
