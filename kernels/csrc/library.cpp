// The namespace. Each family adds its operators in the file of its name, with TORCH_LIBRARY_FRAGMENT.
#include <torch/library.h>

TORCH_LIBRARY(recfx, library) {}
