// Included before every source of a library that is put into a wheel: binds to what glibc 2.28 and the libstdc++ of GCC
// 8 have already, whichever newer ones the library is compiled with. A wheel is checked for what this leaves out.
#pragma once

#include <sstream>

// Part of libpthread until glibc 2.34; the older name is still there in newer versions.
#if defined(__x86_64__)
__asm__(".symver pthread_once, pthread_once@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver pthread_once, pthread_once@GLIBC_2.17");
#endif

// Since glibc 2.32: whether the process has a single thread, so that std::shared_ptr may count without atomics. Here it
// always counts with them.
extern "C" {
__attribute__((weak, visibility("hidden"))) char __libc_single_threaded = 0;
}

// In libstdc++ since GCC 9 and 11. Here they are compiled along.
template std::ostringstream::basic_ostringstream();
template std::string std::ostringstream::str() const&;
template std::string std::stringbuf::str() const&;
