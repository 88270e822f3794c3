// One step of a rule for all tables of a lookup, pooled or not. Contract: kernels/step/fused_step.py.
// Determinism: one thread sums the gradients of each row, in the order of the batch.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "build/tasks.h"
#include "index/checks.h"
#include "lookup/lookup_checks.h"
#include "step/adagrad_rule.h"
#include "step/adam_rule.h"
#include "step/lamb_rule.h"
#include "step/lars_sgd_rule.h"
#include "step/partial_rowwise_adam_rule.h"
#include "step/partial_rowwise_lamb_rule.h"
#include "step/rowwise_adagrad_decoupled_rule.h"
#include "step/rowwise_adagrad_rule.h"
#include "step/sgd_rule.h"
#include "step/step_rows.h"

namespace recfx {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalTensors = c10::List<OptionalTensor>;
constexpr size_t kNumbers = sizeof(StepNumbers) / sizeof(float);

struct StepArguments {
  const int64_t* rows;
  const BatchBags& batch;
  const float* scale;  // null: no per-sample weights
  at::TensorList weights;
  at::TensorList first;
  at::TensorList second;
  const std::vector<GroupedTable>& tables;
  const std::vector<std::vector<FeatureGradients>>& gradients;  // per table and feature that is stepped
  int64_t columns;                                              // of the pooled output
  at::ArrayRef<double> numbers;
  bool mean;
};

StepNumbers numbers_of(at::ArrayRef<double> numbers, int64_t table) {
  const double* of_table = numbers.data() + table * static_cast<int64_t>(kNumbers);
  const auto number = [&](int64_t k) { return static_cast<float>(of_table[k]); };
  return {number(0), number(1), number(2), number(3), number(4), number(5), number(6), number(7), number(8), number(9)};
}

// What multiplies the gradient of a position's bag.
struct ScaleOf {
  const float* scale;
  bool mean;

  float operator()(int64_t position, int64_t length) const {
    return mean ? 1.0F / static_cast<float>(length) : scale[position];
  }
};

// What a rule does to the rows of one group.
template <typename position_t>
using StepGroup = void (*)(const SteppedTable&, int64_t, SortedPositions<position_t>, float*);

// A rule, of which only the steps of groups are compiled for each type of weights: float32, float16 and bfloat16.
struct RuleOnTables {
  const char* name;
  RowState first;
  RowState second;
  StepGroup<Position> step[3];
  StepGroup<ScaledPosition> step_scaled[3];
};

template <typename Rule>
constexpr RuleOnTables rule_on_tables() {
  return {Rule::kName,
          Rule::kFirst,
          Rule::kSecond,
          {&step_sorted<Rule, float, Position>, &step_sorted<Rule, uint16_t, Position>,
           &step_sorted<Rule, BFloat16, Position>},
          {&step_sorted<Rule, float, ScaledPosition>, &step_sorted<Rule, uint16_t, ScaledPosition>,
           &step_sorted<Rule, BFloat16, ScaledPosition>}};
}

template <typename position_t>
void step_tables(const StepArguments& given, const RuleOnTables& rule, StepGroup<position_t> step) {
  RowGroups<position_t, ScaleOf> groups(
      given.rows, given.batch, given.tables, {given.scale, given.mean}, at::get_num_threads(),
      [](int64_t ids, int64_t count, const auto& run) { run_tasks(ids, count, run); });
  if (groups.beyond()) {
    const auto [table, row] = *groups.beyond();
    refuse_row("fused_step_", row, table, given.tables[table].rows);
  }
  std::vector<SteppedTable> tables;
  for (size_t t = 0; t < given.tables.size(); ++t) {
    const int64_t dim = given.weights[t].size(1);
    const bool is_stepped = !given.tables[t].features.empty();
    tables.push_back({given.weights[t].data_ptr(),
                      is_stepped && rule.first != RowState::kNone ? given.first[t].data_ptr<float>() : nullptr,
                      is_stepped && rule.second != RowState::kNone ? given.second[t].data_ptr<float>() : nullptr, dim,
                      given.gradients[t].data(), static_cast<int64_t>(given.gradients[t].size()),
                      given.batch.unpooled ? dim : given.columns,
                      static_cast<uint32_t>(given.batch.unpooled ? 0 : given.batch.batch_size),
                      numbers_of(given.numbers, static_cast<int64_t>(t))});
  }
  const int64_t count = static_cast<int64_t>(groups.groups().size());
  run_tasks_with_space(groups.positions(), count, kStepSpace * std::max<int64_t>(widest_of(given.weights), 1),
                       [&](int64_t k, float* space) {
                         const PositionGroup& group = groups.groups()[k];
                         step(tables[group.table], group.first_row, groups.sorted(group), space);
                       });
}

void check_states(const char* name, at::TensorList states, const StepArguments& given, RowState kind) {
  const at::TensorList weights = given.weights;
  const bool is_there = kind != RowState::kNone, per_row = kind == RowState::kPerRow;
  TORCH_CHECK(states.size() == (is_there ? weights.size() : 0), "recfx::fused_step_: the rule needs ",
              is_there ? weights.size() : 0, " ", name, " states, got ", states.size());
  for (size_t t = 0; t < states.size(); ++t) {
    if (given.tables[t].features.empty()) {
      continue;
    }
    TORCH_CHECK(states[t].device().is_cpu() && states[t].scalar_type() == at::kFloat && states[t].is_contiguous() &&
                    states[t].numel() == weights[t].size(0) * (per_row ? 1 : weights[t].size(1)),
                "recfx::fused_step_: the ", name, " state of table ", t, " must be contiguous float32 [rows, ",
                per_row ? "1" : "dim", "] on the CPU");
  }
}

constexpr RuleOnTables kRules[] = {rule_on_tables<SgdRule>(),
                                   rule_on_tables<AdagradRule>(),
                                   rule_on_tables<RowWiseAdagradRule>(),
                                   rule_on_tables<RowWiseAdagradDecoupledRule>(),
                                   rule_on_tables<AdamRule>(),
                                   rule_on_tables<PartialRowWiseAdamRule>(),
                                   rule_on_tables<LambRule>(),
                                   rule_on_tables<PartialRowWiseLambRule>(),
                                   rule_on_tables<LarsSgdRule>()};

std::vector<std::string> fused_step_rules() {
  std::vector<std::string> names;
  for (const RuleOnTables& rule : kRules) {
    names.emplace_back(rule.name);
  }
  return names;
}

// The gradients of a feature, from those of the lookup's outputs; nullopt if its output got none.
std::optional<FeatureGradients> gradients_of(const std::vector<OptionalTensor>& gradients, const BatchBags& batch,
                                             int64_t feature, int64_t first_column, int64_t number) {
  if (!batch.unpooled) {
    const float* rows = gradients[0]->const_data_ptr<float>() + first_column;
    return FeatureGradients{rows, static_cast<uint32_t>(number * batch.batch_size)};
  }
  if (!gradients[feature].has_value()) {
    return std::nullopt;
  }
  return FeatureGradients{gradients[feature]->const_data_ptr<float>(), static_cast<uint32_t>(batch.first_of(feature))};
}

void fused_step_(const at::Tensor& rows, const at::Tensor& offsets, const OptionalTensors& given_gradients,
                 at::TensorList weights, at::TensorList first, at::TensorList second, at::IntArrayRef table_of_feature,
                 c10::List<bool> is_stepped, c10::string_view rule, at::ArrayRef<double> numbers, bool mean,
                 const OptionalTensor& per_sample_weights, const OptionalTensor& step_counts, bool unpooled) {
  const at::Tensor rows_contiguous = rows.contiguous(), offsets_contiguous = offsets.contiguous();
  const int64_t* row_data = int64_data(rows_contiguous, "rows");
  const int64_t* offset_data = int64_data(offsets_contiguous, "offsets");
  const auto features = static_cast<int64_t>(table_of_feature.size());
  const BatchBags batch{offset_data, checked_batch_size(offsets_contiguous, features, rows.numel()), unpooled};
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  TORCH_CHECK(rows.numel() <= kMost && offsets.numel() <= kMost, "recfx::fused_step_: a batch has at most ", kMost,
              " ids and bags");
  check_weights(weights);
  TORCH_CHECK(is_stepped.size() == weights.size() && numbers.size() == kNumbers * weights.size(),
              "recfx::fused_step_ needs one entry per table in is_stepped, and ", kNumbers, " in numbers");
  const std::vector<int64_t> first_columns = checked_columns(weights, table_of_feature);
  const std::vector<OptionalTensor> gradients = given_gradients.vec();
  if (unpooled) {
    check_unpooled(offsets_contiguous, features, rows.numel(), mean, per_sample_weights.has_value());
  }
  TORCH_CHECK(
      static_cast<int64_t>(gradients.size()) == (unpooled ? features : 1) && (unpooled || gradients[0].has_value()),
      "recfx::fused_step_ needs the gradient of a pooled output, or one per feature, got ", gradients.size());
  for (size_t k = 0; k < gradients.size(); ++k) {
    if (gradients[k].has_value()) {
      check_gradients(*gradients[k], unpooled ? batch.ids_of(k) : batch.batch_size,
                      unpooled ? weights[table_of_feature[k]].size(1) : first_columns.back());
    }
  }
  std::vector<GroupedTable> tables;
  for (const at::Tensor& weight : weights) {
    tables.push_back({weight.size(0), {}});
  }
  std::vector<std::vector<FeatureGradients>> of_tables(weights.size());
  for (int64_t feature = 0; feature < features; ++feature) {
    const int64_t table = table_of_feature[feature];
    const auto number = static_cast<int64_t>(of_tables[table].size());
    const auto found = gradients_of(gradients, batch, feature, first_columns[feature], number);
    if (is_stepped.get(table) && found.has_value()) {
      tables[table].features.push_back(feature);
      of_tables[table].push_back(*found);
    }
  }
  at::Tensor scale;
  if (per_sample_weights.has_value()) {
    check_per_sample_weights(*per_sample_weights, rows.numel(), mean);
    scale = per_sample_weights->contiguous();
  }
  const StepArguments given{row_data, batch,     scale.defined() ? scale.const_data_ptr<float>() : nullptr,
                            weights,  first,     second,
                            tables,   of_tables, first_columns.back(),
                            numbers,  mean};
  const auto found =
      std::find_if(std::begin(kRules), std::end(kRules), [&](const RuleOnTables& each) { return rule == each.name; });
  TORCH_CHECK(found != std::end(kRules), "recfx::fused_step_ has no rule ", rule);
  if (step_counts.has_value()) {
    TORCH_CHECK(step_counts->device().is_cpu() && step_counts->scalar_type() == at::kFloat &&
                    step_counts->is_contiguous() && step_counts->dim() == 1 &&
                    step_counts->numel() == static_cast<int64_t>(weights.size()),
                "recfx::fused_step_: step_counts must be contiguous float32 [", weights.size(), "] on the CPU");
  }
  check_states("first", first, given, found->first);
  check_states("second", second, given, found->second);
  const at::ScalarType dtype = weights[0].scalar_type();
  const int place = dtype == at::kFloat ? 0 : dtype == at::kHalf ? 1 : 2;
  if (mean || given.scale != nullptr) {
    step_tables(given, *found, found->step_scaled[place]);
  } else {
    step_tables(given, *found, found->step[place]);
  }
  for (size_t t = 0; step_counts.has_value() && t < weights.size(); ++t) {
    step_counts->data_ptr<float>()[t] += tables[t].features.empty() ? 0.0F : 1.0F;
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(recfx, library) {
  library.def(
      "fused_step_(Tensor rows, Tensor offsets, Tensor?[] gradients, Tensor(a!)[] weights, Tensor(b!)[] first_states, "
      "Tensor(c!)[] second_states, int[] table_of_feature, bool[] is_stepped, str rule, float[] numbers, bool mean, "
      "Tensor? per_sample_weights, Tensor(d!)? step_counts, bool unpooled=False) -> ()");
  library.def("fused_step_rules() -> str[]", fused_step_rules);
}

TORCH_LIBRARY_IMPL(recfx, CPU, library) { library.impl("fused_step_", fused_step_); }

}  // namespace recfx
