// The set of free rows as a tree of bits with 64 children per word. Finding the lowest free row at or after a given one
// takes as many steps as the tree has levels, whatever rows were taken and given back before. The tree takes one bit
// per row, plus 1/63 of that. This file does not use torch.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

namespace recfx {

// A view of a buffer, which it does not own. Layout: level 0 (one bit per row), then level 1 (one bit per word of level
// 0, set if that word is not zero), and so on up to a level of one word. kernels/index/free_rows.py has the same
// layout.
class FreeRows {
 public:
  FreeRows(uint64_t* words, int64_t rows) : words_(words) {
    int64_t bits = rows;
    int64_t start = 0;
    do {
      const int64_t size = (bits + 63) / 64;
      start_[levels_] = start;
      size_[levels_] = size;
      ++levels_;
      start += size;
      bits = size;
    } while (bits > 1);
    total_ = start;
  }

  int64_t total_words() const { return total_; }

  void give_back(int64_t row) {
    int64_t position = row;
    for (int level = 0; level < levels_; ++level) {
      word(level, position >> 6) |= uint64_t{1} << (position & 63);
      position >>= 6;
    }
  }

  // Several threads may call take() and lowest() at the same time, if each asks for rows of its own ranges only, and if
  // rows are given back before they begin or after they have ended. Relaxed: a word that still has one of a thread's
  // own rows is not 0, so nobody clears the bit above it, and a thread's own bits are as it has left them. Of what
  // others take, it may see one level later than the next; that only concerns words at the two ends of its ranges.
  void take(int64_t row) {
    int64_t position = row;
    for (int level = 0; level < levels_; ++level) {
      const uint64_t bit = uint64_t{1} << (position & 63);
      std::atomic_ref<uint64_t> bits(word(level, position >> 6));
      if (bits.fetch_and(~bit, std::memory_order_relaxed) != bit) {
        return;
      }
      position >>= 6;
    }
  }

  // Returns -1 if there is none below `end`.
  int64_t lowest(int64_t begin, int64_t end) const {
    int64_t position = begin;
    for (int level = 0; level < levels_; ++level) {
      if ((position >> 6) >= size_[level]) {
        return -1;
      }
      const uint64_t bits = read(level, position >> 6) & (~uint64_t{0} << (position & 63));
      if (bits != 0) {
        position = (position & ~int64_t{63}) + std::countr_zero(bits);
        while (level > 0) {
          --level;
          const uint64_t below = read(level, position);
          if (below == 0) {  // another thread has just taken its last row, so none of ours is there
            return -1;
          }
          position = position * 64 + std::countr_zero(below);
        }
        return position < end ? position : -1;
      }
      position = (position >> 6) + 1;
    }
    return -1;
  }

 private:
  uint64_t read(int level, int64_t index) const {
    return std::atomic_ref<uint64_t>(word(level, index)).load(std::memory_order_relaxed);
  }
  uint64_t& word(int level, int64_t index) const { return words_[start_[level] + index]; }

  static constexpr int kMostLevels = 11;  // 64 ** 11 is more than any int64
  uint64_t* words_;
  int levels_ = 0;
  int64_t total_ = 0;
  int64_t start_[kMostLevels] = {};
  int64_t size_[kMostLevels] = {};
};

}  // namespace recfx
