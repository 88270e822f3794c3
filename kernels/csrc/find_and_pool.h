// Finding ids and pooling their rows in one pass: while a bag is summed, the rows of the next ids and the slots of those
// after them are on their way. No torch in here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "clones.h"
#include "find.h"
#include "mix64.h"
#include "pool.h"

namespace recfx {

// What an id without a row of its own reads: nothing, or a row of its bucket.
struct AbsentAnswer {
  int64_t rows;
  int64_t dense_rows;
  int64_t buckets;  // 0: nothing
  uint64_t mixed_seed;
  uint64_t mixed_share_seed;

  AbsentAnswer(int64_t rows, int64_t dense_rows, int64_t buckets, int64_t seed)
      : rows(rows),
        dense_rows(dense_rows),
        buckets(buckets),
        mixed_seed(mix64(static_cast<uint64_t>(seed))),
        mixed_share_seed(mix64(static_cast<uint64_t>(seed) + 1)) {}

  int64_t bucket_begin(int64_t bucket) const {
    return dense_rows + bucket * (rows - dense_rows) / buckets;
  }

  // Same rows as shared_rows() in kernels/hash_index.py.
  int64_t shared_row(int64_t id) const {
    const int64_t bucket = mixed_modulo(id, mixed_seed, buckets);
    const int64_t begin = bucket_begin(bucket);
    return begin + mixed_modulo(id, mixed_share_seed, bucket_begin(bucket + 1) - begin);
  }
};

// Answers those of rows[begin, end) that are -1, and counts them.
RECFX_INLINE int64_t answer_absent(const int64_t* ids, int64_t* rows, int64_t begin, int64_t end,
                                   const AbsentAnswer& answer) {
  int64_t absent = 0;
  for (int64_t i = begin; i < end; ++i) {
    absent += rows[i] < 0;
  }
  if (absent > 0 && answer.buckets > 0) {
    for (int64_t i = begin; i < end; ++i) {
      rows[i] = rows[i] < 0 ? answer.shared_row(ids[i]) : rows[i];
    }
  }
  return absent;
}

// Fills rows[first id, last id) of bags [first, last) and pools them. Returns how many ids had no row of their own.
template <bool scaled, typename weight_t>
RECFX_INLINE int64_t find_and_pool_bags(const Bags<weight_t>& bags, int64_t first, int64_t last, const int64_t* ids,
                                        int64_t* rows, const SlotTable& table, const AbsentAnswer& answer) {
  const int64_t rows_ahead = bags.rows_ahead();
  const int64_t end = bags.offsets[last];
  Finder finder(ids, rows, bags.offsets[first], end, table, answer.dense_rows);
  int64_t absent = 0;
  for (int64_t bag = first; bag < last; ++bag) {
    const int64_t needed = std::min(bags.offsets[bag + 1] + rows_ahead, end);
    while (finder.done() < needed) {
      const int64_t begin = finder.done();
      finder.step();
      absent += answer_absent(ids, rows, begin, finder.done(), answer);
    }
    pool_bag<scaled>(bags, bag, finder.done(), rows_ahead);
  }
  return absent;
}

template <typename weight_t>
RECFX_INLINE int64_t find_and_pool_either(const Bags<weight_t>& bags, int64_t first, int64_t last, const int64_t* ids,
                                          int64_t* rows, const SlotTable& table, const AbsentAnswer& answer) {
  return bags.scale == nullptr ? find_and_pool_bags<false>(bags, first, last, ids, rows, table, answer)
                               : find_and_pool_bags<true>(bags, first, last, ids, rows, table, answer);
}

RECFX_CLONES static int64_t find_and_pool(const Bags<float>& bags, int64_t first, int64_t last, const int64_t* ids,
                                          int64_t* rows, const SlotTable& table, const AbsentAnswer& answer) {
  return find_and_pool_either(bags, first, last, ids, rows, table, answer);
}

RECFX_CLONES static int64_t find_and_pool(const Bags<uint16_t>& bags, int64_t first, int64_t last, const int64_t* ids,
                                          int64_t* rows, const SlotTable& table, const AbsentAnswer& answer) {
  return find_and_pool_either(bags, first, last, ids, rows, table, answer);
}

}  // namespace recfx
