// The cpu backend: elementwise passes over fixed blocks, Newton-Schulz over fixed tiles.
//
// oneTBB spreads blocks and tiles over threads; OpenBLAS runs single-threaded inside a tile. What a
// block or tile is depends on the shape only, and partial results are combined in block order.
#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/newton_schulz.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/products.h"
#include "kernels/cpu/workers.h"
#include "kernels/host_memory.h"

namespace muond::kernels {
namespace {

using cpu::BlockStats;
using cpu::GradientBlock;

// Elements [begin, begin + elements) of `gradient`.
GradientBlock Slice(const GradientView& gradient, double scale, std::size_t begin,
                    std::size_t elements) {
  const auto* bytes = static_cast<const char*>(gradient.data);
  return {bytes + begin * DtypeBytes(gradient.dtype), gradient.dtype, gradient.unscale, scale,
          elements};
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const BackendOptions& options)
      : passes_(*cpu::SupportedPasses()[0]),
        workers_(options.threads),
        newton_schulz_(&workers_, &passes_, options.newton_schulz_fault) {
    cpu::UseSingleThreadedBlas();
  }

  std::string_view name() const override { return "cpu"; }
  std::string description() const override {
    return std::string("cpu: ") + passes_.isa + " passes, OpenBLAS for " + openblas_get_corename() +
           ", " + std::to_string(workers_.threads()) + " threads";
  }

  void* Allocate(std::size_t bytes) override { return AllocateHost(bytes); }
  void Free(void* memory) override { FreeHost(memory); }
  Error Copy(void* dst, const void* src, std::size_t bytes) override {
    auto* to = static_cast<char*>(dst);
    const auto* from = static_cast<const char*>(src);
    ForEachBlock(bytes, [&](std::size_t, std::size_t begin, std::size_t n) {
      std::memcpy(to + begin, from + begin, n);
    });
    return {};
  }

  Error Accumulate(float* acc, const void* data, Dtype dtype, std::size_t elements,
                   bool first) override {
    const auto* bytes = static_cast<const char*>(data);
    ForEachBlock(elements, [&](std::size_t, std::size_t begin, std::size_t n) {
      passes_.accumulate(acc + begin, bytes + begin * DtypeBytes(dtype), dtype, n, first);
    });
    return {};
  }

  Error Scan(const GradientView& gradient, GradientScan& result) override {
    stats_.assign(BlockCount(gradient.elements), {});
    ForEachBlock(gradient.elements, [&](std::size_t block, std::size_t begin, std::size_t n) {
      passes_.scan_gradient(Slice(gradient, 1.0, begin, n), &stats_[block]);
    });
    result.nonfinite = 0;
    result.max_abs = 0;
    result.block_sums.clear();
    for (const BlockStats& block : stats_) {
      result.nonfinite += block.nonfinite;
      result.max_abs = std::max(result.max_abs, block.max_abs);
      result.block_sums.push_back(block.sum_squares);
    }
    return {};
  }

  Error ScanState(const float* data, std::size_t elements, StateScan& result) override {
    stats_.assign(BlockCount(elements), {});
    ForEachBlock(elements, [&](std::size_t block, std::size_t begin, std::size_t n) {
      passes_.scan_state(data + begin, n, &stats_[block]);
    });
    result = Combine(0, 1);
    return {};
  }

  Error Round(void* dst, Dtype dtype, const float* src, std::size_t elements) override {
    auto* bytes = static_cast<char*>(dst);
    ForEachBlock(elements, [&](std::size_t, std::size_t begin, std::size_t n) {
      passes_.round(bytes + begin * DtypeBytes(dtype), dtype, src + begin, n);
    });
    return {};
  }

  Error Momentum(const GradientView& gradient, const MomentumRule& rule, float* m, bool write_m,
                 float* u_out, StateScan& state) override {
    const cpu::MomentumWeights weights{rule.form == MomentumForm::kEma, rule.nesterov, rule.beta};
    stats_.assign(BlockCount(gradient.elements), {});
    ForEachBlock(gradient.elements, [&](std::size_t block, std::size_t begin, std::size_t n) {
      passes_.momentum(Slice(gradient, rule.gradient_scale, begin, n), weights, m + begin, write_m,
                       u_out + begin, &stats_[block]);
    });
    if (write_m) state = Combine(0, 1);
    return {};
  }

  Error NewtonSchulz(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                     std::span<NewtonSchulzResult> results) override {
    return newton_schulz_.Run(jobs, rule, results);
  }

  Error Apply(float* w, const float* o, std::size_t elements, double decay, double step,
              StateScan& state) override {
    stats_.assign(BlockCount(elements), {});
    ForEachBlock(elements, [&](std::size_t block, std::size_t begin, std::size_t n) {
      passes_.apply(w + begin, o + begin, n, decay, step, &stats_[block]);
    });
    state = Combine(0, 1);
    return {};
  }

  Error AdamW(const GradientView& gradient, const AdamWRule& rule, const AdamWState& state,
              AdamWScan& scan) override {
    const double t = static_cast<double>(rule.t);
    const cpu::AdamWWeights weights{
        .beta1 = rule.beta1,
        .beta2 = rule.beta2,
        .eps = rule.eps,
        .decay = rule.decay,
        .step = rule.lr / (1 - std::pow(rule.beta1, t)),
        .v_factor = 1 / std::sqrt(1 - std::pow(rule.beta2, t)),
    };
    stats_.assign(3 * BlockCount(gradient.elements), {});
    ForEachBlock(gradient.elements, [&](std::size_t block, std::size_t begin, std::size_t n) {
      passes_.adamw(Slice(gradient, rule.gradient_scale, begin, n), weights, state.w + begin,
                    state.exp_avg + begin, state.exp_avg_sq + begin, &stats_[3 * block]);
    });
    scan = {Combine(0, 3), Combine(1, 3), Combine(2, 3)};
    return {};
  }

  std::size_t NewtonSchulzScratchBytes(std::int64_t rows, std::int64_t cols) const override {
    return newton_schulz_.ScratchBytes(rows, cols);
  }

 private:
  // body(block, begin, elements) for every block of kBlockElements.
  template <typename Body>
  void ForEachBlock(std::size_t elements, const Body& body) {
    workers_.ForEach(BlockCount(elements), [&](std::size_t block) {
      const std::size_t begin = block * kBlockElements;
      body(block, begin, std::min(kBlockElements, elements - begin));
    });
  }

  // The statistics at first, first + stride, ..., in block order.
  StateScan Combine(std::size_t first, std::size_t stride) const {
    StateScan total;
    for (std::size_t i = first; i < stats_.size(); i += stride) {
      total.nonfinite += stats_[i].nonfinite;
      total.max_abs = std::max(total.max_abs, stats_[i].max_abs);
      total.sum_squares += stats_[i].sum_squares;
    }
    return total;
  }

  const cpu::Passes& passes_;
  cpu::Workers workers_;
  cpu::NewtonSchulzSolver newton_schulz_;
  std::vector<BlockStats> stats_;  // kept between calls, so that a step allocates nothing
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(const BackendOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

}  // namespace muond::kernels
