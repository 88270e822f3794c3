// Latency and throughput of a model. This file does not use torch.
#pragma once

#include <string>
#include <vector>

#include "requests.h"
#include "served_model.h"

namespace serve {

// Sorts the latencies, in seconds, and says their percentiles.
std::string percentiles(std::vector<double>& latencies);

// Answer the requests over and over for some seconds with this many threads, and say how fast that was.
std::string bench(const ServedModel& model, const std::vector<Request>& requests, int threads, double seconds);

}  // namespace serve
