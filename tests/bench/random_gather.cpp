// The limit of this machine for lookups at random: a prefetched gather, which finds nothing and checks nothing.
#include <cstdint>

extern "C" {

// out[i] = data[places[i]] for records of `width` int64, of which the first one is read.
void gather_first(const int64_t* data, int64_t width, const int64_t* places, int64_t* out, int64_t count, int threads) {
  constexpr int64_t kAhead = 64;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      __builtin_prefetch(data + places[i + kAhead] * width);
    }
    out[i] = data[places[i] * width];
  }
}

// Sums whole rows of `dim` floats, `length` to each sum: out [count / length, dim], with `stride` floats between rows.
void sum_rows(const float* data, int64_t dim, const int64_t* places, float* out, int64_t stride, int64_t count,
              int64_t length, int threads) {
  constexpr int64_t kAhead = 32;
  constexpr int64_t kLine = 16;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t bag = 0; bag < count / length; ++bag) {
    float* sum = out + bag * stride;
    for (int64_t column = 0; column < dim; ++column) {
      sum[column] = 0;
    }
    for (int64_t i = bag * length; i < (bag + 1) * length; ++i) {
      if (i + kAhead < count) {
        for (int64_t column = 0; column < dim; column += kLine) {
          __builtin_prefetch(data + places[i + kAhead] * dim + column);
        }
      }
      const float* row = data + places[i] * dim;
      for (int64_t column = 0; column < dim; ++column) {
        sum[column] += row[column];
      }
    }
  }
}
}
