// The namespace. Each family adds its operators with TORCH_LIBRARY_FRAGMENT, in the file named after it.
#include <torch/library.h>

#include <string>
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

}  // namespace

TORCH_LIBRARY(recfx, library) {
  library.def("cpu_capability() -> str", cpu_capability);
  library.def("cpu_capabilities() -> str[]", cpu_capabilities);
}

}  // namespace recfx
