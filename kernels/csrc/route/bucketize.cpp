// Sends the ids of a batch to the pieces of their tables. Contract: kernels/route/bucketize.py.
// Makes two parallel passes over ranges of bags: the first counts what goes where, the second writes. Where an id is
// written depends only on the counts, not on the number of threads.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "build/parallel.h"
#include "index/checks.h"
#include "route/piece_of.h"

namespace recfx {
namespace {

constexpr int64_t kIdsPerTask = 8192;
constexpr int64_t kWhole = -1;  // instead of a piece: the whole feature
constexpr int64_t kNowhere = -1;
constexpr int64_t kMostPieces = std::numeric_limits<uint16_t>::max();

// The arguments, checked and prepared.
struct Plan {
  int64_t batch_size;
  std::vector<std::optional<PieceOf>> features;   // nullopt: not cut
  std::vector<std::vector<int64_t>> first_entry;  // by feature and piece: where its ids are written, or kNowhere
  std::vector<int64_t> source;                    // per entry
  std::vector<int64_t> copied_from;               // per entry: an earlier one with the same ids, or kNowhere
  std::vector<bool> whole;                        // per entry
  std::vector<int64_t> offsets;                   // of the bags of all features
};

Plan plan_of(int64_t batch_size, at::IntArrayRef borders, at::IntArrayRef border_counts, at::IntArrayRef dense_rows,
             at::IntArrayRef rows, at::IntArrayRef buckets, at::IntArrayRef seeds, at::IntArrayRef sources,
             at::IntArrayRef pieces) {
  const size_t features = border_counts.size();
  TORCH_CHECK(batch_size >= 0, "recfx::bucketize: batch_size must not be negative, got ", batch_size);
  TORCH_CHECK(dense_rows.size() == features && rows.size() == features && buckets.size() == features &&
                  seeds.size() == features && sources.size() == pieces.size(),
              "recfx::bucketize: every list must have one entry per feature, or one per entry of the output");
  Plan plan{.batch_size = batch_size};
  size_t first = 0;
  for (size_t f = 0; f < features; ++f) {
    const int64_t count = border_counts[f];
    TORCH_CHECK(count >= 0 && first + count <= borders.size(),
                "recfx::bucketize: border_counts and borders do not match");
    const std::vector<int64_t> own(borders.begin() + first, borders.begin() + first + count);
    first += count;
    if (own.empty()) {
      plan.features.emplace_back();
      plan.first_entry.emplace_back();
      continue;
    }
    TORCH_CHECK(count >= 2 && count - 1 <= kMostPieces && own.front() == 0 && own.back() == rows[f] &&
                    std::is_sorted(own.begin(), own.end()),
                "recfx::bucketize: the row borders of feature ", f, " must ascend from 0 to its ", rows[f], " rows");
    TORCH_CHECK(buckets[f] == 0 || (dense_rows[f] >= 0 && 1 <= buckets[f] && buckets[f] <= rows[f] - dense_rows[f]),
                "recfx::bucketize: feature ", f, " has ", buckets[f], " buckets in ", rows[f], " rows, ", dense_rows[f],
                " of them dense");
    plan.features.emplace_back(std::in_place, own, rows[f], dense_rows[f], buckets[f], seeds[f]);
    plan.first_entry.emplace_back(count - 1, kNowhere);
  }
  std::vector<int64_t> first_whole(features, kNowhere);
  for (size_t e = 0; e < sources.size(); ++e) {
    TORCH_CHECK(0 <= sources[e] && sources[e] < static_cast<int64_t>(features),
                "recfx::bucketize: there is no feature ", sources[e]);
    const std::vector<int64_t>& of_pieces = plan.first_entry[sources[e]];
    TORCH_CHECK(kWhole <= pieces[e] && pieces[e] < static_cast<int64_t>(of_pieces.size()), "recfx::bucketize: feature ",
                sources[e], " has no piece ", pieces[e]);
    int64_t& known = pieces[e] == kWhole ? first_whole[sources[e]] : plan.first_entry[sources[e]][pieces[e]];
    plan.source.push_back(sources[e]);
    plan.whole.push_back(pieces[e] == kWhole);
    plan.copied_from.push_back(known);
    known = known == kNowhere ? static_cast<int64_t>(e) : known;
  }
  return plan;
}

// Adjacent bags of a feature that is cut.
struct Task {
  int64_t feature;
  int64_t first;
  int64_t last;
};

std::vector<Task> tasks_of(const Plan& plan) {
  std::vector<Task> tasks;
  for (size_t f = 0; f < plan.features.size() && plan.batch_size > 0; ++f) {
    if (!plan.features[f]) {
      continue;
    }
    const int64_t* offsets = plan.offsets.data() + f * plan.batch_size;
    const int64_t ids = offsets[plan.batch_size] - offsets[0];
    const int64_t parts = std::clamp<int64_t>(ids / kIdsPerTask, 1, plan.batch_size);
    for (int64_t part = 0; part < parts; ++part) {
      tasks.push_back({static_cast<int64_t>(f), part * plan.batch_size / parts, (part + 1) * plan.batch_size / parts});
    }
  }
  return tasks;
}

// Where each bag begins, and where the last one ends. `most`: the most ids that the lengths may add up to.
template <typename length_t>
std::vector<int64_t> offsets_of(const length_t* lengths, int64_t count, int64_t most) {
  std::vector<int64_t> offsets(count + 1);
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    offsets[i] = total;
    TORCH_CHECK(0 <= lengths[i] && lengths[i] <= most - total,
                "recfx::bucketize: lengths must not be negative and must add up to ", most, " ids, but number ", i,
                " is ", lengths[i]);
    total += lengths[i];
  }
  offsets[count] = total;
  return offsets;
}

// Counts the ids of each piece in one bag.
class BagCounts {
 public:
  explicit BagCounts(int64_t pieces) : counts_(pieces), bits_(64 / std::max<int64_t>(pieces, 2)) {}

  void count(const uint16_t* pieces, int64_t length) {
    const int64_t piece_count = static_cast<int64_t>(counts_.size());
    if (piece_count <= 8 && length < (int64_t{1} << bits_)) {  // all counters in one register
      uint64_t packed = 0;
      for (int64_t i = 0; i < length; ++i) {
        packed += uint64_t{1} << (pieces[i] * bits_);
      }
      for (int64_t piece = 0; piece < piece_count; ++piece) {
        counts_[piece] = static_cast<int64_t>((packed >> (piece * bits_)) & ((uint64_t{1} << bits_) - 1));
      }
      return;
    }
    std::fill(counts_.begin(), counts_.end(), 0);
    for (int64_t i = 0; i < length; ++i) {
      ++counts_[pieces[i]];
    }
  }

  int64_t operator[](int64_t piece) const { return counts_[piece]; }

 private:
  std::vector<int64_t> counts_;
  int64_t bits_;
};

// First pass: finds the piece of every id, and the lengths of the entries that the second pass writes.
template <typename length_t>
void count(const Plan& plan, const std::vector<Task>& tasks, const int64_t* ids, uint16_t* pieces, length_t* lengths) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> bad_task{kNone};
  parallel_for_each(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
    const auto& [feature, first, last] = tasks[t];
    const PieceOf& piece_of = *plan.features[feature];
    const int64_t* offsets = plan.offsets.data() + feature * plan.batch_size;
    if (!piece_of.find(ids + offsets[first], offsets[last] - offsets[first], pieces + offsets[first])) {
      int64_t known = bad_task.load();
      while (t < known && !bad_task.compare_exchange_weak(known, t)) {
      }
      return;
    }
    const std::vector<int64_t>& entries = plan.first_entry[feature];
    BagCounts counts(piece_of.pieces());
    for (int64_t bag = first; bag < last; ++bag) {
      counts.count(pieces + offsets[bag], offsets[bag + 1] - offsets[bag]);
      for (int64_t piece = 0; piece < piece_of.pieces(); ++piece) {
        if (entries[piece] != kNowhere) {
          lengths[entries[piece] * plan.batch_size + bag] = static_cast<length_t>(counts[piece]);
        }
      }
    }
  });
  if (bad_task != kNone) {
    const auto& [feature, first, last] = tasks[bad_task];
    const int64_t* offsets = plan.offsets.data() + feature * plan.batch_size;
    const uint64_t rows = static_cast<uint64_t>(plan.features[feature]->rows());
    const int64_t* bad = std::find_if(ids + offsets[first], ids + offsets[last],
                                      [&](int64_t id) { return static_cast<uint64_t>(id) >= rows; });
    TORCH_CHECK_INDEX(false, "recfx::bucketize: id ", *bad, " of feature ", feature, " is outside its ", rows, " rows");
  }
}

// Writes the lengths of all other entries.
template <typename length_t>
void complete_lengths(const Plan& plan, const length_t* lengths_in, length_t* lengths) {
  const int64_t size = plan.batch_size;
  for (size_t e = 0; e < plan.source.size(); ++e) {
    if (plan.whole[e]) {
      std::copy_n(lengths_in + plan.source[e] * size, size, lengths + e * size);
    } else if (plan.copied_from[e] != kNowhere) {
      std::copy_n(lengths + plan.copied_from[e] * size, size, lengths + e * size);
    }
  }
}

// Second pass: writes each of `values`, which has one value per id, to where the piece of its id goes.
// base_of(PieceOf of the feature, piece) -> what to subtract from each value
template <typename value_t, typename BaseOf>
void fill(const Plan& plan, const std::vector<Task>& tasks, const std::vector<int64_t>& offsets_out,
          const uint16_t* pieces, const value_t* values, value_t* out, const BaseOf& base_of) {
  parallel_for_each(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
    const auto& [feature, first, last] = tasks[t];
    const PieceOf& piece_of = *plan.features[feature];
    const int64_t* offsets = plan.offsets.data() + feature * plan.batch_size;
    std::vector<value_t*> targets;  // where the next value of each piece goes
    std::vector<value_t> bases;
    bool all_wanted = true;
    for (int64_t piece = 0; piece < piece_of.pieces(); ++piece) {
      const int64_t entry = plan.first_entry[feature][piece];
      all_wanted &= entry != kNowhere;
      targets.push_back(entry == kNowhere ? nullptr : out + offsets_out[entry * plan.batch_size + first]);
      bases.push_back(base_of(piece_of, piece));
    }
    for (int64_t i = offsets[first]; i < offsets[last]; ++i) {
      const uint16_t piece = pieces[i];
      if (all_wanted || targets[piece] != nullptr) {
        *targets[piece]++ = values[i] - bases[piece];
      }
    }
  });
  // Entries that hold a whole feature, and those that repeat an earlier entry.
  parallel_for_each(static_cast<int64_t>(plan.source.size()), [&](int64_t e) {
    const int64_t begin = offsets_out[e * plan.batch_size];
    const int64_t count = offsets_out[(e + 1) * plan.batch_size] - begin;
    if (count == 0) {
      return;
    }
    if (plan.whole[e]) {
      std::copy_n(values + plan.offsets[plan.source[e] * plan.batch_size], count, out + begin);
    } else if (plan.copied_from[e] != kNowhere) {
      std::copy_n(out + offsets_out[plan.copied_from[e] * plan.batch_size], count, out + begin);
    }
  });
}

template <typename word_t>
void fill_words(const Plan& plan, const std::vector<Task>& tasks, const std::vector<int64_t>& offsets_out,
                const uint16_t* pieces, const at::Tensor& values, const at::Tensor& out) {
  fill(plan, tasks, offsets_out, pieces, static_cast<const word_t*>(values.const_data_ptr()),
       static_cast<word_t*>(out.data_ptr()), [](const PieceOf&, int64_t) { return word_t{0}; });
}

template <typename length_t>
std::tuple<at::Tensor, at::Tensor, at::Tensor> bucketize_as(Plan& plan, const at::Tensor& ids,
                                                            const at::Tensor& lengths, const at::Tensor& weights) {
  const length_t* lengths_in = lengths.const_data_ptr<length_t>();
  plan.offsets = offsets_of(lengths_in, lengths.numel(), ids.numel());
  TORCH_CHECK(plan.offsets.back() == ids.numel(), "recfx::bucketize: lengths add up to ", plan.offsets.back(),
              ", but there are ", ids.numel(), " ids");
  const std::vector<Task> tasks = tasks_of(plan);
  const int64_t bags_out = static_cast<int64_t>(plan.source.size()) * plan.batch_size;
  at::Tensor lengths_out = at::empty({bags_out}, lengths.options());
  length_t* lengths_data = lengths_out.data_ptr<length_t>();
  const at::Tensor piece_tensor = at::empty({ids.numel() * 2}, at::TensorOptions().dtype(at::kByte));
  uint16_t* pieces = static_cast<uint16_t*>(piece_tensor.data_ptr());
  const int64_t* id_data = int64_data(ids, "ids");

  count(plan, tasks, id_data, pieces, lengths_data);
  complete_lengths(plan, lengths_in, lengths_data);
  const std::vector<int64_t> offsets_out = offsets_of(lengths_data, bags_out, std::numeric_limits<int64_t>::max());
  at::Tensor ids_out = at::empty({offsets_out.back()}, ids.options());
  fill(plan, tasks, offsets_out, pieces, id_data, ids_out.data_ptr<int64_t>(),
       [](const PieceOf& of, int64_t piece) { return of.ids_are_rows() ? of.first_row(piece) : 0; });
  at::Tensor weights_out = at::empty({weights.numel() == 0 ? 0 : offsets_out.back()}, weights.options());
  if (weights.numel() > 0) {
    switch (weights.element_size()) {  // only moved, so any type of this size will do
      case 2:
        fill_words<uint16_t>(plan, tasks, offsets_out, pieces, weights, weights_out);
        break;
      case 4:
        fill_words<uint32_t>(plan, tasks, offsets_out, pieces, weights, weights_out);
        break;
      default:
        fill_words<uint64_t>(plan, tasks, offsets_out, pieces, weights, weights_out);
    }
  }
  return {ids_out, lengths_out, weights_out};
}

// Returns ids, lengths, weights ([0] if there are none).
std::tuple<at::Tensor, at::Tensor, at::Tensor> bucketize(
    const at::Tensor& ids, const at::Tensor& lengths, int64_t batch_size, at::IntArrayRef borders,
    at::IntArrayRef border_counts, at::IntArrayRef dense_rows, at::IntArrayRef rows, at::IntArrayRef buckets,
    at::IntArrayRef seeds, at::IntArrayRef sources, at::IntArrayRef pieces, const std::optional<at::Tensor>& weights) {
  Plan plan = plan_of(batch_size, borders, border_counts, dense_rows, rows, buckets, seeds, sources, pieces);
  const at::Tensor ids_contiguous = ids.contiguous();
  int64_data(ids_contiguous, "ids");
  TORCH_CHECK(lengths.device().is_cpu() && lengths.dim() == 1 &&
                  (lengths.scalar_type() == at::kLong || lengths.scalar_type() == at::kInt) &&
                  lengths.numel() == static_cast<int64_t>(border_counts.size()) * batch_size,
              "recfx::bucketize: lengths must be int64 or int32 [F * B] = [", border_counts.size(), " * ", batch_size,
              "] on the CPU, got ", lengths.scalar_type(), " ", lengths.sizes());
  TORCH_CHECK(
      !weights || (weights->device().is_cpu() && weights->dim() == 1 && weights->numel() == ids.numel() &&
                   weights->element_size() >= (weights->is_floating_point() ? 2 : 4) && weights->element_size() <= 8),
      "recfx::bucketize: weights must be floats, int32 or int64 [", ids.numel(), "] on the CPU");
  const at::Tensor lengths_contiguous = lengths.contiguous();
  const at::Tensor weights_contiguous =
      weights ? weights->contiguous() : at::empty({0}, at::TensorOptions().dtype(at::kFloat));
  return lengths.scalar_type() == at::kLong
             ? bucketize_as<int64_t>(plan, ids_contiguous, lengths_contiguous, weights_contiguous)
             : bucketize_as<int32_t>(plan, ids_contiguous, lengths_contiguous, weights_contiguous);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def(
      "bucketize(Tensor ids, Tensor lengths, int batch_size, int[] borders, int[] border_counts, int[] dense_rows, "
      "int[] rows, int[] buckets, int[] seeds, int[] sources, int[] pieces, Tensor? weights) "
      "-> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) { library.impl("bucketize", bucketize); }

}  // namespace recfx
