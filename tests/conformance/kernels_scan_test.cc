// Scan, accumulation, state scans and memory on every backend.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "tests/conformance/kernels_driver.h"

namespace muond::kernels {
namespace {

using testing::BackendCases;
using testing::BackendTest;
using testing::Buffer;
using testing::Bytes;
using testing::CaseName;
using testing::Check;
using testing::Gaussian;
using testing::ScanOne;
using testing::ScanStateOne;
using testing::Staged;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Scan : public BackendTest {
 protected:
  GradientScan ScanOf(const std::vector<float>& values, float unscale = 1, std::size_t shift = 0) {
    const Buffer data(*backend_, values, shift);
    return ScanOne(*backend_, {data.get(), Dtype::kF32, values.size(), unscale});
  }
  GradientScan ScanOf(const std::vector<std::uint16_t>& values, Dtype dtype) {
    // Off its alignment, on the host by a single byte: what is read in place may begin anywhere.
    const Bytes data(*backend_, values.data(), 2 * values.size(), backend_->host_memory() ? 1 : 2);
    return ScanOne(*backend_, {data.get(), dtype, values.size(), 1});
  }
};
MUOND_FOR_EVERY_BACKEND(Scan);

TEST_P(Scan, CountsNonFiniteElementsExactlyWhereverTheyAre) {
  const std::size_t sizes[] = {1,
                               3,
                               127,
                               511,
                               513,
                               kBlockElements - 1,
                               kBlockElements,
                               kBlockElements + 1,
                               3 * kBlockElements + 5};
  for (const std::size_t size : sizes) {
    const std::size_t places[] = {0, size / 2, size - 1, std::min(size - 1, kBlockElements - 1),
                                  std::min(size - 1, kBlockElements)};
    for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
      std::vector<float> values(size, 1.5f);
      std::uint64_t expected = 0;
      for (const std::size_t place : places) {
        if (std::isfinite(values[place])) ++expected;
        values[place] = bad;
        const GradientScan scan = ScanOf(values);
        ASSERT_EQ(scan.nonfinite, expected) << size << " elements, place " << place;
        ASSERT_EQ(scan.max_abs, size > expected ? 1.5 : 0.0);
      }
    }
  }
}

TEST_P(Scan, CountsNonFiniteElementsOfEveryDtype) {
  std::vector<std::uint16_t> f16(1001, 0x3c00), bf16(1001, 0x3f80);
  f16[0] = 0x7c00, f16[500] = 0xfc01, f16[1000] = 0x7e00;
  bf16[0] = 0x7f80, bf16[500] = 0xff81, bf16[1000] = 0x7fc0;
  EXPECT_EQ(ScanOf(f16, Dtype::kF16).nonfinite, 3u);
  EXPECT_EQ(ScanOf(bf16, Dtype::kBF16).nonfinite, 3u);
  std::vector<std::uint16_t> largest(1001, 0x7bff);
  EXPECT_EQ(ScanOf(largest, Dtype::kF16).nonfinite, 0u);
  EXPECT_EQ(ScanOf(largest, Dtype::kF16).max_abs, 65504.0);
}

TEST_P(Scan, SumsSquaresPerFixedBlock) {
  const std::size_t size = 2 * kBlockElements + 777;
  const std::vector<float> values = Gaussian(size, 1);
  for (const std::size_t shift : {0, 1, 3}) {
    const GradientScan scan = ScanOf(values, 0.25f, shift);
    ASSERT_EQ(scan.block_sums.size(), 3u);
    double max_abs = 0;
    for (std::size_t block = 0; block < 3; ++block) {
      double sum = 0;
      for (std::size_t i = block * kBlockElements; i < std::min(size, (block + 1) * kBlockElements);
           ++i) {
        sum += std::pow(0.25 * values[i], 2);
        max_abs = std::max(max_abs, 0.25 * std::fabs(values[i]));
      }
      EXPECT_NEAR(scan.block_sums[block], sum, 1e-12 * sum);
    }
    EXPECT_EQ(scan.max_abs, max_abs);
    EXPECT_EQ(scan.nonfinite, 0u);
  }
}

// 16-bit data of several blocks, so that block offsets count elements of their own size.
TEST_P(Scan, SixteenBitDataOfSeveralBlocksGiveWhatTheirValuesGive) {
  const std::size_t size = 2 * kBlockElements + 99;
  for (const Dtype dtype : {Dtype::kBF16, Dtype::kF16}) {
    const Buffer source(*backend_, Gaussian(size, 3));
    std::vector<std::uint16_t> bits(size);
    Check(backend_->Round(bits.data(), dtype, source.get(), size));
    std::vector<float> values(size);
    for (std::size_t i = 0; i < size; ++i) {
      values[i] = dtype == Dtype::kBF16 ? BF16ToFloat(bits[i]) : F16ToFloat(bits[i]);
    }
    const Buffer acc(*backend_, size);
    const Staged staged(*backend_, bits.data(), 2 * size);
    Check(backend_->Accumulate(acc.get(), staged.get(), dtype, size, true));
    EXPECT_TRUE(testing::SameBits(acc.Read(), values));
    const GradientScan expected = ScanOf(values);
    const GradientScan found = ScanOf(bits, dtype);
    EXPECT_EQ(found.max_abs, expected.max_abs);
    EXPECT_EQ(found.block_sums, expected.block_sums);
  }
}

// The squares of finite fp32 numbers, each beyond fp32's range or below it, have a finite sum.
TEST_P(Scan, Pytorch46849_HugeFiniteGradientHasAFiniteNorm) {
  const GradientScan huge = ScanOf({2e19f, 2e19f, 2e19f, 2e19f});
  EXPECT_EQ(huge.nonfinite, 0u);
  EXPECT_NEAR(std::sqrt(huge.block_sums[0]), 4e19, 1e13);
  const GradientScan tiny = ScanOf({1e-44f, 0, 0, 0});
  EXPECT_GT(tiny.block_sums[0], 0);
  EXPECT_GT(tiny.max_abs, 0);
}

TEST_P(Scan, PaddlePaddle32038_ZeroGradientHasNormZero) {
  const GradientScan scan = ScanOf(std::vector<float>(100));
  EXPECT_EQ(scan.block_sums[0], 0);
  EXPECT_EQ(scan.max_abs, 0);
}

TEST_P(Scan, DeepSpeed8588_NormIsThatOfTheUnscaledGradient) {
  EXPECT_EQ(ScanOf({128, 0, 0}, 1.0f / 128).block_sums[0], 1.0);
  // A product beyond fp32 is an overflow, though the data are finite.
  EXPECT_EQ(ScanOf({1e30f, 1}, 1e10f).nonfinite, 1u);
}

TEST_P(Scan, TransformerEngine3207_EmptyTensorIsANoOp) {
  GradientScan scan;
  scan.nonfinite = 7;
  scan.block_sums = {1};
  const GradientView nothing{nullptr, Dtype::kBF16, 0, 1};
  Check(backend_->Scan({&nothing, 1}, {&scan, 1}));
  EXPECT_EQ(scan.nonfinite, 0u);
  EXPECT_TRUE(scan.block_sums.empty());
  EXPECT_EQ(ScanStateOne(*backend_, nullptr, 0).nonfinite, 0u);
  Check(backend_->Accumulate(nullptr, nullptr, Dtype::kF32, 0, true));
  Check(backend_->Round(nullptr, Dtype::kF16, nullptr, 0));
  Check(backend_->StoreIterate(nullptr, nullptr, 0, 1));
  Check(backend_->LoadIterate(nullptr, nullptr, 0));
  EXPECT_EQ(testing::ApplyOne(*backend_, {}).nonfinite, 0u);
  EXPECT_EQ(testing::MomentumOne(*backend_, {}).nonfinite, 0u);
  const CopyJob copy{};
  Check(backend_->Copy({&copy, 1}));
  Check(backend_->Upload(nullptr, nullptr, 0));
  Check(backend_->Download(nullptr, nullptr, 0));
}

TEST_P(Scan, StateScanSeesEverything) {
  std::vector<float> values = Gaussian(kBlockElements + 9, 2);
  values[kBlockElements] = -50;
  const Buffer data(*backend_, values, 1);
  const StateScan scan = ScanStateOne(*backend_, data.get(), values.size());
  EXPECT_EQ(scan.nonfinite, 0u);
  EXPECT_EQ(scan.max_abs, 50);
  EXPECT_NEAR(scan.sum_squares, std::pow(testing::Norm(values), 2), 1e-8);
  values.back() = kNan;
  values.front() = kInfinity;
  const Buffer bad(*backend_, values);
  EXPECT_EQ(ScanStateOne(*backend_, bad.get(), values.size()).nonfinite, 2u);
}

class Accumulate : public BackendTest {};
MUOND_FOR_EVERY_BACKEND(Accumulate);

TEST_P(Accumulate, SumsContributionsInFp32InCallOrder) {
  const std::size_t size = kBlockElements + 130;
  const Buffer acc(*backend_, std::vector<float>(size, 99), 1);
  std::vector<float> expected(size);
  for (unsigned rank = 0; rank < 3; ++rank) {
    const std::vector<float> values = Gaussian(size, rank);
    const Staged staged(*backend_, values);
    Check(backend_->Accumulate(acc.get(), staged.get(), Dtype::kF32, size, rank == 0));
    for (std::size_t i = 0; i < size; ++i) {
      expected[i] = rank == 0 ? values[i] : expected[i] + values[i];
    }
  }
  EXPECT_TRUE(testing::SameBits(acc.Read(), expected));
}

TEST_P(Accumulate, SixteenBitContributionsAreSummedInFp32) {
  // 256 + 1 is lost in bf16 and 2048 + 1 in f16; the sum over ranks must keep both.
  const std::uint16_t bf16[] = {FloatToBF16(256), FloatToBF16(1)};
  const std::uint16_t f16[] = {FloatToF16(2048), FloatToF16(1)};
  const Buffer acc(*backend_, 2);
  for (int i = 0; i < 2; ++i) {
    const Staged first(*backend_, &bf16[i], 2), second(*backend_, &f16[i], 2);
    Check(backend_->Accumulate(acc.get(), first.get(), Dtype::kBF16, 1, i == 0));
    Check(backend_->Accumulate(acc.get() + 1, second.get(), Dtype::kF16, 1, i == 0));
  }
  EXPECT_EQ(acc.Read(), (std::vector<float>{257, 2049}));
}

TEST_P(Accumulate, NonFiniteContributionStaysVisible) {
  const float values[][2] = {{kInfinity, 1}, {-kInfinity, kNan}, {1, 1}};
  const Buffer acc(*backend_, 2);
  for (int i = 0; i < 3; ++i) {
    const Staged staged(*backend_, values[i], sizeof(values[i]));
    Check(backend_->Accumulate(acc.get(), staged.get(), Dtype::kF32, 2, i == 0));
  }
  EXPECT_EQ(ScanOne(*backend_, {acc.get(), Dtype::kF32, 2, 1}).nonfinite, 2u);
}

class Memory : public BackendTest {};
MUOND_FOR_EVERY_BACKEND(Memory);

TEST_P(Memory, IsAlignedAndZeroed) {
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{65}, std::size_t{1} << 20}) {
    void* memory = backend_->Allocate(bytes);
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0u);
    std::vector<unsigned char> seen(bytes, 0xa5);
    Check(backend_->Download(seen.data(), memory, bytes));
    EXPECT_EQ(seen, std::vector<unsigned char>(bytes));
    // What the next allocation must not show.
    Check(backend_->Upload(memory, std::vector<unsigned char>(bytes, 0xff).data(), bytes));
    backend_->Free(memory);
    void* staging = backend_->AllocateStaging(bytes);
    ASSERT_NE(staging, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(staging) % 64, 0u);
    if (bytes > 0) std::memset(staging, 0xff, bytes);  // the host's in any case
    backend_->FreeStaging(staging);
  }
  backend_->Free(nullptr);
  backend_->FreeStaging(nullptr);
}

TEST_P(Memory, RefusesWhatCannotExist) {
  EXPECT_EQ(backend_->Allocate(std::numeric_limits<std::size_t>::max() - 10), nullptr);
  EXPECT_EQ(backend_->AllocateStaging(std::numeric_limits<std::size_t>::max() - 10), nullptr);
  Buffer still(*backend_, {1, 2});  // a refusal leaves the backend as good as before
  EXPECT_EQ(still.Read(), (std::vector<float>{1, 2}));
}

TEST_P(Memory, CopiesEveryByte) {
  const std::vector<float> values = Gaussian(5 * kBlockElements + 3, 4);
  const Buffer from(*backend_, values, 1);
  const Buffer to(*backend_, values.size());
  // Pieces of awkward sizes, one of them empty; the last piece of all goes first.
  std::vector<CopyJob> jobs;
  const std::size_t cuts[] = {0, 1, 1, 4, 300, kBlockElements + 7, values.size()};
  for (std::size_t i = std::size(cuts) - 1; i > 0; --i) {
    jobs.push_back({to.get() + cuts[i - 1], from.get() + cuts[i - 1],
                    (cuts[i] - cuts[i - 1]) * sizeof(float)});
  }
  Check(backend_->Copy(jobs));
  EXPECT_TRUE(testing::SameBits(to.Read(), values));
  EXPECT_TRUE(testing::SameBits(from.Read(), values));
}

// Values on the iterate dtype's grid come back as they were; a power of two is not seen.
TEST_P(Memory, IterateElementsKeepWhatTheyHold) {
  std::vector<float> values;
  for (int i = -1000; i <= 1000; ++i) values.push_back(static_cast<float>(i));
  for (const int exponent : {-140, -100, -20, 0, 20, 100}) {
    std::vector<float> scaled = values;
    for (float& value : scaled) value = std::ldexp(value, exponent);
    EXPECT_TRUE(testing::SameBits(testing::IterateBuffer(*backend_, scaled, 1).Read(), scaled))
        << "2^" << exponent;
  }
}

TEST_P(Memory, IterateElementsAreRoundedToNearestEven) {
  const std::vector<float> values = Gaussian(kBlockElements + 3, 5);
  const Dtype dtype = backend_->iterate_dtype();
  const testing::IterateBuffer stored(*backend_, values);
  const std::vector<float> found = stored.Read();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto scaled = static_cast<float>(values[i] * stored.scale());
    const float expected = dtype == Dtype::kF32    ? scaled
                           : dtype == Dtype::kBF16 ? BF16ToFloat(FloatToBF16(scaled))
                                                   : F16ToFloat(FloatToF16(scaled));
    ASSERT_EQ(found[i], static_cast<float>(expected / stored.scale())) << i;
  }
}

TEST_P(Memory, NamesItself) {
  const std::string name(backend_->name());
  EXPECT_EQ(std::string(GetParam().name).rfind(name, 0), 0u) << name;
  EXPECT_EQ(backend_->description().rfind(name, 0), 0u) << backend_->description();
  const MatrixShape shapes[] = {{64, 32}, {640, 320}};
  const std::size_t small = backend_->NewtonSchulzScratchBytes({shapes, 1}, testing::SimpleRule());
  EXPECT_GT(small, 0u);
  EXPECT_GT(backend_->NewtonSchulzScratchBytes(shapes, testing::SimpleRule()), small);
}

}  // namespace
}  // namespace muond::kernels
