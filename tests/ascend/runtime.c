// What code that MLIR made for the CPU calls.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  char *allocated;
  char *aligned;
  int64_t offset;
  int64_t size;
  int64_t stride;
} Array;

typedef struct {
  int64_t rank;
  Array *array;
} AnyArray;

// Arrays of kernels have one dimension.
void memrefCopy(int64_t element_size, AnyArray *from, AnyArray *to) {
  const Array *source = from->array;
  const Array *target = to->array;
  if (from->rank != 1 || to->rank != 1) __builtin_trap();
  for (int64_t i = 0; i < source->size; ++i) {
    memcpy(
        target->aligned + (target->offset + i * target->stride) * element_size,
        source->aligned + (source->offset + i * source->stride) * element_size,
        element_size);
  }
}

// What nothing was written to is no number.
void *undefined_memory(size_t size) {
  void *memory = malloc(size);
  return memory == NULL ? NULL : memset(memory, 0xff, size);
}

// float to bfloat16: to the nearest, ties to even, a NaN stays one.
__bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value == value)
    bits += 0x7fff + ((bits >> 16) & 1);
  else
    bits |= 0x00400000;
  const uint16_t upper = bits >> 16;
  __bf16 result;
  memcpy(&result, &upper, sizeof result);
  return result;
}
