#include "bench.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "errors.h"

namespace serve {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

}  // namespace

std::string percentiles(std::vector<double>& latencies) {
  std::sort(latencies.begin(), latencies.end());
  std::string text;
  for (const int percent : {50, 95, 99}) {
    const size_t count = latencies.size();
    const double latency = count == 0 ? 0.0 : latencies[std::min(count - 1, count * percent / 100)];
    char buffer[64];
    std::snprintf(buffer, sizeof(buffer), "%sp%d %.3f ms", text.empty() ? "" : ", ", percent, latency * 1e3);
    text += buffer;
  }
  return text;
}

std::string bench(const ServedModel& model, const std::vector<Request>& requests, int threads, double seconds) {
  std::atomic<size_t> next{0}, errors{0};
  std::vector<std::vector<double>> latencies(threads);
  const auto answer = [&](const Request& request) {
    try {
      model.serve(request.inputs);
    } catch (const RequestError&) {
      ++errors;
    }
  };
  for (int round = 0; round < 3; ++round) {  // TorchScript optimizes the model while it runs for the first times
    std::for_each(requests.begin(), requests.end(), answer);
  }
  errors = 0;
  const Clock::time_point begin = Clock::now();
  std::vector<std::thread> running;
  for (int thread = 0; thread < threads; ++thread) {
    running.emplace_back([&, thread] {
      while (seconds_since(begin) < seconds) {
        const Request& request = requests[next++ % requests.size()];
        const Clock::time_point asked = Clock::now();
        answer(request);
        latencies[thread].push_back(seconds_since(asked));
      }
    });
  }
  for (std::thread& each : running) {
    each.join();
  }
  const double took = seconds_since(begin);
  std::vector<double> all;
  for (const std::vector<double>& each : latencies) {
    all.insert(all.end(), each.begin(), each.end());
  }
  char text[200];
  std::snprintf(text, sizeof(text), "%d thread%s: %zu requests in %.2f s, %.0f requests/s, %zu errors, ", threads,
                threads == 1 ? "" : "s", all.size(), took, static_cast<double>(all.size()) / took, errors.load());
  return text + percentiles(all);
}

}  // namespace serve
