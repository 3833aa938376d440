// The values that cross the kernels' boundary: element types and views of memory.
// Standard library only; every implementation and the engine share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace muond::kernels {

// The element types that trainers use. Optimizer state is kF32 (momentum may be kBF16 on request).
enum class Dtype : std::uint8_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// Bytes of one element: 4, 2, 2.
std::size_t DtypeBytes(Dtype dtype);

// "f32", "bf16", "f16".
std::string_view DtypeName(Dtype dtype);

// Per-element conversions, round to nearest even, subnormals kept, NaN stays NaN, values beyond the
// largest finite one become infinity (IEEE 754 binary16 and bfloat16).
float F16ToFloat(std::uint16_t bits);
float BF16ToFloat(std::uint16_t bits);
std::uint16_t FloatToF16(float value);
std::uint16_t FloatToBF16(float value);

// The gradient of one whole parameter, as the trainer sent it or as its fp32 sum over ranks.
// The value of element i is float(data[i]) * unscale, a product in fp32; `unscale` holds
// 1 / (loss scale x mean divisor), so a power of two there changes no bit of the result.
struct GradientView {
  const void* data = nullptr;  // `elements` values of `dtype`, in the backend's memory, read-only
  Dtype dtype = Dtype::kF32;
  std::size_t elements = 0;
  float unscale = 1.0f;
};

// Gradient norms and state digests are computed over fixed blocks of this many elements of the
// logical tensor, so that neither depends on how a tensor is cut into slices, chunks or owners.
inline constexpr std::size_t kBlockElements = 64 * 1024;

inline constexpr std::size_t BlockCount(std::size_t elements) {
  return (elements + kBlockElements - 1) / kBlockElements;
}

// What went wrong in a kernel; empty means success. Allocation failure and device errors are the
// only causes: arguments are checked by the engine, non-finite data is a result, not an error.
class [[nodiscard]] Error {
 public:
  Error() = default;
  explicit Error(std::string message) : message_(std::move(message)) {}
  // True when there is an error.
  explicit operator bool() const { return !message_.empty(); }
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

}  // namespace muond::kernels
