// The plain fp64 truth: every method a loop that can be checked against its formula by eye.
//
// Each element is computed in fp64 from the stored state and rounded to fp32 once, a bf16 momentum
// from there to bf16; what is computed from new state (U from M, the weight from m and v) is made
// of the value that is kept.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "kernels/backend.h"
#include "kernels/host_memory.h"
#include "kernels/reference/newton_schulz.h"

namespace muond::kernels {
namespace {

// Element i of 16- or 32-bit data at any address.
float Load(const void* data, Dtype dtype, std::size_t i) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  if (dtype == Dtype::kF32) {
    float value;
    std::memcpy(&value, bytes + i * sizeof(value), sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, bytes + i * sizeof(bits), sizeof(bits));
  return dtype == Dtype::kBF16 ? BF16ToFloat(bits) : F16ToFloat(bits);
}

float Load(const GradientView& gradient, std::size_t i) {
  return Load(gradient.data, gradient.dtype, i) * gradient.unscale;
}

void Observe(float value, StateScan& scan) {
  if (!std::isfinite(value)) {
    ++scan.nonfinite;
    return;
  }
  const double magnitude = std::fabs(static_cast<double>(value));
  scan.max_abs = std::max(scan.max_abs, magnitude);
  scan.sum_squares += magnitude * magnitude;
}

// Element i of `data`, rounded to nearest even; at any address.
void Store(void* data, Dtype dtype, std::size_t i, float value) {
  auto* bytes = static_cast<unsigned char*>(data);
  if (dtype == Dtype::kF32) {
    std::memcpy(bytes + i * sizeof(value), &value, sizeof(value));
    return;
  }
  const std::uint16_t bits = dtype == Dtype::kBF16 ? FloatToBF16(value) : FloatToF16(value);
  std::memcpy(bytes + i * sizeof(bits), &bits, sizeof(bits));
}

void Store(const RoundedCopy& rounded, std::size_t i, float value) {
  if (rounded.data != nullptr) Store(rounded.data, rounded.dtype, i, value);
}

// What is read again after `value` was stored.
float Kept(float value, Dtype dtype) {
  return dtype == Dtype::kBF16 ? BF16ToFloat(FloatToBF16(value)) : value;
}

GradientScan ScanOf(const GradientView& gradient) {
  GradientScan result;
  for (std::size_t begin = 0; begin < gradient.elements; begin += kBlockElements) {
    StateScan block;
    const std::size_t end = std::min(gradient.elements, begin + kBlockElements);
    for (std::size_t i = begin; i < end; ++i) Observe(Load(gradient, i), block);
    result.nonfinite += block.nonfinite;
    result.max_abs = std::max(result.max_abs, block.max_abs);
    result.block_sums.push_back(block.sum_squares);
  }
  return result;
}

StateScan ScanOf(const StateView& state) {
  StateScan scan;
  for (std::size_t i = 0; i < state.elements; ++i) {
    Observe(Load(state.data, state.dtype, i), scan);
  }
  return scan;
}

// Describes the new M, or, where that is not written, what it would be.
StateScan UpdateMomentum(const MomentumJob& job) {
  StateScan scan;
  auto* u = static_cast<float*>(job.u);
  const MomentumRule& rule = job.rule;
  const bool ema = rule.form == MomentumForm::kEma;
  for (std::size_t i = 0; i < job.gradient.elements; ++i) {
    const double g = Load(job.gradient, i) * rule.gradient_scale;
    const double old_m = Load(job.m, rule.m_dtype, i);
    const auto wide_m =
        static_cast<float>(ema ? old_m + (1 - rule.beta) * (g - old_m) : rule.beta * old_m + g);
    const float new_m = Kept(wide_m, rule.m_dtype);
    const double g_weight = ema ? 1 - rule.beta : 1;
    u[i] = rule.nesterov ? static_cast<float>(g_weight * g + rule.beta * new_m) : new_m;
    u[i] = static_cast<float>(u[i] * job.u_scale);
    if (job.write_m) Store(job.m, rule.m_dtype, i, new_m);
    Observe(new_m, scan);
  }
  return scan;
}

StateScan ApplyUpdate(const ApplyJob& job) {
  StateScan scan;
  const auto* o = static_cast<const float*>(job.o);
  for (std::size_t i = 0; i < job.elements; ++i) {
    job.w[i] = static_cast<float>(job.decay * job.w[i] - job.step * o[i]);
    Store(job.rounded, i, job.w[i]);
    Observe(job.w[i], scan);
  }
  return scan;
}

AdamWScan StepAdamW(const AdamWJob& job) {
  AdamWScan scan;
  const AdamWRule& rule = job.rule;
  const AdamWState& state = job.state;
  const double t = static_cast<double>(rule.t);
  const double step = rule.lr / (1 - std::pow(rule.beta1, t));
  const double v_factor = 1 / std::sqrt(1 - std::pow(rule.beta2, t));
  for (std::size_t i = 0; i < job.gradient.elements; ++i) {
    const double g = Load(job.gradient, i) * rule.gradient_scale;
    const float m = static_cast<float>(rule.beta1 * state.exp_avg[i] + (1 - rule.beta1) * g);
    const float v =
        static_cast<float>(rule.beta2 * state.exp_avg_sq[i] + ((1 - rule.beta2) * g) * g);
    const double denominator = std::sqrt(static_cast<double>(v)) * v_factor + rule.eps;
    const float w = static_cast<float>(rule.decay * state.w[i] - step * m / denominator);
    state.exp_avg[i] = m;
    state.exp_avg_sq[i] = v;
    state.w[i] = w;
    Store(job.rounded, i, w);
    Observe(w, scan.weight);
    Observe(m, scan.exp_avg);
    Observe(v, scan.exp_avg_sq);
  }
  return scan;
}

class ReferenceBackend final : public Backend {
 public:
  std::string_view name() const override { return "reference"; }
  std::string description() const override { return "reference: fp64 loops, one thread"; }

  void* Allocate(std::size_t bytes) override { return AllocateHost(bytes); }
  void Free(void* memory) override { FreeHost(memory); }

  Error Copy(std::span<const CopyJob> jobs) override {
    for (const CopyJob& job : jobs) {
      if (job.bytes > 0) std::memcpy(job.dst, job.src, job.bytes);
    }
    return {};
  }
  Error Upload(void* dst, const void* host, std::size_t bytes) override {
    const CopyJob job{dst, host, bytes};
    return Copy({&job, 1});
  }
  Error Download(void* host, const void* src, std::size_t bytes) override {
    const CopyJob job{host, src, bytes};
    return Copy({&job, 1});
  }
  Error Round(void* host, Dtype dtype, const float* src, std::size_t elements) override {
    for (std::size_t i = 0; i < elements; ++i) Store(host, dtype, i, src[i]);
    return {};
  }
  Error StoreIterate(void* iterate, const float* src, std::size_t elements, double scale) override {
    auto* to = static_cast<float*>(iterate);
    for (std::size_t i = 0; i < elements; ++i) to[i] = static_cast<float>(src[i] * scale);
    return {};
  }
  Error LoadIterate(float* dst, const void* iterate, std::size_t elements) override {
    return Download(dst, iterate, elements * sizeof(float));
  }

  Error Accumulate(float* acc, const void* data, Dtype dtype, std::size_t elements,
                   bool first) override {
    for (std::size_t i = 0; i < elements; ++i) {
      const float value = Load(data, dtype, i);
      acc[i] = first ? value : acc[i] + value;
    }
    return {};
  }
  Error Scan(std::span<const GradientView> gradients, std::span<GradientScan> results) override {
    for (std::size_t i = 0; i < gradients.size(); ++i) results[i] = ScanOf(gradients[i]);
    return {};
  }

  Error ScanState(std::span<const StateView> tensors, std::span<StateScan> results) override {
    for (std::size_t i = 0; i < tensors.size(); ++i) results[i] = ScanOf(tensors[i]);
    return {};
  }
  Error Momentum(std::span<const MomentumJob> jobs, std::span<StateScan> states) override {
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      const StateScan scan = UpdateMomentum(jobs[i]);
      if (jobs[i].write_m) states[i] = scan;
    }
    return {};
  }
  Error NewtonSchulz(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                     std::span<NewtonSchulzResult> results) override {
    try {
      for (std::size_t i = 0; i < jobs.size(); ++i) {
        results[i] = reference::NewtonSchulz(jobs[i], rule);
      }
    } catch (const std::bad_alloc&) {
      return Error("newton-schulz: no host memory left for scratch");
    }
    return {};
  }
  Error Apply(std::span<const ApplyJob> jobs, std::span<StateScan> states) override {
    for (std::size_t i = 0; i < jobs.size(); ++i) states[i] = ApplyUpdate(jobs[i]);
    return {};
  }
  Error AdamW(std::span<const AdamWJob> jobs, std::span<AdamWScan> scans) override {
    for (std::size_t i = 0; i < jobs.size(); ++i) scans[i] = StepAdamW(jobs[i]);
    return {};
  }

  std::size_t NewtonSchulzScratchBytes(std::span<const MatrixShape> shapes,
                                       const NewtonSchulzRule&) const override {
    // Temporary vectors, freed at the end of each matrix: X, its successor, A and B in fp64.
    std::int64_t elements = 0;
    for (const MatrixShape& shape : shapes) {
      const auto [m, n] = std::minmax(shape.rows, shape.cols);
      elements = std::max(elements, 2 * m * n + 2 * m * m);
    }
    return static_cast<std::size_t>(elements) * sizeof(double);
  }
};

}  // namespace

std::unique_ptr<Backend> MakeReferenceBackend() { return std::make_unique<ReferenceBackend>(); }

}  // namespace muond::kernels
