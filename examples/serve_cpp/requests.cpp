#include "requests.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <new>
#include <string_view>
#include <utility>

#include "errors.h"

namespace serve {
namespace {

constexpr size_t kLongestRequest = size_t{1} << 28;  // bytes, which is also as long as a line can be
constexpr size_t kMostDimensions = 8;
constexpr size_t kMostInputs = 100'000;

// Everything in front of the separator, which is taken off the text; all of it if there is none.
std::string_view take(std::string_view& text, char separator) {
  const size_t end = std::min(text.find(separator), text.size());
  const std::string_view found = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return found;
}

template <typename Number>
Number parse(std::string_view text, const std::string& name) {
  Number found{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw RequestError("input " + name + ": '" + std::string(text.substr(0, 40)) +
                       "' is not a number of its type [bad_number]");
  }
  return found;
}

std::vector<int64_t> parse_shape(std::string_view text, const std::string& name) {
  std::vector<int64_t> shape;
  while (!text.empty()) {
    shape.push_back(parse<int64_t>(take(text, ','), name));
    if (shape.back() < 0 || shape.size() > kMostDimensions) {
      throw RequestError("input " + name + " has a shape that no tensor has [bad_shape]");
    }
  }
  return shape;
}

// -1: more than any text can hold.
int64_t count_of(const std::vector<int64_t>& shape) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) {
    return 0;
  }
  int64_t count = 1;
  for (const int64_t size : shape) {
    if (count > static_cast<int64_t>(kLongestRequest) / size) {
      return -1;
    }
    count *= size;
  }
  return count;
}

template <typename Number>
void parse_numbers(std::string_view text, Array& array) {
  while (!text.empty()) {
    const Number number = parse<Number>(take(text, ' '), array.name);
    if (array.dtype == DType::kBool && number > Number{1}) {
      throw RequestError("input " + array.name + ": a bool is 0 or 1 [bad_number]");
    }
    const size_t at = array.data.size();
    array.data.resize(at + sizeof(Number));
    std::memcpy(array.data.data() + at, &number, sizeof(Number));
  }
}

Array parse_input(std::string_view line) {
  if (std::count(line.begin(), line.end(), '\t') != 3) {
    throw RequestError("'" + std::string(line.substr(0, 40)) +
                       "' is not the line of an input: name, dtype, shape and " +
                       "numbers, separated by tabs [bad_line]");
  }
  Array array;
  array.name = take(line, '\t');
  const std::string_view dtype = take(line, '\t');
  const auto* known =
      std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& each) { return each.first == dtype; });
  if (known == std::end(kDTypes)) {
    throw RequestError("input " + array.name + " is of type '" + std::string(dtype.substr(0, 40)) +
                       "', which is none of bool, uint8, int32, int64, float32, float64 [bad_dtype]");
  }
  array.dtype = known->second;
  array.shape = parse_shape(take(line, '\t'), array.name);
  const int64_t wanted = count_of(array.shape);
  const size_t size = with_type(array.dtype, [&](auto number) {
    array.data.reserve(sizeof(number) * std::min<size_t>(std::max<int64_t>(wanted, 0), line.size() / 2 + 1));
    parse_numbers<decltype(number)>(line, array);
    return sizeof(number);
  });
  const int64_t given = static_cast<int64_t>(array.data.size() / size);
  if (given != wanted) {
    throw RequestError("input " + array.name + " has " + std::to_string(given) +
                       " numbers, which its shape does not hold [bad_shape]");
  }
  return array;
}

// Without control characters, among them those that end fields and lines.
std::string one_field(std::string text) {
  std::replace_if(text.begin(), text.end(), [](unsigned char each) { return each < ' ' || each == 127; }, ' ');
  return text;
}

void append(std::string& text, const Array& array) {
  text += one_field(array.name) + '\t' + name_of(array.dtype) + '\t';
  for (size_t dimension = 0; dimension < array.shape.size(); ++dimension) {
    text += dimension ? "," : "";
    text += std::to_string(array.shape[dimension]);
  }
  with_type(array.dtype, [&](auto number) {
    char buffer[64];
    for (size_t at = 0; at < array.data.size(); at += sizeof(number)) {
      std::memcpy(&number, array.data.data() + at, sizeof(number));
      text += at ? ' ' : '\t';
      text.append(buffer, std::to_chars(buffer, buffer + sizeof(buffer), number).ptr);
    }
    text += array.data.empty() ? "\t\n" : "\n";
  });
}

}  // namespace

bool RequestReader::next_line() {
  if (has_line_) {
    has_line_ = false;
    return true;
  }
  line_.clear();
  is_too_long_ = false;
  bool has_any = false;
  for (int here = stream_.sbumpc(); here != EOF; here = stream_.sbumpc()) {
    has_any = true;
    if (here == '\n') {
      break;
    }
    if (line_.size() < kLongestRequest) {
      line_.push_back(static_cast<char>(here));
    } else {
      is_too_long_ = true;
    }
  }
  if (line_.ends_with('\r')) {
    line_.pop_back();
  }
  return has_any;
}

std::optional<Request> RequestReader::next() {
  constexpr std::string_view kRequest = "request\t";
  const auto refuse = [](Request& request, const std::string& why) {
    if (request.error.empty()) {  // the first mistake explains the others
      request.error = why;
    }
  };
  Request request;
  bool is_inside = false;
  while (next_line()) {
    if (line_.starts_with(kRequest) && std::count(line_.begin(), line_.end(), '\t') == 1) {
      if (is_inside) {
        has_line_ = true;
        refuse(request, "it has no end [bad_request]");
        return request;
      }
      is_inside = true;
      request.id = one_field(line_.substr(kRequest.size()));
    } else if (line_ == "end") {
      if (!is_inside) {
        refuse(request, "it does not begin with a line request, a tab and its id [bad_request]");
      }
      return request;
    } else if (line_.empty() && !is_inside) {
      continue;
    } else if (!is_inside) {
      is_inside = true;
      refuse(request, "it does not begin with a line request, a tab and its id [bad_request]");
    } else if (is_too_long_ || request.lines.size() == kMostInputs || request.bytes + line_.size() > kLongestRequest) {
      refuse(request, "it is too long [bad_request]");
      request.lines = {};
    } else if (request.error.empty()) {
      request.lines.push_back(line_);
      request.bytes += line_.size();
    }
  }
  if (!is_inside) {
    return std::nullopt;
  }
  refuse(request, "it has no end [bad_request]");
  return request;
}

void parse_inputs(Request& request) {
  try {
    for (std::string& line : request.lines) {
      request.inputs.push_back(parse_input(std::exchange(line, {})));
    }
  } catch (const RequestError& error) {
    request.error = error.what();  // also if the request has no end: the first mistake explains the others
  } catch (const std::bad_alloc&) {
    request.error = "there is no memory for it [bad_request]";
  }
  request.lines = {};
  if (!request.error.empty()) {
    request.inputs = {};
  }
}

std::string format_answer(const Request& request, const std::string& version, const std::vector<Array>& outputs) {
  std::string text = "answer\t" + request.id + '\t' + version + '\n';
  for (const Array& output : outputs) {
    append(text, output);
  }
  return text + "end\n";
}

std::string format_error(const Request& request, const std::string& version, const std::string& message) {
  return "error\t" + request.id + '\t' + version + '\t' + one_field(message) + '\n';
}

}  // namespace serve
