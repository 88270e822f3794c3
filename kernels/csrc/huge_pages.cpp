// Asks the system for huge pages for a tensor. Contract: kernels/huge_pages.py.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdint>

namespace recfx {
namespace {

bool advise_huge_pages(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.is_contiguous(),
              "recfx::advise_huge_pages: the tensor must be on the CPU and contiguous");
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t begin = (address + page - 1) / page * page;  // whole pages only: the rest may belong to other data
  const uintptr_t end = (address + tensor.nbytes()) / page * page;
  return begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) { library.def("advise_huge_pages(Tensor tensor) -> bool"); }

TORCH_LIBRARY_IMPL(recfx, CPU, library) { library.impl("advise_huge_pages", advise_huge_pages); }

}  // namespace recfx
