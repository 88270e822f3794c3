// The namespace. Each family adds its operators with TORCH_LIBRARY_FRAGMENT, in the file named after it.
#include <torch/library.h>

TORCH_LIBRARY(recfx, library) {}
