// The manifest of an exported file: JSON text, of which a server needs the versions. This file does not use torch.
#pragma once

#include <map>
#include <string>

#include "model_file.h"

namespace serve {

// The versions that this program reads; see recfx/exporter/manifest.py.
constexpr int kFormatVersion = 2;
constexpr int kHashVersion = 1;

// Eight hexadecimal digits for each of some tensors, by name.
using Checksums = std::map<std::string, std::string>;

// Throw a FileError unless the archive is one that recfx.export has written, in a format that this program knows, with
// the records that it was written with. Returns the CRC-32 of the tables that are to be compared when they are loaded:
// of files of format 1, which have no checksum of everything.
Checksums check_manifest(const std::string& path, const Archive& archive);

}  // namespace serve
