// Newton-Schulz on a real device against the fp64 reference backend.
#include "kernels/cuda/newton_schulz.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/coefficients.h"
#include "kernels/cuda/devices.h"

namespace muond::kernels::cuda {
namespace {

using Bits = std::vector<std::uint16_t>;

// fp16 values on the device, `offset` bytes from an aligned address.
class DeviceMatrix {
 public:
  explicit DeviceMatrix(std::size_t elements, std::size_t offset = 0)
      : elements_(elements), offset_(offset) {
    EXPECT_EQ(cudaMalloc(&memory_, elements * 2 + offset), cudaSuccess);
    EXPECT_EQ(cudaMemset(memory_, 0xFF, elements * 2 + offset), cudaSuccess);
  }
  DeviceMatrix(const Bits& bits, std::size_t offset = 0) : DeviceMatrix(bits.size(), offset) {
    EXPECT_EQ(cudaMemcpy(data(), bits.data(), bits.size() * 2, cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  DeviceMatrix(DeviceMatrix&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        elements_(other.elements_),
        offset_(other.offset_) {}
  ~DeviceMatrix() { cudaFree(memory_); }
  void* data() const { return static_cast<char*>(memory_) + offset_; }
  Bits bits() const {
    Bits bits(elements_);
    EXPECT_EQ(cudaMemcpy(bits.data(), data(), elements_ * 2, cudaMemcpyDeviceToHost), cudaSuccess);
    return bits;
  }

 private:
  void* memory_ = nullptr;
  std::size_t elements_;
  std::size_t offset_;
};

Bits Gaussian(std::int64_t rows, std::int64_t cols, unsigned seed, float scale = 1000) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  Bits bits(static_cast<std::size_t>(rows * cols));
  for (auto& value : bits) value = FloatToF16(normal(generator));
  return bits;
}

NewtonSchulzRule Rule(std::string_view set, NewtonSchulzMethod method) {
  const CoefficientSet* found = FindCoefficientSet(set);
  NewtonSchulzRule rule;
  rule.steps = found->steps;
  rule.residual_max = found->residual_max;
  rule.method = method;
  return rule;
}

// |O - exact|_F / |exact|_F.
double ErrorOf(const Bits& u, const Bits& o, std::int64_t rows, std::int64_t cols,
               const NewtonSchulzRule& rule) {
  std::vector<float> input(u.size()), exact(u.size());
  std::transform(u.begin(), u.end(), input.begin(), F16ToFloat);
  const MatrixJob job{input.data(), exact.data(), rows, cols, 1};
  NewtonSchulzResult result;
  EXPECT_FALSE(MakeReferenceBackend()->NewtonSchulz({&job, 1}, rule, {&result, 1}));
  double distance = 0, norm = 0;
  for (std::size_t i = 0; i < o.size(); ++i) {
    const double difference = double{F16ToFloat(o[i])} - exact[i];
    distance += difference * difference;
    norm += double{exact[i]} * exact[i];
  }
  return std::sqrt(distance / norm);
}

enum class Kernels { kOwn, kPortable };

class NewtonSchulzOnDevice : public testing::TestWithParam<Kernels> {
 protected:
  void SetUp() override {
    const CudaDevices list = ListCudaDevices();
    if (list.devices.empty()) GTEST_SKIP() << "no CUDA device: " << list.why_none;
    if (GetParam() == Kernels::kPortable) {
      NewtonSchulzTuning tuning;
      tuning.machine.blocks = 100;
      solver_.set_tuning(tuning);
    }
  }

  NewtonSchulzResult Run(const DeviceMatrix& u, DeviceMatrix& o, std::int64_t rows,
                         std::int64_t cols, const NewtonSchulzRule& rule, double u_scale = 1) {
    const MatrixJob job{u.data(), o.data(), rows, cols, u_scale};
    NewtonSchulzResult result;
    const Error error = solver_.Run({&job, 1}, rule, {&result, 1}, nullptr);
    EXPECT_FALSE(error) << error.message();
    return result;
  }

  NewtonSchulzFault fault_;
  NewtonSchulz solver_{&fault_};
};

struct Shape {
  std::int64_t rows, cols;
  std::size_t offset = 0;
};

const Shape kShapes[] = {{1, 1},    {1, 3},    {3, 1},    {2, 3, 2},     {127, 129}, {129, 127, 2},
                         {64, 256}, {256, 64}, {200, 72}, {33, 1025, 6}, {129, 300}};

TEST_P(NewtonSchulzOnDevice, IsCloseToTheExactResultInAnyShapeAndTheSameInAnyBatch) {
  for (const char* set : {"simple", "quintic_yj", "polar_express_105"}) {
    for (const auto method : {NewtonSchulzMethod::kStandard, NewtonSchulzMethod::kGram}) {
      const NewtonSchulzRule rule = Rule(set, method);
      std::vector<Bits> inputs;
      std::vector<DeviceMatrix> u, o;
      std::vector<MatrixJob> jobs;
      for (const Shape& shape : kShapes) {
        inputs.push_back(Gaussian(shape.rows, shape.cols, 17 + static_cast<unsigned>(u.size())));
        u.emplace_back(inputs.back(), shape.offset);
        o.emplace_back(inputs.back().size(), shape.offset);
        jobs.push_back({u.back().data(), o.back().data(), shape.rows, shape.cols, 1});
      }
      std::vector<NewtonSchulzResult> results(jobs.size());
      ASSERT_FALSE(solver_.Run(jobs, rule, results, nullptr));
      for (std::size_t i = 0; i < jobs.size(); ++i) {
        SCOPED_TRACE(std::string(set) + " " + std::to_string(jobs[i].rows) + " x " +
                     std::to_string(jobs[i].cols));
        EXPECT_FALSE(results[i].fallback || results[i].failed || results[i].zero_input);
        EXPECT_LT(ErrorOf(inputs[i], o[i].bits(), jobs[i].rows, jobs[i].cols, rule), 2e-2);
        DeviceMatrix alone(inputs[i].size(), kShapes[i].offset);
        const NewtonSchulzResult result = Run(u[i], alone, jobs[i].rows, jobs[i].cols, rule);
        EXPECT_EQ(alone.bits(), o[i].bits());
        EXPECT_EQ(result.output_norm, results[i].output_norm);
        EXPECT_EQ(u[i].bits(), inputs[i]) << "the input is read only";
      }
    }
  }
}

TEST_P(NewtonSchulzOnDevice, TransposesExactly) {
  const std::int64_t m = 136, n = 328;
  const Bits u = Gaussian(m, n, 3);
  Bits transposed(u.size());
  for (std::int64_t i = 0; i < m * n; ++i) {
    transposed[static_cast<std::size_t>(i % n * m + i / n)] = u[static_cast<std::size_t>(i)];
  }
  for (const auto method : {NewtonSchulzMethod::kStandard, NewtonSchulzMethod::kGram}) {
    const NewtonSchulzRule rule = Rule("simple", method);
    DeviceMatrix wide(u), tall(transposed), o(u.size()), o_tall(u.size());
    Run(wide, o, m, n, rule);
    Run(tall, o_tall, n, m, rule);
    const Bits a = o.bits(), b = o_tall.bits();
    for (std::int64_t i = 0; i < m * n; ++i) {
      ASSERT_EQ(a[static_cast<std::size_t>(i)], b[static_cast<std::size_t>(i % n * m + i / n)]);
    }
  }
}

TEST_P(NewtonSchulzOnDevice, KeepsNullDirectionsSmall) {
  const std::int64_t m = 256, n = 640, rank = 32;
  const Bits a = Gaussian(m, rank, 5, 1), b = Gaussian(rank, n, 6, 100);
  Bits u(static_cast<std::size_t>(m * n));
  for (std::int64_t i = 0; i < m * n; ++i) {
    float sum = 0;
    for (std::int64_t k = 0; k < rank; ++k) {
      sum += F16ToFloat(a[static_cast<std::size_t>(i / n * rank + k)]) *
             F16ToFloat(b[static_cast<std::size_t>(k * n + i % n)]);
    }
    u[static_cast<std::size_t>(i)] = FloatToF16(sum);
  }
  const DeviceMatrix input(u);
  for (const char* set : {"simple", "quintic_yj", "polar_express_105"}) {
    for (const auto method : {NewtonSchulzMethod::kStandard, NewtonSchulzMethod::kGram}) {
      const NewtonSchulzRule rule = Rule(set, method);
      DeviceMatrix o(u.size());
      const NewtonSchulzResult result = Run(input, o, m, n, rule);
      EXPECT_FALSE(result.fallback);
      // What is wrong is spread over m - rank directions; each has its share.
      const double error = ErrorOf(u, o.bits(), m, n, rule) * result.output_norm;
      EXPECT_LT(error / std::sqrt(static_cast<double>(m - rank)), 2e-2) << set;
    }
  }
}

TEST_P(NewtonSchulzOnDevice, ZeroInputGivesZero) {
  const DeviceMatrix u(Bits(96 * 200, 0));
  DeviceMatrix o(96 * 200);
  for (const auto method : {NewtonSchulzMethod::kStandard, NewtonSchulzMethod::kGram}) {
    const NewtonSchulzResult result = Run(u, o, 96, 200, Rule("simple", method));
    EXPECT_TRUE(result.zero_input);
    EXPECT_FALSE(result.fallback || result.failed);
    const Bits bits = o.bits();
    EXPECT_TRUE(std::all_of(bits.begin(), bits.end(), [](auto v) { return (v & 0x7FFF) == 0; }));
  }
}

TEST_P(NewtonSchulzOnDevice, SubnormalInputIsNoSpecialCase) {
  const Bits u = Gaussian(64, 256, 8, 1e-6f);
  const NewtonSchulzRule rule = Rule("simple", NewtonSchulzMethod::kGram);
  DeviceMatrix o(u.size());
  Run(DeviceMatrix(u), o, 64, 256, rule);
  EXPECT_LT(ErrorOf(u, o.bits(), 64, 256, rule), 2e-2);
}

TEST_P(NewtonSchulzOnDevice, ABadResultIsRedoneInFp32) {
  const Bits u = Gaussian(72, 200, 9);
  const NewtonSchulzRule rule = Rule("simple", NewtonSchulzMethod::kGram);
  const DeviceMatrix input(u);
  DeviceMatrix o(u.size());
  fault_.fast_path = 1;
  NewtonSchulzResult result = Run(input, o, 72, 200, rule);
  EXPECT_TRUE(result.fallback);
  EXPECT_FALSE(result.failed);
  EXPECT_LT(ErrorOf(u, o.bits(), 72, 200, rule), 1e-3);
  EXPECT_EQ(fault_.fast_path, 0);
  fault_.fast_path = 1;
  fault_.fallback = 1;
  result = Run(input, o, 72, 200, rule);
  EXPECT_TRUE(result.fallback);
  EXPECT_TRUE(result.failed);
  result = Run(input, o, 72, 200, rule);
  EXPECT_FALSE(result.fallback);
}

TEST_P(NewtonSchulzOnDevice, NonFiniteInputFails) {
  Bits u = Gaussian(72, 200, 9);
  u[1234] = 0x7C00;
  DeviceMatrix o(u.size());
  EXPECT_TRUE(Run(DeviceMatrix(u), o, 72, 200, Rule("simple", NewtonSchulzMethod::kAuto)).failed);
}

TEST_P(NewtonSchulzOnDevice, TheFloorIsOneOfUItself) {
  const Bits u = Gaussian(64, 128, 10);
  NewtonSchulzRule rule = Rule("simple", NewtonSchulzMethod::kStandard);
  rule.norm_floor = 1e-2;
  DeviceMatrix o(u.size());
  double norm = 0;
  for (const auto bits : u) norm += double{F16ToFloat(bits)} * F16ToFloat(bits);
  // U is 1e-12 of what is stored: so far below the floor that only the linear term is left.
  const double expected = std::pow(3.4445, 5) * std::sqrt(norm) * 1e-12 / 1e-2;
  const NewtonSchulzResult result = Run(DeviceMatrix(u), o, 64, 128, rule, 1e12);
  EXPECT_NEAR(result.output_norm / expected, 1, 2e-2);
}

TEST_P(NewtonSchulzOnDevice, FollowsMatricesThatMove) {
  const NewtonSchulzRule rule = Rule("simple", NewtonSchulzMethod::kAuto);
  const Bits u = Gaussian(64, 256, 11);
  const DeviceMatrix first(u), second(Gaussian(64, 256, 12)), again(u);
  DeviceMatrix o(u.size()), o2(u.size()), o3(u.size());
  Run(first, o, 64, 256, rule);
  Run(second, o2, 64, 256, rule);
  Run(again, o3, 64, 256, rule);
  EXPECT_NE(o.bits(), o2.bits());
  EXPECT_EQ(o.bits(), o3.bits());
}

TEST_P(NewtonSchulzOnDevice, EmptyMatricesAndBatches) {
  EXPECT_FALSE(solver_.Run({}, Rule("simple", NewtonSchulzMethod::kAuto), {}, nullptr));
  const MatrixJob job{nullptr, nullptr, 0, 5, 1};
  NewtonSchulzResult result;
  EXPECT_FALSE(
      solver_.Run({&job, 1}, Rule("simple", NewtonSchulzMethod::kAuto), {&result, 1}, nullptr));
  EXPECT_TRUE(result.zero_input);
}

INSTANTIATE_TEST_SUITE_P(Kernels, NewtonSchulzOnDevice,
                         testing::Values(Kernels::kOwn, Kernels::kPortable), [](const auto& info) {
                           return info.param == Kernels::kOwn ? "own" : "portable";
                         });

}  // namespace
}  // namespace muond::kernels::cuda
