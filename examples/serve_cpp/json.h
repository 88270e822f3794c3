// JSON text, as far as a manifest needs it. This file does not use torch.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace serve {

// The text of each value, by name.
using Members = std::map<std::string, std::string>;

// The members of a JSON object, or the items of a list, each as the text of its value. It looks no deeper than brackets
// and strings need.
class TopLevel {
 public:
  explicit TopLevel(std::string text) : text_(std::move(text)) {}

  // Nothing if the text is not an object.
  std::optional<Members> members();

  // Those in front of the first mistake; none if the text is not a list.
  std::deque<std::string> items();

 private:
  std::optional<std::string> next_value();
  void skip_space();
  bool take(char wanted);
  bool skip_string();
  bool skip_value();

  const std::string text_;
  size_t at_ = 0;
};

std::optional<int64_t> integer(const std::string& text);

// The text without the quotes of a string, whose escapes are left alone.
std::string unquoted(const std::string& text);

// The member of this name, unquoted, or the text of nothing.
std::string member(const Members& members, const std::string& name);

}  // namespace serve
