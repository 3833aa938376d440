// The backends under test and one parameter stepped the way an engine would do it.
#include "tests/conformance/kernels_driver.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/coefficients.h"

namespace muond::kernels::testing {
namespace {

std::unique_ptr<Backend> MakeCpu() { return MakeCpuBackend({}); }

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

}  // namespace

std::vector<BackendCase> BackendCases() {
  return {{"reference", MakeReferenceBackend, 2e-7}, {"cpu", MakeCpu, 3e-6}};
}

std::string CaseName(const ::testing::TestParamInfo<BackendCase>& info) { return info.param.name; }

Buffer::Buffer(Backend& backend, const std::vector<float>& values, std::size_t shift)
    : backend_(backend),
      elements_(values.size()),
      shift_(shift),
      memory_(static_cast<float*>(backend.Allocate((elements_ + shift) * sizeof(float)))) {
  EXPECT_NE(memory_, nullptr);
  Check(backend.Copy(get(), values.data(), values.size() * sizeof(float)));
}

std::vector<float> Buffer::Read() const {
  std::vector<float> values(elements_);
  Check(backend_.Copy(values.data(), get(), elements_ * sizeof(float)));
  return values;
}

void Check(const Error& error) { ASSERT_FALSE(error) << error.message(); }

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
  const Buffer input(backend, u);
  const Buffer output(backend, u.size());
  const MatrixJob job{.u = input.get(), .o = output.get(), .rows = rows, .cols = cols};
  Orthogonalized orthogonalized;
  Check(backend.NewtonSchulz({&job, 1}, rule, {&orthogonalized.result, 1}));
  EXPECT_TRUE(SameBits(input.Read(), u)) << "newton-schulz wrote to its input";
  orthogonalized.o = output.Read();
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
  const Buffer data(backend_, gradient.size());
  Check(backend_.Copy(data.get(), gradient.data(), gradient.size() * sizeof(std::uint16_t)));
  Step(GradientView{data.get(), dtype, gradient.size(), settings.unscale}, settings);
}

void MuonParameter::Step(const GradientView& gradient, const MuonSettings& settings) {
  Check(backend_.Momentum(gradient, settings.momentum, m_.get(), true, u_.get(), momentum_scan_));
  const MatrixJob job{.u = u_.get(), .o = o_.get(), .rows = rows_, .cols = cols_};
  Check(backend_.NewtonSchulz({&job, 1}, settings.newton_schulz, {&result_, 1}));
  const auto rows = static_cast<double>(rows_);
  const auto cols = static_cast<double>(cols_);
  const double factor = settings.match_rms_adamw ? 0.2 * std::sqrt(std::max(rows, cols))
                                                 : std::sqrt(std::max(1.0, rows / cols));
  Check(backend_.Apply(w_.get(), o_.get(), w_.size(), 1 - settings.lr * settings.weight_decay,
                       settings.lr * factor, weight_scan_));
}

}  // namespace muond::kernels::testing
