// Requests and answers as lines of text, fields separated by tabs. This file does not use torch.
//
//     request <id>                                      answer <id> <version of the file>
//     <input name> <dtype> <shape> <numbers>            <output name> <dtype> <shape> <numbers>
//     end                                               end
//                                                       or: error <id> <version of the file, or -> <message>
//
// dtype: bool, uint8, int32, int64, float32 or float64. shape: sizes separated by commas, empty for a scalar. numbers:
// separated by spaces, as Python prints them; nan, inf and -inf are numbers. An input is read whatever follows it on a
// later line; a request that cannot be read is answered by an error, and reading goes on behind its end. Lines may end
// with a carriage return and a line feed.
#pragma once

#include <optional>
#include <streambuf>
#include <string>
#include <vector>

#include "array.h"

namespace serve {

struct Request {
  std::string id = "-";
  std::vector<std::string> lines;  // its inputs as they were read, which `parse_inputs` turns into arrays
  size_t bytes = 0;                // of the lines
  std::vector<Array> inputs;
  std::string error;  // why it cannot be read; empty if it can
};

// Takes requests apart; their numbers are left to `parse_inputs`, so that one thread can read for many.

class RequestReader {
 public:
  explicit RequestReader(std::streambuf& stream) : stream_(stream) {}

  // The next request; nothing at the end of the stream.
  std::optional<Request> next();

 private:
  bool next_line();

  std::streambuf& stream_;
  std::string line_;
  bool is_too_long_ = false;
  bool has_line_ = false;  // line_ is still to be looked at
};

// Parse the lines of a request. Its error says what is wrong with the first line that is no input.
void parse_inputs(Request& request);

std::string format_answer(const Request& request, const std::string& version, const std::vector<Array>& outputs);
std::string format_error(const Request& request, const std::string& version, const std::string& message);

}  // namespace serve
