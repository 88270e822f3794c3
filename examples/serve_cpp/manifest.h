// The manifest of an exported file: JSON text, of which a server needs the versions. This file does not use torch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "model_file.h"

namespace serve {

// The versions that this program reads; see recfx/exporter/manifest.py.
constexpr int kFormatVersion = 3;
constexpr int kHashVersion = 1;

// Eight hexadecimal digits for each of some tensors, by name.
using Checksums = std::map<std::string, std::string>;

// What is to be compared when a file is loaded.
struct Manifest {
  Checksums tables;                  // the CRC-32 of those of files of format 1, which have no checksum of everything
  std::optional<int64_t> operators;  // the version of recfx's operators that the file calls, if it calls any
};

// Throw a FileError unless the archive is one that recfx.export has written, in a format that this program knows, with
// the records that it was written with.
Manifest check_manifest(const std::string& path, const Archive& archive);

}  // namespace serve
