// Elementwise results of the device against the reference backend, bit for bit, on values of every
// magnitude, at aligned and at awkward addresses.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "kernels/cuda/benchmark/benchmark.h"

namespace muond::kernels::cuda {
namespace {

constexpr std::size_t kElements = 3 * kBlockElements + 777;

// Half ordinary Gaussian numbers, half of any magnitude from 1e-45 to 1e38; some zeros.
std::vector<float> Values(unsigned seed, double sigma) {
  std::mt19937 random(seed);
  std::normal_distribution<double> gaussian;
  std::uniform_real_distribution<double> exponent(-149, 126);
  std::vector<float> values(kElements);
  for (std::size_t i = 0; i < kElements; ++i) {
    const double scale = i % 2 == 0 ? sigma : std::exp2(exponent(random));
    values[i] = i % 97 == 0 ? 0.0f : static_cast<float>(gaussian(random) * scale);
  }
  return values;
}

std::vector<std::uint16_t> Narrow(const std::vector<float>& values, Dtype dtype, float scale) {
  std::vector<std::uint16_t> bits(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    bits[i] =
        dtype == Dtype::kBF16 ? FloatToBF16(values[i] * scale) : FloatToF16(values[i] * scale);
  }
  return bits;
}

// The same bytes in the memory of both backends, `shift` elements off the alignment.
struct Twin {
  template <typename T>
  Twin(Backend& device_in, Backend& host_in, const std::vector<T>& values, std::size_t shift)
      : device(device_in),
        host(host_in),
        bytes(values.size() * sizeof(T)),
        offset(shift * sizeof(T)),
        on_device(static_cast<char*>(device.Allocate(bytes + offset))),
        on_host(static_cast<char*>(host.Allocate(bytes + offset))) {
    Check(device.Upload(d(), values.data(), bytes));
    Check(host.Upload(h(), values.data(), bytes));
  }
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;
  ~Twin() {
    device.Free(on_device);
    host.Free(on_host);
  }
  void* d() const { return on_device + offset; }
  void* h() const { return on_host + offset; }
  float* df() const { return static_cast<float*>(d()); }
  float* hf() const { return static_cast<float*>(h()); }

  // Elements of T that differ, NaN being equal to NaN and 0 to -0: under an infinite v the device
  // subtracts a number below all others from w, not 0.
  template <typename T>
  std::size_t Differences() const {
    std::vector<T> found(bytes / sizeof(T)), expected(found.size());
    Check(device.Download(found.data(), d(), bytes));
    Check(host.Download(expected.data(), h(), bytes));
    std::size_t count = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (std::memcmp(&found[i], &expected[i], sizeof(T)) == 0) continue;
      if constexpr (std::is_same_v<T, float>) {
        if (std::isnan(found[i]) && std::isnan(expected[i])) continue;
        if (found[i] == 0 && expected[i] == 0) continue;
      }
      ++count;
    }
    return count;
  }

  Backend& device;
  Backend& host;
  std::size_t bytes, offset;
  char* on_device;
  char* on_host;
};

bool Close(const StateScan& x, const StateScan& y) {
  return x.nonfinite == y.nonfinite && x.max_abs == y.max_abs &&
         std::fabs(x.sum_squares - y.sum_squares) <= 1e-12 * y.sum_squares;
}

class Comparison {
 public:
  Comparison(Benchmark& benchmark, std::size_t shift)
      : benchmark_(benchmark),
        device_(benchmark.backend()),
        host_(MakeReferenceBackend()),
        shift_(shift) {}

  void Momentum(Dtype dtype, MomentumForm form, bool nesterov) {
    const auto g = Gradient(dtype);
    const Twin m(device_, *host_, Values(2, 1e-3), shift_);
    const Twin u32(device_, *host_, std::vector<float>(kElements), shift_);
    const Twin u16(device_, *host_, std::vector<std::uint16_t>(kElements), shift_);
    const MomentumRule rule{.form = form, .nesterov = nesterov, .gradient_scale = 0.7};
    const double u_scale = IterateScale(device_.iterate_dtype(), 1e38);
    StateScan found, expected;
    const MomentumJob on_device{.gradient = {g->d(), dtype, kElements, 0.25f},
                                .rule = rule,
                                .m = m.df(),
                                .u = u16.d(),
                                .u_scale = u_scale};
    MomentumJob on_host = on_device;
    on_host.gradient.data = g->h();
    on_host.m = m.hf();
    on_host.u = u32.hf();
    on_host.u_scale = 1;
    Check(device_.Momentum({&on_device, 1}, {&found, 1}));
    Check(host_->Momentum({&on_host, 1}, {&expected, 1}));
    Expect("momentum M", m.Differences<float>());
    Expect("momentum scan", Close(found, expected) ? 0 : 1);
    // U in 16 bits is rounded once from fp64; by way of fp32 a tie can fall to the other side.
    auto* bits = static_cast<std::uint16_t*>(u16.h());
    for (std::size_t i = 0; i < kElements; ++i) {
      const auto scaled = static_cast<float>(u32.hf()[i] * u_scale);
      bits[i] = device_.iterate_dtype() == Dtype::kF16 ? FloatToF16(scaled) : FloatToBF16(scaled);
    }
    const std::size_t differences = u16.Differences<std::uint16_t>();
    Expect("momentum U", differences > kElements / 1000 ? differences : 0);
  }

  void AdamW(Dtype dtype, Dtype rounded_dtype, std::int64_t t) {
    const auto g = Gradient(dtype);
    std::vector<float> squares = Values(4, 1e-6);
    for (float& value : squares) value = std::fabs(value);
    const Twin w(device_, *host_, Values(3, 0.02), shift_),
        m(device_, *host_, Values(2, 1e-3), shift_), v(device_, *host_, squares, shift_);
    const Twin copy(device_, *host_, std::vector<std::uint16_t>(kElements), shift_);
    AdamWJob on_device{.gradient = {g->d(), dtype, kElements, 0.25f},
                       .rule = {.lr = 3e-4, .decay = 1 - 3e-5, .t = t, .gradient_scale = 0.9},
                       .state = {w.df(), m.df(), v.df()},
                       .rounded = {copy.d(), rounded_dtype}};
    AdamWJob on_host = on_device;
    on_host.gradient.data = g->h();
    on_host.state = {w.hf(), m.hf(), v.hf()};
    on_host.rounded.data = copy.h();
    AdamWScan found, expected;
    Check(device_.AdamW({&on_device, 1}, {&found, 1}));
    Check(host_->AdamW({&on_host, 1}, {&expected, 1}));
    Expect("adamw m", m.Differences<float>());
    Expect("adamw v", v.Differences<float>());
    Expect("adamw w", w.Differences<float>());
    // A NaN keeps its payload on the host only.
    const std::size_t copies = copy.Differences<std::uint16_t>();
    Expect("adamw rounded copy", copies > expected.weight.nonfinite ? copies : 0);
    Expect("adamw scans", Close(found.weight, expected.weight) &&
                                  Close(found.exp_avg, expected.exp_avg) &&
                                  Close(found.exp_avg_sq, expected.exp_avg_sq)
                              ? 0
                              : 1);
  }

  void Apply() {
    const Twin w(device_, *host_, Values(3, 0.02), shift_);
    const Twin o(device_, *host_, Narrow(Values(5, 0.02), device_.iterate_dtype(), 1), shift_);
    const Twin o32(device_, *host_, std::vector<float>(kElements), shift_);
    Check(device_.LoadIterate(o32.df(), o.d(), kElements));
    Check(device_.Download(o32.h(), o32.d(), kElements * 4));
    const ApplyJob on_device{
        .w = w.df(), .o = o.d(), .elements = kElements, .decay = 0.999, .step = 0.02};
    ApplyJob on_host = on_device;
    on_host.w = w.hf();
    on_host.o = o32.hf();
    StateScan found, expected;
    Check(device_.Apply({&on_device, 1}, {&found, 1}));
    Check(host_->Apply({&on_host, 1}, {&expected, 1}));
    Expect("apply w", w.Differences<float>());
    Expect("apply scan", Close(found, expected) ? 0 : 1);
  }

  void ScanAndAccumulate(Dtype dtype) {
    const auto g = Gradient(dtype);
    const GradientView on_device{g->d(), dtype, kElements, 1.0f / 3},
        on_host{g->h(), dtype, kElements, 1.0f / 3};
    GradientScan found, expected;
    Check(device_.Scan({&on_device, 1}, {&found, 1}));
    Check(host_->Scan({&on_host, 1}, {&expected, 1}));
    std::size_t wrong =
        found.nonfinite == expected.nonfinite && found.max_abs == expected.max_abs ? 0 : 1;
    for (std::size_t b = 0; b < expected.block_sums.size(); ++b) {
      const double sum = expected.block_sums[b];
      wrong += std::fabs(found.block_sums[b] - sum) <= 1e-12 * sum ? 0 : 1;
    }
    Expect("gradient scan", wrong);
    const Twin acc(device_, *host_, Values(6, 1e-3), shift_);
    for (const bool first : {false, true}) {
      Check(device_.Accumulate(acc.df(), g->d(), dtype, kElements, first));
      Check(host_->Accumulate(acc.hf(), g->h(), dtype, kElements, first));
      Expect("accumulate", acc.Differences<float>());
    }
  }

  std::size_t checks() const { return checks_; }

 private:
  std::unique_ptr<Twin> Gradient(Dtype dtype) {
    const std::vector<float> values = Values(1, 1e-3);
    if (dtype == Dtype::kF32) return std::make_unique<Twin>(device_, *host_, values, shift_);
    return std::make_unique<Twin>(device_, *host_, Narrow(values, dtype, 1), shift_);
  }

  void Expect(const std::string& what, std::size_t differences) {
    ++checks_;
    if (differences == 0) return;
    benchmark_.Fail(what + ": " + std::to_string(differences) + " of " + std::to_string(kElements) +
                    " values differ from the reference, shift " + std::to_string(shift_));
  }

  Benchmark& benchmark_;
  Backend& device_;
  std::unique_ptr<Backend> host_;
  std::size_t shift_;
  std::size_t checks_ = 0;
};

}  // namespace

void CheckElementwise(Benchmark& benchmark) {
  std::printf("\n== elementwise results against the reference, bit for bit\n");
  std::size_t checks = 0;
  for (const std::size_t shift : {0, 1, 2, 3}) {
    Comparison comparison(benchmark, shift);
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
      comparison.ScanAndAccumulate(dtype);
      comparison.AdamW(dtype, shift % 2 == 0 ? Dtype::kBF16 : Dtype::kF16,
                       static_cast<std::int64_t>(1 + shift * 1000));
      for (const MomentumForm form : {MomentumForm::kEma, MomentumForm::kSum}) {
        for (const bool nesterov : {false, true}) comparison.Momentum(dtype, form, nesterov);
      }
    }
    comparison.Apply();
    checks += comparison.checks();
  }
  std::printf("%zu comparisons of %zu elements: %s\n", checks, kElements,
              benchmark.failed() ? "DIFFERENT" : "the same bits");
}

}  // namespace muond::kernels::cuda
