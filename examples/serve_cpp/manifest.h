// The manifest of an exported file: JSON text, of which a server needs the versions. This file does not use torch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "array.h"
#include "model_file.h"
#include "versions.h"

namespace serve {

// The versions that this program reads; see recfx/exporter/manifest.py.
constexpr int kFormatVersion = 3;
constexpr int kHashVersion = 1;

// Eight hexadecimal digits for each of some tensors, by name.
using Checksums = std::map<std::string, std::string>;

// A tensor or a KJT that the model takes, as the sample of the export had it.
struct Argument {
  std::string name, kind;
  std::string dtype;           // of a tensor, in torch's words; empty if the file does not say it
  std::vector<int64_t> sizes;  // of a tensor, -1 for those of the batch; empty if the file does not say them
};

// What is to be compared when a file is loaded, and when a request has failed.
struct Manifest {
  Checksums tables;                  // the CRC-32 of those of files of format 1, which have no checksum of everything
  std::optional<int64_t> operators;  // the version of recfx's operators that the file calls, if it calls any
  std::vector<Argument> arguments;   // none of files of format 1
  std::optional<Version> version;    // none of files that were written before there were deltas
  std::optional<Changes> delta;      // of a delta
};

// Throw a FileError unless the archive is one that recfx.export has written, in a format that this program knows, with
// the records that it was written with.
Manifest check_manifest(const std::string& path, const Archive& archive);

// The first tensor of another dtype than in the sample, or else of other sizes or with more or fewer samples than the
// first KJT; empty if there is none. A model may take such tensors, so only a request that has failed asks. The rank is
// checked by the file itself. As Signature.unlike_sample in recfx/exporter/arguments.py.
std::string unlike_sample(const std::vector<Argument>& arguments, const std::vector<Array>& inputs);

}  // namespace serve
