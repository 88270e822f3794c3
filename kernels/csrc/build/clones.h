// Uses the machine's vector instructions: a function that is marked RECFX_CLONES is compiled once for each instruction
// set below, and the loader picks the best one that the machine has. Functions that it calls must be RECFX_INLINE to be
// compiled along with it. Results do not depend on the instruction set: the library is built without fused
// multiply-add.
#pragma once

#define RECFX_INLINE __attribute__((always_inline)) inline

// Not with the thread sanitizer: the loader would pick a function before the sanitizer has started.
#if defined(__SANITIZE_THREAD__) || !defined(__x86_64__) || !defined(__gnu_linux__) || !__has_attribute(target_clones)
#define RECFX_CLONES
#elif !defined(__clang__) && __GNUC__ >= 12
// With AVX-512's 64-bit multiplication, which hashing needs; finding ids in a cache takes a sixth less time.
#define RECFX_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define RECFX_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

// Individual functions may be compiled for wider vectors than the rest, and chosen at run time by what the machine has.
// RECFX_WIDEST: of pointers to a function for vectors of 4, 8 and 16 floats, each in parentheses, the widest that runs.
#if defined(__x86_64__) && defined(__GNUC__)
#define RECFX_X86_TARGETS 1
#define RECFX_WIDEST(vectors4, vectors8, vectors16) \
  (__builtin_cpu_supports("avx512f") ? (vectors16) : __builtin_cpu_supports("avx2") ? (vectors8) : (vectors4))
#else
#define RECFX_WIDEST(vectors4, vectors8, vectors16) (vectors4)
#endif
