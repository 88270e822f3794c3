#include "manifest.h"

#include <algorithm>
#include <deque>
#include <optional>

#include "errors.h"
#include "json.h"

namespace serve {
namespace {

const std::string kManifest = "/extra/recfx.json";

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

// The tensors and KJTs in the patterns of the arguments, in order; see Pattern in recfx/exporter/arguments.py.
std::vector<Argument> arguments_of(const Members& manifest) {
  std::vector<Argument> arguments;
  const Members sizes = TopLevel(member(manifest, "sizes")).members().value_or(Members());
  std::deque<std::string> patterns = TopLevel(member(manifest, "arguments")).items();
  while (!patterns.empty()) {
    const std::string text = std::move(patterns.front());
    patterns.pop_front();
    const Members pattern = TopLevel(text).members().value_or(Members());
    const std::string name = member(pattern, "name");
    const auto items = TopLevel(member(pattern, "items")).items();
    patterns.insert(patterns.begin(), items.begin(), items.end());
    if (!name.empty()) {
      arguments.push_back({name, member(pattern, "kind"), member(pattern, "type_name"), {}});
      for (const std::string& size : TopLevel(member(sizes, name)).items()) {
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
  manifest.version = version_of(*members);
  if (members->contains("delta")) {
    manifest.delta = changes_of(*members);
    if (!manifest.version || !manifest.delta) {
      throw damaged("its manifest does not say what the delta changes");
    }
  }
  return manifest;
}

}  // namespace serve
