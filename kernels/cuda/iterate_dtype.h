// The element type of U and O on the device: f16 holds three bits more than bf16 of numbers that
// are scaled to fit, and its products are as fast.
#pragma once

#include "kernels/tensor.h"

namespace muond::kernels::cuda {

inline constexpr Dtype kIterateDtype = Dtype::kF16;

}  // namespace muond::kernels::cuda
