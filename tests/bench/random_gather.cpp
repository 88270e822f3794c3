// What this machine can do for lookups at random: prefetched gathers, which find nothing and check nothing.
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

// Adds 1 to data[places[i]], and writes what it was to out[i]. Several threads may lose additions to each other.
void add_one(int64_t* data, const int64_t* places, int64_t* out, int64_t count, int threads) {
  constexpr int64_t kAhead = 64;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      __builtin_prefetch(data + places[i + kAhead], 1);
    }
    out[i] = data[places[i]]++;
  }
}

// Sums whole rows of `dim` floats, `length` to each sum: out [count / length, dim], with `stride` floats between rows.
void sum_rows(const float* data, int64_t dim, const int64_t* places, float* out, int64_t stride, int64_t count,
              int64_t length, int threads) {
  constexpr int64_t kAhead = 32;
  constexpr int64_t kLine = 16;
  typedef float Line __attribute__((vector_size(64), aligned(4), may_alias));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t bag = 0; bag < count / length; ++bag) {
    float* sum = out + bag * stride;
    const auto prefetch = [&](int64_t i) {
      for (int64_t ahead = 0; ahead < dim && i + kAhead < count; ahead += kLine) {
        __builtin_prefetch(data + places[i + kAhead] * dim + ahead);
      }
    };
    int64_t column = 0;
    for (; column + 4 * kLine <= dim; column += 4 * kLine) {  // in registers
      Line sums[4] = {};
      for (int64_t i = bag * length; i < (bag + 1) * length; ++i) {
        column == 0 ? prefetch(i) : void();
        const Line* row = reinterpret_cast<const Line*>(data + places[i] * dim + column);
        for (int part = 0; part < 4; ++part) {
          sums[part] += row[part];
        }
      }
      for (int part = 0; part < 4; ++part) {
        reinterpret_cast<Line*>(sum + column)[part] = sums[part];
      }
    }
    for (; column < dim; ++column) {
      sum[column] = 0;
      for (int64_t i = bag * length; i < (bag + 1) * length; ++i) {
        column == 0 ? prefetch(i) : void();
        sum[column] += data[places[i] * dim + column];
      }
    }
  }
}
}
