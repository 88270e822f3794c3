// How a delta makes the next version of a model's module. This file uses torch.
#pragma once

#include <torch/csrc/jit/api/module.h>

#include "versions.h"

namespace serve {

// The module of a file with what a delta changes, whose tensors are the buffers of `delta`. The old module does not
// change, and the new one shares with it all tensors but those. Throws std::invalid_argument, or what torch throws, if
// the delta does not fit. As next_version in recfx/exporter/file_versions.py.
torch::jit::Module next_version(const torch::jit::Module& old, const Changes& changes, const torch::jit::Module& delta);

}  // namespace serve
