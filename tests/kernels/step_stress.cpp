// Random batches, stepped by several threads and by one, without torch: the same bits, and what a plain loop computes.
// Compiled with sanitizers. "beyond" steps a row that the table has not, for which the address sanitizer has to stop.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "step/adam_rule.h"
#include "step/partial_rowwise_lamb_rule.h"
#include "step/rowwise_adagrad_rule.h"
#include "step/sgd_rule.h"
#include "step/step_rows.h"

namespace {

using recfx::StepNumbers;

struct Batch {
  int64_t size;
  std::vector<recfx::GroupedTable> tables;
  std::vector<int64_t> dims;
  std::vector<int64_t> first_columns;  // per feature
  int64_t columns = 0;
  std::vector<int64_t> rows;
  std::vector<int64_t> offsets;
  std::vector<float> gradients;
};

int64_t number(std::mt19937_64& random, int64_t below) { return static_cast<int64_t>(random() % below); }

Batch random_batch(std::mt19937_64& random) {
  Batch batch;
  batch.size = number(random, 4) == 0 ? number(random, 3) : number(random, 3000);
  const int64_t longest = 1 + number(random, 6);
  batch.offsets.push_back(0);
  for (int64_t table = 1 + number(random, 3); table > 0; --table) {
    const int64_t rows = 1 + number(random, 1 << number(random, 20));
    batch.tables.push_back({rows, {}});
    // Many rows are for the passes that sort them; what a row holds is stepped alike.
    batch.dims.push_back(1 + number(random, rows < (1 << 14) ? 40 : 3));
    for (int64_t feature = 1 + number(random, 2); feature > 0; --feature) {
      batch.tables.back().features.push_back(static_cast<int64_t>(batch.first_columns.size()));
      batch.first_columns.push_back(batch.columns);
      batch.columns += batch.dims.back();
      const int64_t among = 1 + number(random, rows);
      for (int64_t bag = 0; bag < batch.size; ++bag) {
        for (int64_t id = number(random, longest); id > 0; --id) {
          batch.rows.push_back(number(random, 20) == 0 ? -1 : number(random, among));
        }
        batch.offsets.push_back(static_cast<int64_t>(batch.rows.size()));
      }
    }
  }
  for (int64_t k = 0; k < batch.size * batch.columns; ++k) {
    batch.gradients.push_back(static_cast<float>(number(random, 33) - 16) / 16);
  }
  return batch;
}

void run_on(int threads, int64_t count, const std::function<void(int64_t)>& run) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t k = next++; k < count; k = next++) {
      run(k);
    }
  };
  std::vector<std::thread> others;
  for (int k = 1; k < threads; ++k) {
    others.emplace_back(work);
  }
  work();
  for (std::thread& other : others) {
    other.join();
  }
}

template <typename weight_t>
struct Stepped {
  std::vector<std::vector<weight_t>> weights;
  std::vector<std::vector<float>> first, second;
};

template <typename Rule, typename weight_t, typename position_t>
Stepped<weight_t> stepped(const Batch& batch, int threads, int64_t beyond) {
  Stepped<weight_t> made;
  auto& [weights, first, second] = made;
  std::vector<std::vector<recfx::FeatureGradients>> gradients;  // of each table
  std::vector<recfx::SteppedTable> tables;
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    const int64_t values = batch.tables[t].rows * batch.dims[t];
    weights.emplace_back(values);
    const bool per_row = Rule::kFirst == recfx::RowState::kPerRow;
    first.emplace_back(per_row ? batch.tables[t].rows : values, 0.5F);
    const bool second_per_row = Rule::kSecond == recfx::RowState::kPerRow;
    second.emplace_back(second_per_row ? batch.tables[t].rows : values, 0.25F);
    gradients.emplace_back();
    for (const int64_t feature : batch.tables[t].features) {
      const auto first_bag = static_cast<uint32_t>(gradients.back().size() * batch.size);
      gradients.back().push_back({batch.gradients.data() + batch.first_columns[feature], first_bag});
    }
  }
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    tables.push_back({weights[t].data(),
                      first[t].data(),
                      second[t].data(),
                      batch.dims[t],
                      gradients[t].data(),
                      static_cast<int64_t>(gradients[t].size()),
                      batch.columns,
                      static_cast<uint32_t>(batch.size),
                      {0.5F, 0.125F, 1e-3F, 0.1F, 0.9F, 0.1F, 0.5F, 0.25F, 0.125F, 0.5F}});
  }
  const auto scale_of = [](int64_t position, int64_t length) { return static_cast<float>(position % 3 + length); };
  recfx::RowGroups<position_t, decltype(scale_of)> groups(
      batch.rows.data(), {batch.offsets.data(), batch.size}, batch.tables, scale_of, threads,
      [&](int64_t, int64_t count, const auto& run) { run_on(threads, count, run); });
  run_on(threads, static_cast<int64_t>(groups.groups().size()), [&](int64_t k) {
    const recfx::PositionGroup& group = groups.groups()[k];
    std::vector<float> space(recfx::kStepSpace * batch.dims[group.table]);
    recfx::step_sorted<Rule, weight_t>(tables[group.table], group.first_row + beyond, groups.sorted(group),
                                       space.data());
  });
  return made;
}

template <typename Rule, typename weight_t, typename position_t>
void check_threads(const Batch& batch) {
  const auto one = stepped<Rule, weight_t, position_t>(batch, 1, 0);
  const auto three = stepped<Rule, weight_t, position_t>(batch, 3, 0);
  for (size_t t = 0; t < one.weights.size(); ++t) {
    const size_t bytes = one.weights[t].size() * sizeof(weight_t);
    if (std::memcmp(one.weights[t].data(), three.weights[t].data(), bytes) != 0 || one.first[t] != three.first[t] ||
        one.second[t] != three.second[t]) {
      std::printf("threads change the result\n");
      std::exit(1);
    }
  }
}

// Multiples of 1/16 are added exactly in any order.
void check_sums(const Batch& batch) {
  const auto found = stepped<recfx::SgdRule, float, recfx::Position>(batch, 3, 0);
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    std::vector<float> wanted(batch.tables[t].rows * batch.dims[t]);
    for (const int64_t feature : batch.tables[t].features) {
      for (int64_t bag = 0; bag < batch.size; ++bag) {
        const int64_t* bounds = batch.offsets.data() + feature * batch.size + bag;
        for (int64_t i = bounds[0]; i < bounds[1]; ++i) {
          for (int64_t j = 0; j < batch.dims[t] && batch.rows[i] >= 0; ++j) {
            const float gradient = batch.gradients[bag * batch.columns + batch.first_columns[feature] + j];
            wanted[batch.rows[i] * batch.dims[t] + j] -= 0.5F * gradient;
          }
        }
      }
    }
    if (found.weights[t] != wanted) {
      std::printf("a sum is wrong\n");
      std::exit(1);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::mt19937_64 random(7);
  if (count > 1 && std::string(arguments[1]) == "beyond") {
    Batch batch;
    while (batch.rows.empty()) {
      batch = random_batch(random);
    }
    stepped<recfx::SgdRule, float, recfx::Position>(batch, 1, 1 << 20);
    return 0;
  }
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 40;
  for (int round = 0; round < rounds; ++round) {
    const Batch batch = random_batch(random);
    check_sums(batch);
    check_threads<recfx::AdamRule, float, recfx::ScaledPosition>(batch);
    check_threads<recfx::RowWiseAdagradRule, uint16_t, recfx::Position>(batch);
    check_threads<recfx::SgdRule, recfx::BFloat16, recfx::ScaledPosition>(batch);
    check_threads<recfx::PartialRowWiseLambRule, uint16_t, recfx::ScaledPosition>(batch);
  }
  std::printf("done\n");
}
