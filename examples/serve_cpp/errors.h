// The errors of this program. Each message ends with a reason code in brackets, as in Python.
#pragma once

#include <stdexcept>

namespace serve {

// A file cannot be loaded: no_file, damaged_file, changed_file, not_exported, newer_format, other_hash, other_format,
// other_operators, no_library, is_a_delta or cannot_load; cannot_read, out_of_memory and unknown_cpu_capability, which
// say nothing about the file. Or it is not the next version: older_version, not_a_delta, delta_of_other_base or
// delta_out_of_order.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A request cannot be answered; the next one may be.
class RequestError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace serve
