// The cpu backend: elementwise passes over fixed blocks, Newton-Schulz over fixed tiles.
//
// oneTBB spreads blocks and tiles over threads; matrix products run single-threaded inside a tile.
// What a block or tile is depends on its own tensor's shape only, and partial results are combined
// in block order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/batch.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/newton_schulz.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/workers.h"
#include "kernels/host_memory.h"

namespace muond::kernels {
namespace {

using cpu::BlockStats;
using cpu::GradientBlock;

constexpr std::size_t kCopyBlockBytes = std::size_t{256} * 1024;

// Elements [begin, begin + elements) of `gradient`.
GradientBlock Slice(const GradientView& gradient, double scale, std::size_t begin,
                    std::size_t elements) {
  const auto* bytes = static_cast<const char*>(gradient.data);
  return {bytes + begin * DtypeBytes(gradient.dtype), gradient.dtype, gradient.unscale, scale,
          elements};
}

cpu::RoundedBlock Slice(const RoundedCopy& rounded, std::size_t begin) {
  if (rounded.data == nullptr) return {nullptr, rounded.dtype};
  return {static_cast<char*>(rounded.data) + begin * DtypeBytes(rounded.dtype), rounded.dtype};
}

cpu::AdamWWeights WeightsOf(const AdamWRule& rule) {
  const auto t = static_cast<double>(rule.t);
  return {
      .beta1 = rule.beta1,
      .beta2 = rule.beta2,
      .eps = rule.eps,
      .decay = rule.decay,
      .step = rule.lr / (1 - std::pow(rule.beta1, t)),
      .v_factor = 1 / std::sqrt(1 - std::pow(rule.beta2, t)),
  };
}

Error NoMemory(const char* what) { return Error(std::string(what) + ": no host memory left"); }

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const BackendOptions& options)
      : passes_(*cpu::SupportedPasses()[0]),
        workers_(options.threads),
        products_(options.products == Products::kAuto && !cpu::HasBF16Products()
                      ? Products::kF32
                      : options.products),
        newton_schulz_(&workers_, &passes_, products_, options.newton_schulz_fault) {}

  std::string_view name() const override { return "cpu"; }
  std::string description() const override {
    const bool bf16 = products_ == Products::kAuto || products_ == Products::kBF16;
    const cpu::F32Gemm& gemm =
        products_ == Products::kOpenBlas ? cpu::OpenBlasGemm() : cpu::FastestF32Gemm();
    return std::string("cpu: ") + passes_.isa + " passes, products in " +
           (bf16 ? std::string(cpu::BF16InstructionSet()) + " and " : std::string()) + "fp32 by " +
           gemm.library + ", " + std::to_string(workers_.threads()) + " threads";
  }

  void* Allocate(std::size_t bytes) override { return AllocateHost(bytes); }
  void Free(void* memory) override { FreeHost(memory); }
  std::size_t FreeBytes() const override { return FreeHostBytes(); }

  Error Copy(std::span<const CopyJob> jobs) override {
    try {
      copies_.Cut(jobs, [](const CopyJob& job) { return job.bytes; });
    } catch (const std::bad_alloc&) {
      return NoMemory("copy");
    }
    copies_.ForEach(workers_, [&](std::size_t i, std::size_t, std::size_t begin, std::size_t n) {
      std::memcpy(static_cast<char*>(jobs[i].dst) + begin,
                  static_cast<const char*>(jobs[i].src) + begin, n);
    });
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
    auto* bytes = static_cast<char*>(host);
    ForEachBlockOf(elements, [&](std::size_t begin, std::size_t n) {
      passes_.round(bytes + begin * DtypeBytes(dtype), dtype, src + begin, n);
    });
    return {};
  }

  Error StoreIterate(void* iterate, const float* src, std::size_t elements, double scale) override {
    auto* dst = static_cast<float*>(iterate);
    ForEachBlockOf(elements, [&](std::size_t begin, std::size_t n) {
      passes_.scale(dst + begin, src + begin, scale, n);
    });
    return {};
  }

  Error LoadIterate(float* dst, const void* iterate, std::size_t elements) override {
    const CopyJob job{dst, iterate, elements * sizeof(float)};
    return Copy({&job, 1});
  }

  Error Accumulate(float* acc, const void* data, Dtype dtype, std::size_t elements,
                   bool first) override {
    const auto* bytes = static_cast<const char*>(data);
    ForEachBlockOf(elements, [&](std::size_t begin, std::size_t n) {
      passes_.accumulate(acc + begin, bytes + begin * DtypeBytes(dtype), dtype, n, first);
    });
    return {};
  }

  Error Scan(std::span<const GradientView> gradients, std::span<GradientScan> results) override {
    const auto elements = [](const GradientView& gradient) { return gradient.elements; };
    const auto pass = [&](const GradientView& gradient, std::size_t begin, std::size_t n,
                          BlockStats* stats) {
      passes_.scan(Slice(gradient, 1.0, begin, n), stats);
    };
    if (Error error = ForEachBlock("scan", gradients, 1, elements, pass)) return error;
    try {
      for (std::size_t i = 0; i < gradients.size(); ++i) Collect(i, results[i]);
    } catch (const std::bad_alloc&) {
      return NoMemory("scan");
    }
    return {};
  }

  Error ScanState(std::span<const StateView> tensors, std::span<StateScan> results) override {
    const auto elements = [](const StateView& tensor) { return tensor.elements; };
    const auto pass = [&](const StateView& tensor, std::size_t begin, std::size_t n,
                          BlockStats* stats) {
      passes_.scan(Slice({tensor.data, tensor.dtype, tensor.elements}, 1.0, begin, n), stats);
    };
    if (Error error = ForEachBlock("scan of state", tensors, 1, elements, pass)) return error;
    for (std::size_t i = 0; i < tensors.size(); ++i) results[i] = Combine(i, 0, 1);
    return {};
  }

  Error Momentum(std::span<const MomentumJob> jobs, std::span<StateScan> states) override {
    const auto elements = [](const MomentumJob& job) { return job.gradient.elements; };
    const auto pass = [&](const MomentumJob& job, std::size_t begin, std::size_t n,
                          BlockStats* stats) {
      const MomentumRule& rule = job.rule;
      passes_.momentum(Slice(job.gradient, rule.gradient_scale, begin, n),
                       {rule.form == MomentumForm::kEma, rule.nesterov, rule.beta, job.u_scale,
                        rule.m_dtype},
                       static_cast<char*>(job.m) + begin * DtypeBytes(rule.m_dtype), job.write_m,
                       static_cast<float*>(job.u) + begin, stats);
    };
    if (Error error = ForEachBlock("momentum", jobs, 1, elements, pass)) return error;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      if (jobs[i].write_m) states[i] = Combine(i, 0, 1);
    }
    return {};
  }

  Error NewtonSchulz(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                     std::span<NewtonSchulzResult> results) override {
    return newton_schulz_.Run(jobs, rule, results);
  }

  Error Apply(std::span<const ApplyJob> jobs, std::span<StateScan> states) override {
    const auto elements = [](const ApplyJob& job) { return job.elements; };
    const auto pass = [&](const ApplyJob& job, std::size_t begin, std::size_t n,
                          BlockStats* stats) {
      passes_.apply(job.w + begin, static_cast<const float*>(job.o) + begin, n, job.decay, job.step,
                    Slice(job.rounded, begin), stats);
    };
    if (Error error = ForEachBlock("apply", jobs, 1, elements, pass)) return error;
    for (std::size_t i = 0; i < jobs.size(); ++i) states[i] = Combine(i, 0, 1);
    return {};
  }

  Error AdamW(std::span<const AdamWJob> jobs, std::span<AdamWScan> scans) override {
    const auto elements = [](const AdamWJob& job) { return job.gradient.elements; };
    const auto pass = [&](const AdamWJob& job, std::size_t begin, std::size_t n,
                          BlockStats* stats) {
      const AdamWState& state = job.state;
      passes_.adamw(Slice(job.gradient, job.rule.gradient_scale, begin, n), WeightsOf(job.rule),
                    state.w + begin, state.exp_avg + begin, state.exp_avg_sq + begin,
                    Slice(job.rounded, begin), stats);
    };
    if (Error error = ForEachBlock("adamw", jobs, 3, elements, pass)) return error;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      scans[i] = {Combine(i, 0, 3), Combine(i, 1, 3), Combine(i, 2, 3)};
    }
    return {};
  }

  std::size_t NewtonSchulzScratchBytes(std::span<const MatrixShape> shapes,
                                       const NewtonSchulzRule&) const override {
    std::size_t bytes = 0;
    for (const MatrixShape& shape : shapes) {
      bytes = std::max(bytes, newton_schulz_.ScratchBytes(shape.rows, shape.cols));
    }
    return bytes;
  }

 private:
  // pass(job, begin, elements, stats) for every block of every job; `stats` has room for
  // stats_per_block entries, which Combine finds again.
  template <typename Job, typename Elements, typename Pass>
  Error ForEachBlock(const char* what, std::span<const Job> jobs, std::size_t stats_per_block,
                     const Elements& elements, const Pass& pass) {
    try {
      blocks_.Cut(jobs, elements);
      if (stats_.size() < blocks_.blocks() * stats_per_block) {
        stats_.resize(blocks_.blocks() * stats_per_block);
      }
    } catch (const std::bad_alloc&) {
      return NoMemory(what);
    }
    blocks_.ForEach(workers_,
                    [&](std::size_t i, std::size_t block, std::size_t begin, std::size_t n) {
                      pass(jobs[i], begin, n, &stats_[block * stats_per_block]);
                    });
    return {};
  }

  // body(begin, elements) for every block of one tensor.
  template <typename Body>
  void ForEachBlockOf(std::size_t elements, const Body& body) {
    workers_.ForEach(BlockCount(elements), [&](std::size_t block) {
      const std::size_t begin = block * kBlockElements;
      body(begin, std::min(kBlockElements, elements - begin));
    });
  }

  // Statistic number `which` of tensor `job`, over its blocks in order.
  StateScan Combine(std::size_t job, std::size_t which, std::size_t stats_per_block) const {
    StateScan total;
    for (std::size_t block = blocks_.First(job); block < blocks_.First(job + 1); ++block) {
      const BlockStats& stats = stats_[block * stats_per_block + which];
      total.nonfinite += stats.nonfinite;
      total.max_abs = std::max(total.max_abs, stats.max_abs);
      total.sum_squares += stats.sum_squares;
    }
    return total;
  }

  void Collect(std::size_t job, GradientScan& result) const {
    const StateScan total = Combine(job, 0, 1);
    result.nonfinite = total.nonfinite;
    result.max_abs = total.max_abs;
    result.block_sums.resize(blocks_.First(job + 1) - blocks_.First(job));
    for (std::size_t i = 0; i < result.block_sums.size(); ++i) {
      result.block_sums[i] = stats_[blocks_.First(job) + i].sum_squares;
    }
  }

  const cpu::Passes& passes_;
  cpu::Workers workers_;
  Products products_;
  cpu::NewtonSchulzSolver newton_schulz_;
  // Kept between calls, so that a step allocates nothing.
  cpu::BlockBatch blocks_{kBlockElements};
  cpu::BlockBatch copies_{kCopyBlockBytes};
  std::vector<BlockStats> stats_;
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(const BackendOptions& options) {
  if (options.products == Products::kBF16 && !cpu::HasBF16Products()) return nullptr;
  return std::make_unique<CpuBackend>(options);
}

}  // namespace muond::kernels
