// The paths that kernels have, by the vector instructions that they use. An inner loop is a lambda that is compiled for
// each path, and on_widest_vectors() runs it on the widest that the machine has, or on the one that
// RECFX_CPU_CAPABILITY names. Results do not depend on the path: it says how many columns are worked on at once, the
// order of sums is fixed, and the library is built without fused multiply-add. This file does not use torch.
#pragma once

#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

// What a lambda for on_widest_vectors() calls must be inlined to be compiled for the same path, and so must the lambda.
#define RECFX_INLINE __attribute__((always_inline)) inline
#define RECFX_INLINE_LAMBDA __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__)
#define RECFX_X86_TARGETS 1
#endif

namespace recfx {

struct VectorPath {
  const char* name;
  int floats;  // that are worked on at once
  bool runs;   // on this machine
};

// From the narrowest on.
#ifdef RECFX_X86_TARGETS
inline std::array<VectorPath, 3> vector_paths() {
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return {{{"generic", 4, true}, {"avx2", 8, __builtin_cpu_supports("avx2") != 0}, {"avx512", 16, has_avx512}}};
}
#elif defined(__aarch64__)
// Every aarch64 has NEON. Four floats, one of its vectors: of eight, GCC makes arrays in memory.
inline std::array<VectorPath, 1> vector_paths() { return {{{"neon", 4, true}}}; }
#else
inline std::array<VectorPath, 1> vector_paths() { return {{{"generic", 4, true}}}; }
#endif

// The path of this name; the widest that runs if it is null or empty. Throws std::invalid_argument if there is none.
inline VectorPath vector_path_named(const char* name) {
  const bool is_named = name != nullptr && *name != '\0';
  std::string_view separator = "";
  std::string runs;
  VectorPath found{nullptr, 0, false};
  for (const VectorPath& path : vector_paths()) {
    if (path.runs) {
      runs.append(separator).append(path.name);
      separator = ", ";
      found = !is_named || std::string_view(name) == path.name ? path : found;
    }
  }
  if (found.name == nullptr) {
    throw std::invalid_argument("recfx: RECFX_CPU_CAPABILITY is " + std::string(name) +
                                ", which kernels on this machine cannot use. What to do: unset it, or choose one of " +
                                runs);
  }
  return found;
}

// The environment is read once.
inline const VectorPath& vector_path() {
  static const VectorPath path = vector_path_named(std::getenv("RECFX_CPU_CAPABILITY"));
  return path;
}

template <typename Run>
__attribute__((noinline)) static auto run_on_vectors4(const Run& run) {
  return run(std::integral_constant<int, 4>());
}

#ifdef RECFX_X86_TARGETS
template <typename Run>
__attribute__((noinline, target("avx2"))) static auto run_on_vectors8(const Run& run) {
  return run(std::integral_constant<int, 8>());
}

// With the 64-bit multiplication of AVX-512DQ, which hashing needs: finding ids in a cache takes a sixth less time.
template <typename Run>
__attribute__((noinline, target("avx512f,avx512bw,avx512dq,avx512vl"))) static auto run_on_vectors16(const Run& run) {
  return run(std::integral_constant<int, 16>());
}
#endif

// run(floats) of the path that works on so many floats, in a function of its own: a kernel that is compiled many times
// calls it for what is the same each time. The caller runs on this path.
template <int floats, typename Run>
RECFX_INLINE auto on_vectors(const Run& run) {
#ifdef RECFX_X86_TARGETS
  if constexpr (floats == 16) {
    return run_on_vectors16(run);
  } else if constexpr (floats == 8) {
    return run_on_vectors8(run);
  }
#endif
  if constexpr (floats == 4) {
    return run_on_vectors4(run);
  }
}

// run(floats) on the path that was chosen. floats: std::integral_constant<int>, how many are worked on at once.
template <typename Run>
static auto on_widest_vectors(const Run& run) {
  switch (vector_path().floats) {
#ifdef RECFX_X86_TARGETS
    case 16:
      return run_on_vectors16(run);
    case 8:
      return run_on_vectors8(run);
#endif
    default:
      return run_on_vectors4(run);
  }
}

}  // namespace recfx
