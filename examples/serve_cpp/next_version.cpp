#include "next_version.h"

#include <ATen/core/ivalue.h>

#include <cstring>
#include <stdexcept>
#include <utility>

namespace serve {
namespace {

// Where the program is in the module of a file.
const std::string kProgram = "program.program.";

// New values, by path.
using Values = std::map<std::string, c10::IValue>;

// The name of the module that a path leads through first, and the path from there; nothing but a name is a path's end.
std::pair<std::string, std::string> split(const std::string& path) {
  const size_t dot = path.find('.');
  return dot == std::string::npos ? std::pair(path, std::string())
                                  : std::pair(path.substr(0, dot), path.substr(dot + 1));
}

std::pair<torch::jit::Module, std::string> place_of(torch::jit::Module module, const std::string& path) {
  auto [name, rest] = split(path);
  for (; !rest.empty(); std::tie(name, rest) = split(rest)) {
    module = module.attr(name).toModule();
  }
  return {module, name};
}

c10::IValue value_at(const torch::jit::Module& module, const std::string& path) {
  const auto [place, name] = place_of(module, path);
  return place.attr(name);
}

void require(bool holds, const std::string& name) {
  if (!holds) {
    throw std::invalid_argument("what it has of " + name + " does not fit");
  }
}

// Write the units of a stretch that change; the tensor is contiguous.
void write_units(const at::Tensor& tensor, const Stretch& stretch, at::Tensor which, at::Tensor data) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  require(stretch.begin >= 0 && stretch.begin <= bytes && stretch.unit > 0 && stretch.count >= 0 &&
              stretch.count <= (bytes - stretch.begin) / stretch.unit,
          stretch.tensor);
  require(data.scalar_type() == at::kByte && data.sizes() == at::IntArrayRef({which.numel(), stretch.unit}),
          stretch.tensor);
  which = which.to(at::kLong).contiguous();
  data = data.contiguous();
  auto* to = static_cast<std::byte*>(tensor.mutable_data_ptr()) + stretch.begin;
  const auto* from = static_cast<const std::byte*>(data.const_data_ptr());
  const auto* units = which.const_data_ptr<int64_t>();
  for (int64_t at = 0; at < which.numel(); ++at) {
    require(units[at] >= 0 && units[at] < stretch.count, stretch.tensor);
    std::memcpy(to + units[at] * stretch.unit, from + at * stretch.unit, static_cast<size_t>(stretch.unit));
  }
}

// A list as the module declares it: of numbers, or of named tuples of numbers.
c10::IValue list_of(const c10::TypePtr& declared, const std::vector<int64_t>& numbers, const std::string& name) {
  const c10::TypePtr element = declared->expectRef<c10::ListType>().getElementType();
  const auto tuple = element->cast<c10::TupleType>();
  if (!tuple) {
    return c10::List<int64_t>(numbers);
  }
  c10::impl::GenericList list(element);
  const size_t fields = tuple->elements().size();
  require(fields > 0 && numbers.size() % fields == 0, name);
  for (auto first = numbers.begin(); first != numbers.end(); first += static_cast<int64_t>(fields)) {
    const std::vector<c10::IValue> values(first, first + static_cast<int64_t>(fields));
    list.push_back(c10::ivalue::Tuple::createNamed(values, tuple));
  }
  return list;
}

// A module with other values at some paths; it shares the other ones.
torch::jit::Module with(const torch::jit::Module& module, const Values& values) {
  torch::jit::Module made = module.copy();
  std::map<std::string, Values> inside;
  for (const auto& [path, value] : values) {
    const auto [name, rest] = split(path);
    if (rest.empty()) {
      made.setattr(name, value);
    } else {
      inside[name].emplace(rest, value);
    }
  }
  for (const auto& [name, changed] : inside) {
    made.setattr(name, with(module.attr(name).toModule(), changed)._ivalue());
  }
  return made;
}

}  // namespace

torch::jit::Module next_version(const torch::jit::Module& old, const Changes& changes,
                                const torch::jit::Module& delta) {
  Values values;
  for (const auto& [name, of_delta] : changes.tensors) {
    const at::Tensor before = value_at(old, kProgram + name).toTensor(), after = delta.attr(of_delta).toTensor();
    require(before.scalar_type() == after.scalar_type() && before.sizes() == after.sizes(), name);
    values[kProgram + name] = after;
  }
  for (const Stretch& stretch : changes.stretches) {
    c10::IValue& value = values[kProgram + stretch.tensor];
    if (value.isNone()) {
      value = value_at(old, kProgram + stretch.tensor).toTensor().clone(at::MemoryFormat::Contiguous);
    }
    write_units(value.toTensor(), stretch, delta.attr(stretch.which).toTensor(), delta.attr(stretch.data).toTensor());
  }
  for (const auto& [name, parts] : changes.lists) {
    c10::List<at::Tensor> list;
    for (const std::string& part : parts) {
      const auto changed = values.find(kProgram + part);
      list.push_back((changed == values.end() ? value_at(old, kProgram + part) : changed->second).toTensor());
    }
    values[kProgram + name] = list;
  }
  for (const auto& [name, numbers] : changes.attributes) {
    const auto [place, attribute] = place_of(old, kProgram + name);
    values[kProgram + name] = list_of(place.type()->getAttribute(attribute), numbers, name);
  }
  return with(old, values);
}

}  // namespace serve
