// Vector instructions where the machine has them: RECFX_CLONES before a function compiles it once for each set below,
// and the loader takes the best that runs. What it calls must be RECFX_INLINE to be compiled along with it. Results do
// not depend on the set: the library is built without fused multiply-add.
#pragma once

#define RECFX_INLINE __attribute__((always_inline)) inline

// Not under the thread sanitizer: the loader would choose before the sanitizer has started.
#if !defined(__SANITIZE_THREAD__) && defined(__x86_64__) && defined(__gnu_linux__) && __has_attribute(target_clones)
#define RECFX_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define RECFX_CLONES
#endif

// Functions may be compiled for other vectors than the rest, and chosen by what the machine has when they are called.
#if defined(__x86_64__) && defined(__GNUC__)
#define RECFX_X86_TARGETS 1
#endif
