// Plain arrays, in which requests and answers are passed between the parts of the program that do not know torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace serve {

enum class DType { kBool, kUInt8, kInt32, kInt64, kFloat32, kFloat64 };

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
