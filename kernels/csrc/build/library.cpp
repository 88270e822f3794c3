// The namespace. Each family adds its operators with TORCH_LIBRARY_FRAGMENT, in the file named after it.
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "build/vector_paths.h"

namespace recfx {
namespace {

std::string cpu_capability() { return vector_path().name; }

std::vector<std::string> cpu_capabilities() {
  std::vector<std::string> names;
  for (const VectorPath& path : vector_paths()) {
    if (path.runs) {
      names.emplace_back(path.name);
    }
  }
  return names;
}

// The versions of the operators that exported files call: the oldest one that still runs, and that of new files. See
// OPERATOR_VERSIONS in recfx/exporter/manifest.py.
std::tuple<int64_t, int64_t> file_operator_versions() { return {1, 3}; }

}  // namespace

TORCH_LIBRARY(recfx, library) {
  library.def("cpu_capability() -> str", cpu_capability);
  library.def("cpu_capabilities() -> str[]", cpu_capabilities);
  library.def("file_operator_versions() -> (int, int)", file_operator_versions);
}

}  // namespace recfx
