// The versions of a model: a base begins a chain, and each of its deltas makes the next version. See
// recfx/exporter/file_versions.py. This file does not use torch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "json.h"

namespace serve {

// Which version a file is, or which one a delta makes.
struct Version {
  std::string name, chain;
  int64_t number = 0;  // of deltas since the chain began
};

// A part of a tensor's bytes: `count` units of `unit` bytes each. Some of them change.
struct Stretch {
  std::string tensor;
  int64_t begin = 0, count = 0, unit = 0;
  std::string which, data;  // the tensors of the delta that hold the numbers of these units, and their bytes
};

// What a delta changes of the version that is its parent. Tensors and modules of the program are named by their path.
struct Changes {
  std::string parent;
  std::vector<Stretch> stretches;
  std::map<std::string, std::string> tensors;              // which ones are replaced, by which tensor of the delta
  std::map<std::string, std::vector<std::string>> lists;   // of tensors, by name, that are made anew
  std::map<std::string, std::vector<int64_t>> attributes;  // lists of numbers, or of tuples, whose numbers are in a row
};

// Of a manifest. Nothing if it does not say which version the file is.
std::optional<Version> version_of(const Members& manifest);

// Of the manifest of a delta. Nothing if something is missing.
std::optional<Changes> changes_of(const Members& manifest);

// Throw a FileError, with the path of the base, if it is an older version of the chain that is served.
void check_not_older(const std::string& path, const std::optional<Version>& base, const std::optional<Version>& served);

// Throw a FileError, with the path of the file, unless it is a delta that changes the version that is served.
void check_follows(const std::string& path, const std::optional<Version>& version, const std::optional<Changes>& delta,
                   const std::optional<Version>& served);

}  // namespace serve
