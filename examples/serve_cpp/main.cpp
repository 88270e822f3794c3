// Serves an exported model without Python: reads requests, and prints answers.

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "bench.h"
#include "errors.h"
#include "input.h"
#include "requests.h"
#include "served_model.h"
#include "watcher.h"

namespace serve {
namespace {

constexpr const char* kUsage = R"(usage: recfx_serve MODEL [options]          answer requests
       recfx_serve --check MODEL...            say of each file whether it can be loaded
options:
  --requests FILE   where requests are read from; default: standard input. requests.h describes them
  --threads N       threads that answer requests; default: 1
  --watch SECONDS   look for a newer file at MODEL this often, and load it while the old one serves
  --deltas DIR      apply the deltas in this folder, and those that are put there while the server runs; they are looked
                    for as often as the file, or every second without --watch
  --bench SECONDS   print no answers, but how fast they are with 1, 2, ... N threads (default: 2), SECONDS each
  --inputs          print the names of the inputs, and nothing else
  --fbgemm DIR      where FBGEMM's libraries are; default: )" FBGEMM_DIR R"(
  --library FILE    another library with operators, for a model that was exported with portable=False
)";

struct Options {
  std::vector<std::string> models, libraries;
  std::string requests = "-", deltas, fbgemm = FBGEMM_DIR;
  int threads = 0;
  double watch = 0, bench = 0;
  bool check = false, inputs = false, help = false;
};

// The value of an option; the whole text is a number from `least` to `most`. Throws std::invalid_argument.
template <typename Number>
Number number(const std::string& option, const std::string& text, Number least, Number most) {
  Number found{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
  if (error != std::errc() || end != text.data() + text.size() || !(least <= found && found <= most)) {
    throw std::invalid_argument(option + " takes a number from " + std::to_string(static_cast<int64_t>(least)) +
                                " to " + std::to_string(static_cast<int64_t>(most)) + ", not '" + text + "'");
  }
  return found;
}

// Throws std::invalid_argument, which says what is wrong.
Options parse(const std::vector<std::string>& arguments) {
  constexpr double kLongest = 1e6;  // seconds
  Options options;
  for (size_t at = 0; at < arguments.size(); ++at) {
    const std::string& name = arguments[at];
    const auto value = [&]() -> const std::string& {
      if (++at == arguments.size()) {
        throw std::invalid_argument(name + " needs a value");
      }
      return arguments[at];
    };
    if (name == "--requests") {
      options.requests = value();
    } else if (name == "--threads") {
      options.threads = number(name, value(), 1, 1024);
    } else if (name == "--watch") {
      options.watch = number(name, value(), 0.0, kLongest);
    } else if (name == "--deltas") {
      options.deltas = value();
    } else if (name == "--bench") {
      options.bench = number(name, value(), 0.0, kLongest);
    } else if (name == "--fbgemm") {
      options.fbgemm = value();
    } else if (name == "--library") {
      options.libraries.push_back(value());
    } else if (name == "--check") {
      options.check = true;
    } else if (name == "--inputs") {
      options.inputs = true;
    } else if (name == "--help" || name == "-h") {
      options.help = true;
    } else if (name.starts_with("--")) {
      throw std::invalid_argument("there is no option " + name);
    } else {
      options.models.push_back(name);
    }
  }
  const bool has_models = options.check ? !options.models.empty() : options.models.size() == 1;
  if (!has_models && !options.help) {
    throw std::invalid_argument(options.check ? "--check needs files" : "it takes one file");
  }
  return options;
}

// Requests that wait for a thread: few, so that whoever sends them waits when the server does not keep up.
class Queue {
 public:
  void push(Request request) {
    std::unique_lock lock(mutex_);
    changed_.wait(
        lock, [&] { return waiting_.empty() || (waiting_.size() < kMost && bytes_ + request.bytes <= kMostBytes); });
    bytes_ += request.bytes;
    waiting_.push_back(std::move(request));
    changed_.notify_all();
  }

  void close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
  }

  // Nothing when the queue is closed and empty.
  std::optional<Request> pop() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !waiting_.empty() || is_closed_; });
    if (waiting_.empty()) {
      return std::nullopt;
    }
    Request request = std::move(waiting_.front());
    waiting_.pop_front();
    bytes_ -= request.bytes;
    changed_.notify_all();
    return request;
  }

 private:
  static constexpr size_t kMost = 64, kMostBytes = size_t{1} << 28;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> waiting_;
  size_t bytes_ = 0;
  bool is_closed_ = false;
};

std::string answer(const ServedModel& model, Request& request) {
  parse_inputs(request);
  if (!request.error.empty()) {
    return format_error(request, "-", request.error);
  }
  try {
    return format_answer(request, model.version(), model.serve(std::move(request.inputs)));
  } catch (const RequestError& error) {
    return format_error(request, model.version(), error.what());
  } catch (const std::bad_alloc&) {
    return format_error(request, model.version(), "there is no memory for the answer [request_failed]");
  }
}

void print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    std::fprintf(stderr, "error\tanswers cannot be written: %s [no_output]\n", std::strerror(errno));
    std::_Exit(1);  // rather than lose them
  }
}

// Threads that answer what is in a queue, until it is closed.
class Workers {
 public:
  Workers(Queue& queue, const CurrentModel& current, int threads) : queue_(queue), current_(current) {
    try {
      for (int thread = 0; thread < threads; ++thread) {
        running_.emplace_back([this] { work(); });
      }
    } catch (const std::system_error& error) {
      end();
      throw std::runtime_error("thread " + std::to_string(running_.size() + 1) + " of " + std::to_string(threads) +
                               " cannot be started: " + error.what() + " [no_threads]");
    }
  }

  ~Workers() { end(); }

  // Wait until everything in the queue is answered.
  void end() {
    queue_.close();
    for (std::thread& each : running_) {
      if (each.joinable()) {
        each.join();
      }
    }
  }

  // How many requests were answered, and how fast the last of them.
  std::string summary() { return std::to_string(answered_) + " requests, " + percentiles(latencies_); }

 private:
  static constexpr size_t kMostLatencies = 1 << 16;  // so that a server that runs for days needs no more memory

  void work() {
    while (std::optional<Request> request = queue_.pop()) {
      const auto begin = std::chrono::steady_clock::now();
      const std::string text = answer(*current_.get(), *request);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      const std::lock_guard lock(printing_);
      print(text);
      if (latencies_.size() < kMostLatencies) {
        latencies_.push_back(took.count());
      } else {
        latencies_[answered_ % kMostLatencies] = took.count();
      }
      ++answered_;
    }
  }

  Queue& queue_;
  const CurrentModel& current_;
  std::mutex printing_;
  size_t answered_ = 0;
  std::vector<double> latencies_;
  std::vector<std::thread> running_;
};

// If reading fails, what was read before is still answered.
void serve_requests(RequestReader& reader, const CurrentModel& current, int threads) {
  Queue queue;
  Workers workers(queue, current, threads);
  while (std::optional<Request> request = reader.next()) {
    queue.push(std::move(*request));
  }
  workers.end();
  std::fprintf(stderr, "served\t%s\n", workers.summary().c_str());
}

void bench_requests(RequestReader& reader, const ServedModel& model, int threads, double seconds) {
  std::vector<Request> requests;
  while (std::optional<Request> request = reader.next()) {
    parse_inputs(*request);
    if (!request->error.empty()) {
      throw RequestError("request " + request->id + ": " + request->error);
    }
    requests.push_back(std::move(*request));
  }
  if (requests.empty()) {
    throw RequestError("there are no requests to measure [bad_request]");
  }
  for (int each = 1; each <= threads; ++each) {
    std::printf("%s\n", bench(model, requests, each, seconds).c_str());
    std::fflush(stdout);
  }
}

int check_files(const std::vector<std::string>& paths) {
  int damaged = 0;
  for (const std::string& path : paths) {
    try {
      const ServedModel model(path);
      std::printf("ok\t%s\t%s\n", path.c_str(), model.version().c_str());
    } catch (const FileError& error) {
      std::printf("error\t%s\t%s\n", path.c_str(), error.what());
      damaged = 1;
    }
    std::fflush(stdout);
  }
  return damaged;
}

int run(const Options& options) {
  load_fbgemm(options.fbgemm);
  for (const std::string& library : options.libraries) {
    load_library(library);
  }
  set_threads_within_requests(1);  // threads answer requests side by side instead
  optimize_once();
  if (options.check) {
    return check_files(options.models);
  }
  CurrentModel current(std::make_shared<const ServedModel>(options.models[0]));
  if (options.inputs) {
    for (const std::string& name : current.get()->input_names()) {
      std::printf("%s\n", name.c_str());
    }
    return 0;
  }
  Input input(options.requests);
  RequestReader reader(input);
  if (options.bench == 0) {
    stop_reading_at_signals();
  }
  current.get()->warm_up();
  say_version("loaded", *current.get());
  if (options.bench > 0) {
    bench_requests(reader, *current.get(), options.threads ? options.threads : 2, options.bench);
    return 0;
  }
  const Watcher watcher(options.models[0], options.watch, options.deltas, current);
  serve_requests(reader, current, options.threads ? options.threads : 1);
  return 0;
}

}  // namespace
}  // namespace serve

int main(int count, char** arguments) {
  serve::Options options;
  try {
    options = serve::parse(std::vector<std::string>(arguments + 1, arguments + count));
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "error\t%s\n%s", error.what(), serve::kUsage);
    return 2;
  }
  if (options.help) {
    std::fputs(serve::kUsage, stdout);
    return 0;
  }
  std::signal(SIGPIPE, SIG_IGN);  // whoever reads the answers is gone: `print` says so
  serve::check_standard_streams();
  try {
    return serve::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error\t%s\n", error.what());
    return 1;
  }
}
