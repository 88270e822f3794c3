#include "json.h"

#include <algorithm>
#include <charconv>

namespace serve {

std::optional<Members> TopLevel::members() {
  Members found;
  if (!take('{')) {
    return std::nullopt;
  }
  if (take('}')) {
    return found;
  }
  do {
    skip_space();
    const size_t name = at_;
    if (!skip_string()) {
      return std::nullopt;
    }
    const std::string key = text_.substr(name + 1, at_ - name - 2);
    if (!take(':')) {
      return std::nullopt;
    }
    const auto value = next_value();
    if (!value) {
      return std::nullopt;
    }
    found[key] = *value;
  } while (take(','));
  return take('}') ? std::optional(found) : std::nullopt;
}

std::deque<std::string> TopLevel::items() {
  std::deque<std::string> found;
  if (take('[')) {
    do {
      if (const auto value = next_value()) {
        found.push_back(*value);
      }
    } while (take(','));
  }
  return found;
}

std::optional<std::string> TopLevel::next_value() {
  skip_space();
  const size_t value = at_;
  if (!skip_value() || at_ == value) {
    return std::nullopt;
  }
  return text_.substr(value, text_.find_last_not_of(" \t\r\n", at_ - 1) + 1 - value);
}

void TopLevel::skip_space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

bool TopLevel::take(char wanted) {
  skip_space();
  const bool is_there = at_ < text_.size() && text_[at_] == wanted;
  at_ += is_there;
  return is_there;
}

bool TopLevel::skip_string() {
  if (at_ >= text_.size() || text_[at_] != '"') {
    return false;
  }
  for (++at_; at_ < text_.size(); ++at_) {
    if (text_[at_] == '\\') {
      ++at_;
    } else if (text_[at_] == '"') {
      ++at_;
      return true;
    }
  }
  return false;
}

// Up to the comma or bracket behind the value.
bool TopLevel::skip_value() {
  for (int depth = 0; at_ < text_.size();) {
    const char here = text_[at_];
    if (here == '"') {
      if (!skip_string()) {
        return false;
      }
      continue;
    }
    const bool closes = here == '}' || here == ']';
    if (depth == 0 && (closes || here == ',')) {
      return true;
    }
    depth += (here == '{' || here == '[') - closes;
    ++at_;
  }
  return false;
}

std::optional<int64_t> integer(const std::string& text) {
  int64_t found = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(found) : std::nullopt;
}

std::string unquoted(const std::string& text) { return text.starts_with('"') ? text.substr(1, text.size() - 2) : text; }

std::string member(const Members& members, const std::string& name) {
  const auto found = members.find(name);
  return found == members.end() ? "" : unquoted(found->second);
}

}  // namespace serve
