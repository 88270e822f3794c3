// Requests and answers as lines of text, fields separated by tabs. This file does not use torch.
//
//     request <id>                                      answer <id> <version of the file>
//     <input name> <dtype> <shape> <numbers>            <output name> <dtype> <shape> <numbers>
//     end                                               end
//                                                       or: error <id> <version of the file, or -> <message>
//
// dtype: bool, uint8, int32, int64, float32 or float64. shape: sizes separated by commas, empty for a scalar. numbers:
// separated by spaces, as Python prints them; nan, inf and -inf are numbers. An input is read whatever follows it on a
// later line; a request that cannot be read is answered by an error, and reading goes on behind its end.
#pragma once

#include <istream>
#include <optional>
#include <string>
#include <vector>

#include "array.h"

namespace serve {

struct Request {
  std::string id = "-";
  std::vector<Array> inputs;
  std::string error;  // why it cannot be read; empty if it can
};

class RequestReader {
 public:
  explicit RequestReader(std::istream& stream) : stream_(stream) {}

  // The next request; nothing at the end of the stream.
  std::optional<Request> next();

 private:
  bool next_line();

  std::istream& stream_;
  std::string line_;
  bool is_too_long_ = false;
  bool has_line_ = false;  // line_ is still to be looked at
};

std::string format_answer(const Request& request, const std::string& version, const std::vector<Array>& outputs);
std::string format_error(const Request& request, const std::string& version, const std::string& message);

}  // namespace serve
