// Plain arrays, in which requests and answers are passed between the parts of the program that do not know torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace serve {

enum class DType { kBool, kUInt8, kInt32, kInt64, kFloat32, kFloat64 };

inline constexpr std::pair<std::string_view, DType> kDTypes[] = {
    {"bool", DType::kBool},   {"uint8", DType::kUInt8},     {"int32", DType::kInt32},
    {"int64", DType::kInt64}, {"float32", DType::kFloat32}, {"float64", DType::kFloat64},
};

inline std::string name_of(DType dtype) { return std::string(kDTypes[static_cast<size_t>(dtype)].first); }

struct Array {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  std::vector<std::byte> data;  // contiguous, in the machine's byte order
};

// Calls `function` with a value of the C++ type of `dtype`; one byte for each bool.
template <typename Function>
auto with_type(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
      return function(uint8_t{});
    case DType::kInt32:
      return function(int32_t{});
    case DType::kInt64:
      return function(int64_t{});
    case DType::kFloat32:
      return function(float{});
    case DType::kFloat64:
      break;
  }
  return function(double{});
}

}  // namespace serve
