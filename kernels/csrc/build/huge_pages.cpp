// Asks the system for huge pages for a tensor, for later or at once. Contract: kernels/build/huge_pages.py.
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

bool collapse_pages(const at::Tensor& tensor, int64_t first_byte, int64_t last_byte) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.is_contiguous(),
              "recfx::collapse_pages: the tensor must be on the CPU and contiguous");
  TORCH_CHECK(0 <= first_byte && first_byte <= last_byte && last_byte <= static_cast<int64_t>(tensor.nbytes()),
              "recfx::collapse_pages: bytes ", first_byte, " to ", last_byte, " are not in a tensor of ",
              tensor.nbytes(), " bytes");
#ifdef __linux__
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1; older systems answer EINVAL
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t begin = (address + static_cast<uintptr_t>(first_byte) + page - 1) / page * page;
  const uintptr_t end = (address + static_cast<uintptr_t>(last_byte)) / page * page;
  return begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse) == 0;
#else
  return false;
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def("advise_huge_pages(Tensor tensor) -> bool");
  library.def("collapse_pages(Tensor tensor, int first_byte, int last_byte) -> bool");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) {
  library.impl("advise_huge_pages", advise_huge_pages);
  library.impl("collapse_pages", collapse_pages);
}

}  // namespace recfx
