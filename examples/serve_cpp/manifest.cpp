#include "manifest.h"

#include <algorithm>
#include <charconv>
#include <deque>
#include <map>
#include <optional>

#include "errors.h"

namespace serve {
namespace {

const std::string kManifest = "/extra/recfx.json";

// The members of a JSON object, or the items of a list, each as the text of its value. It looks no deeper than brackets
// and strings need.
class TopLevel {
 public:
  explicit TopLevel(const std::string& text) : text_(text) {}

  // Nothing if the text is not an object.
  std::optional<std::map<std::string, std::string>> members() {
    std::map<std::string, std::string> found;
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

  // Those in front of the first mistake; none if the text is not a list.
  std::deque<std::string> items() {
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

 private:
  std::optional<std::string> next_value() {
    skip_space();
    const size_t value = at_;
    if (!skip_value() || at_ == value) {
      return std::nullopt;
    }
    return text_.substr(value, text_.find_last_not_of(" \t\r\n", at_ - 1) + 1 - value);
  }

  void skip_space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

  bool take(char wanted) {
    skip_space();
    const bool is_there = at_ < text_.size() && text_[at_] == wanted;
    at_ += is_there;
    return is_there;
  }

  bool skip_string() {
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
  bool skip_value() {
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

  const std::string& text_;
  size_t at_ = 0;
};

std::optional<int64_t> integer(const std::string& text) {
  int64_t found = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(found) : std::nullopt;
}

// A value as the file has it, but short and in one line.
std::string shortened(std::string text) {
  std::replace_if(text.begin(), text.end(), [](unsigned char letter) { return letter < ' ' || letter > '~'; }, '?');
  return text.size() > 80 ? text.substr(0, 77) + "..." : text;
}

// Whether the checksum of the content is right, which was computed when the digits in its place were zeros.
bool has_its_records(std::string text, const Archive& archive) {
  const std::string name = "\"content_crc32\": \"", zeros = hexadecimal(0);
  const size_t at = text.find(name);
  if (at == std::string::npos || text.size() - at < name.size() + zeros.size()) {
    return false;
  }
  const std::string wanted = text.substr(at + name.size(), zeros.size());
  text.replace(at + name.size(), zeros.size(), zeros);
  return hexadecimal(archive.content_checksum(kManifest, text)) == wanted;
}

using Members = std::map<std::string, std::string>;

// The member of this name, or the text of nothing; without the quotes of a string.
std::string member(const Members& members, const std::string& name) {
  const auto found = members.find(name);
  const std::string text = found == members.end() ? "" : found->second;
  return text.starts_with('"') ? text.substr(1, text.size() - 2) : text;
}

// The tensors and KJTs in the patterns of the arguments, in order; see Pattern in recfx/exporter/arguments.py.
std::vector<Argument> arguments_of(const Members& manifest) {
  std::vector<Argument> arguments;
  const std::string listed = member(manifest, "arguments"), described = member(manifest, "sizes");
  const Members sizes = TopLevel(described).members().value_or(Members());
  std::deque<std::string> patterns = TopLevel(listed).items();
  while (!patterns.empty()) {
    const std::string text = std::move(patterns.front());
    patterns.pop_front();
    const Members pattern = TopLevel(text).members().value_or(Members());
    const std::string name = member(pattern, "name"), inner = member(pattern, "items"), own = member(sizes, name);
    const auto items = TopLevel(inner).items();
    patterns.insert(patterns.begin(), items.begin(), items.end());
    if (!name.empty()) {
      arguments.push_back({name, member(pattern, "kind"), member(pattern, "type_name"), {}});
      for (const std::string& size : TopLevel(own).items()) {
        arguments.back().sizes.push_back(integer(size).value_or(-1));
      }
    }
  }
  return arguments;
}

std::string shown(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) {
    text += (text.empty() ? "" : ", ") + (size == -1 ? "any" : std::to_string(size));
  }
  return '[' + text + ']';
}

}  // namespace

std::string unlike_sample(const std::vector<Argument>& arguments, const std::vector<Array>& inputs) {
  const Argument* kjt = nullptr;
  int64_t batch_size = 0;
  std::string of_other_sizes;
  for (const Argument& argument : arguments) {
    for (const Array& input : inputs) {
      const bool is_its_own = input.name.starts_with(argument.name + '.') && input.name.ends_with(".lengths");
      if (kjt == nullptr && argument.kind == "kjt" && is_its_own && input.shape.size() == 1) {
        kjt = &argument;
        batch_size = input.shape[0];
      }
    }
  }
  for (const Argument& argument : arguments) {
    const auto input = std::find_if(inputs.begin(), inputs.end(), [&](const Array& one) {
      return argument.kind == "tensor" && one.name == argument.name;
    });
    if (input == inputs.end()) {
      continue;
    }
    if (!argument.dtype.empty() && argument.dtype != name_of(input->dtype)) {
      return "input " + argument.name + " must be " + argument.dtype + ", got " + name_of(input->dtype) +
             " [wrong_dtype]";
    }
    const std::vector<int64_t>&sizes = argument.sizes, &shape = input->shape;
    if (!of_other_sizes.empty() || sizes.empty() || sizes.size() != shape.size()) {
      continue;
    }
    if (!std::equal(sizes.begin(), sizes.end(), shape.begin(),
                    [](int64_t expected, int64_t size) { return expected == -1 || expected == size; })) {
      of_other_sizes = "the model fails with input " + argument.name + " of sizes " + shown(shape) +
                       "; the sample's had " + shown(sizes) + " [wrong_size]";
    } else if (kjt != nullptr && sizes[0] == -1 && shape[0] != batch_size) {
      of_other_sizes = "the model fails with " + std::to_string(shape[0]) + " samples in input " + argument.name +
                       " and " + std::to_string(batch_size) + " in " + kjt->name + " [wrong_batch_size]";
    }
  }
  return of_other_sizes;
}

Manifest check_manifest(const std::string& path, const Archive& archive) {
  const Record* record = archive.find(kManifest);
  const std::string text = record == nullptr ? "" : archive.read(*record);
  const auto members = TopLevel(text).members();
  const auto value_of = [&members](const std::string& name, const std::string& otherwise) {
    const auto found = members->find(name);
    return found == members->end() ? otherwise : found->second;
  };
  const auto format = members ? integer(value_of("format_version", "")) : std::nullopt;
  if (!format || *format < 1) {
    throw FileError(path + " has no manifest of recfx: load a file that recfx.export has written [not_exported]");
  }
  if (*format > kFormatVersion) {
    throw FileError(path + " has format " + std::to_string(*format) + ", this server reads formats up to " +
                    std::to_string(kFormatVersion) + ": build the server of that version of recfx [newer_format]");
  }
  if (integer(value_of("hash_version", "")) != kHashVersion) {
    throw FileError(path + " maps ids to rows by another hash than version " + std::to_string(kHashVersion) +
                    ": export the model again [other_hash]");
  }
  const auto damaged = [&path](const std::string& why) {
    return FileError(path + " cannot be loaded: " + why + " [damaged_file]");
  };
  const auto wrong = [&](const std::string& name, const std::string& wanted) {
    return damaged("field '" + name + "' of its manifest is " + shortened(members->at(name)) + ", not " + wanted);
  };
  const std::string portable = value_of("portable", "true"), kind = value_of("format", "\"torchscript\"");
  const std::string operators = value_of("operators_version", "1");  // which older files lack
  Manifest manifest;
  if (portable != "true" && portable != "false") {
    throw wrong("portable", "true or false");
  }
  if (operators != "null" || portable == "false") {
    const auto version = integer(operators);
    if (!version || *version < 0) {
      throw wrong("operators_version", "the version of the operators of a file that is not portable");
    }
    manifest.operators = portable == "false" ? version : std::nullopt;
  }
  if (kind == "\"pt2\"") {
    throw FileError(path + " is of format " + kind +
                    ": this server loads those that recfx.export writes with format=\"torchscript\" [other_format]");
  }
  if (kind != "\"torchscript\"") {
    throw wrong("format", "one of torchscript, pt2");
  }
  if (*format == 1 && !members->contains("content_crc32") && !members->contains("order")) {
    const auto tables = members->find("crc32");
    const auto found = tables == members->end() ? std::nullopt : TopLevel(tables->second).members();
    if (!found) {
      throw damaged("its tables are not those that its manifest was written for");
    }
    manifest.tables = *found;
    return manifest;
  }
  if (!has_its_records(text, archive)) {
    throw damaged("its records are not those that its manifest was written for");
  }
  manifest.arguments = arguments_of(*members);
  return manifest;
}

}  // namespace serve
