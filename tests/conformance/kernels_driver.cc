// Memory of the backends under test and one parameter stepped the way an engine would do it.
#include "tests/conformance/kernels_driver.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/coefficients.h"

namespace muond::kernels::testing {
namespace {

template <typename Other>
double DistanceOf(const std::vector<float>& x, const std::vector<Other>& y) {
  EXPECT_EQ(x.size(), y.size());
  double sum = 0;
  for (std::size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
    const double difference = static_cast<double>(x[i]) - static_cast<double>(y[i]);
    sum += difference * difference;
  }
  return std::sqrt(sum);
}

float MaxAbs(const std::vector<float>& values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::fabs(value));
  return largest;
}

}  // namespace

std::vector<BackendCase> FallbackCases() {
  std::vector<BackendCase> cases = BackendCases();
  std::erase_if(cases, [](const BackendCase& backend) { return !backend.has_fallback; });
  return cases;
}

std::string CaseName(const ::testing::TestParamInfo<BackendCase>& info) { return info.param.name; }

Bytes::Bytes(Backend& backend, const void* host, std::size_t bytes, std::size_t shift)
    : backend_(backend),
      bytes_(bytes),
      shift_(shift),
      memory_(static_cast<unsigned char*>(backend.Allocate(bytes + shift))) {
  EXPECT_NE(memory_, nullptr);
  Check(backend.Upload(get(), host, bytes));
}

void Bytes::Read(void* host) const { Check(backend_.Download(host, get(), bytes_)); }

Staged::Staged(Backend& backend, const void* host, std::size_t bytes)
    : backend_(backend), memory_(backend.AllocateStaging(bytes)) {
  EXPECT_NE(memory_, nullptr);
  if (bytes > 0) std::memcpy(memory_, host, bytes);
}

Buffer::Buffer(Backend& backend, const std::vector<float>& values, std::size_t shift)
    : elements_(values.size()),
      bytes_(backend, values.data(), values.size() * sizeof(float), shift * sizeof(float)) {}

std::vector<float> Buffer::Read() const {
  std::vector<float> values(elements_);
  bytes_.Read(values.data());
  return values;
}

IterateBuffer::IterateBuffer(Backend& backend, const std::vector<float>& values, std::size_t shift)
    : backend_(backend),
      elements_(values.size()),
      scale_(IterateScale(backend.iterate_dtype(), MaxAbs(values))),
      bytes_(backend, std::vector<float>(values.size()).data(),
             values.size() * DtypeBytes(backend.iterate_dtype()),
             shift * DtypeBytes(backend.iterate_dtype())) {
  const Buffer source(backend, values);
  Check(backend.StoreIterate(get(), source.get(), values.size(), scale_));
}

void* IterateBuffer::get(std::size_t element) const {
  return static_cast<char*>(bytes_.get()) + element * DtypeBytes(backend_.iterate_dtype());
}

std::vector<float> IterateBuffer::Read() const {
  const Buffer wide(backend_, elements_);
  Check(backend_.LoadIterate(wide.get(), get(), elements_));
  std::vector<float> values = wide.Read();
  for (float& value : values) value = static_cast<float>(value / scale_);
  return values;
}

void Check(const Error& error) { ASSERT_FALSE(error) << error.message(); }

GradientScan ScanOne(Backend& backend, const GradientView& gradient) {
  GradientScan scan;
  Check(backend.Scan({&gradient, 1}, {&scan, 1}));
  return scan;
}

StateScan ScanStateOne(Backend& backend, const void* data, std::size_t elements, Dtype dtype) {
  const StateView view{data, elements, dtype};
  StateScan scan;
  Check(backend.ScanState({&view, 1}, {&scan, 1}));
  return scan;
}

StateScan MomentumOne(Backend& backend, const MomentumJob& job) {
  StateScan scan;
  Check(backend.Momentum({&job, 1}, {&scan, 1}));
  return scan;
}

StateScan ApplyOne(Backend& backend, const ApplyJob& job) {
  StateScan scan;
  Check(backend.Apply({&job, 1}, {&scan, 1}));
  return scan;
}

AdamWScan AdamWOne(Backend& backend, const AdamWJob& job) {
  AdamWScan scan;
  Check(backend.AdamW({&job, 1}, {&scan, 1}));
  return scan;
}

bool SameScan(const StateScan& x, const StateScan& y) {
  return x.nonfinite == y.nonfinite && x.max_abs == y.max_abs && x.sum_squares == y.sum_squares;
}

std::vector<float> Gaussian(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> gaussian;
  std::vector<float> values(count);
  for (float& value : values) value = gaussian(random);
  return values;
}

std::vector<float> LowRank(std::int64_t rows, std::int64_t cols, std::int64_t rank, unsigned seed) {
  const auto m = static_cast<std::size_t>(rows);
  const auto n = static_cast<std::size_t>(cols);
  const auto k = static_cast<std::size_t>(rank);
  const std::vector<float> a = Gaussian(m * k, seed);
  const std::vector<float> b = Gaussian(k * n, seed + 1);
  std::vector<float> product(m * n);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      double sum = 0;
      for (std::size_t l = 0; l < k; ++l) sum += static_cast<double>(a[i * k + l]) * b[l * n + j];
      product[i * n + j] = static_cast<float>(sum);
    }
  }
  return product;
}

std::vector<float> Transposed(const std::vector<float>& x, std::int64_t rows, std::int64_t cols) {
  const auto m = static_cast<std::size_t>(rows);
  const auto n = static_cast<std::size_t>(cols);
  std::vector<float> result(x.size());
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t j = 0; j < n; ++j) result[j * m + i] = x[i * n + j];
  }
  return result;
}

double Norm(const std::vector<float>& x) { return DistanceOf(x, std::vector<double>(x.size())); }
double Distance(const std::vector<float>& x, const std::vector<float>& y) {
  return DistanceOf(x, y);
}
double Distance(const std::vector<float>& x, const std::vector<double>& y) {
  return DistanceOf(x, y);
}

bool SameBits(const std::vector<float>& x, const std::vector<float>& y) {
  return x.size() == y.size() &&
         (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
}

NewtonSchulzRule SimpleRule() { return RuleOf("simple"); }

NewtonSchulzRule RuleOf(const char* set_name, NewtonSchulzMethod method) {
  const CoefficientSet* set = FindCoefficientSet(set_name);
  if (set == nullptr) {
    ADD_FAILURE() << "no coefficient set \"" << set_name << "\"";
    return {};
  }
  return {.steps = set->steps, .method = method, .residual_max = set->residual_max};
}

Orthogonalized Orthogonalize(Backend& backend, const std::vector<float>& u, std::int64_t rows,
                             std::int64_t cols, const NewtonSchulzRule& rule) {
  const IterateBuffer input(backend, u);
  const IterateBuffer output(backend, u.size());
  const std::vector<float> before = input.Read();
  const MatrixJob job{
      .u = input.get(), .o = output.get(), .rows = rows, .cols = cols, .u_scale = input.scale()};
  Orthogonalized orthogonalized;
  Check(backend.NewtonSchulz({&job, 1}, rule, {&orthogonalized.result, 1}));
  EXPECT_TRUE(SameBits(input.Read(), before)) << "newton-schulz wrote to its input";
  orthogonalized.o = output.Read();
  for (float& value : orthogonalized.o) {
    value = static_cast<float>(value * orthogonalized.result.o_scale);
  }
  return orthogonalized;
}

MuonParameter::MuonParameter(Backend& backend, std::int64_t rows, std::int64_t cols,
                             const std::vector<float>& w)
    : backend_(backend),
      rows_(rows),
      cols_(cols),
      w_(backend, w),
      m_(backend, w.size()),
      u_(backend, w.size()),
      o_(backend, w.size()) {}

void MuonParameter::Step(const std::vector<float>& gradient, const MuonSettings& settings) {
  const Buffer data(backend_, gradient);
  Step(GradientView{data.get(), Dtype::kF32, gradient.size(), settings.unscale}, settings);
  EXPECT_TRUE(SameBits(data.Read(), gradient)) << "a step wrote to the caller's gradient";
}

void MuonParameter::Step(const std::vector<std::uint16_t>& gradient, Dtype dtype,
                         const MuonSettings& settings) {
  const Bytes data(backend_, gradient.data(), gradient.size() * sizeof(std::uint16_t));
  Step(GradientView{data.get(), dtype, gradient.size(), settings.unscale}, settings);
}

void MuonParameter::Step(const GradientView& gradient, const MuonSettings& settings) {
  // No form of momentum makes more than this of the two.
  const double bound =
      ScanOne(backend_, gradient).max_abs * 2 + ScanStateOne(backend_, m_.get(), m_.size()).max_abs;
  const double u_scale = IterateScale(backend_.iterate_dtype(), bound);
  momentum_scan_ = MomentumOne(backend_, {.gradient = gradient,
                                          .rule = settings.momentum,
                                          .m = m_.get(),
                                          .u = u_.get(),
                                          .u_scale = u_scale});
  const MatrixJob job{
      .u = u_.get(), .o = o_.get(), .rows = rows_, .cols = cols_, .u_scale = u_scale};
  Check(backend_.NewtonSchulz({&job, 1}, settings.newton_schulz, {&result_, 1}));
  const auto rows = static_cast<double>(rows_);
  const auto cols = static_cast<double>(cols_);
  const double factor = settings.match_rms_adamw ? 0.2 * std::sqrt(std::max(rows, cols))
                                                 : std::sqrt(std::max(1.0, rows / cols));
  weight_scan_ = ApplyOne(backend_, {.w = w_.get(),
                                     .o = o_.get(),
                                     .elements = w_.size(),
                                     .decay = 1 - settings.lr * settings.weight_decay,
                                     .step = settings.lr * factor * result_.o_scale});
}

}  // namespace muond::kernels::testing
