// How an update is computed: one interface, several implementations (`reference`, `cpu`).
//
// The engine decides what to compute and when; a backend knows only pointers, sizes and numbers.
// All pointers are in the backend's own memory (Allocate) unless their comment says otherwise.
// Formulas: docs/semantics.md; their sources are torch.optim.Muon, torch.optim.AdamW and
// KellerJordan/Muon.
//
// Work comes in batches: one call takes the jobs of many tensors, so that small tensors share a
// launch (or a parallel loop) and the results of a batch cost one wait. results[i] belongs to
// jobs[i]; both spans have the same length; an empty batch is legal. Tensors without elements too.
//
// Determinism: with the same arguments a backend returns the same bits, whatever its number of
// threads and whatever else is in the batch. Thread rule: one caller at a time per Backend object,
// but the methods under "Memory" may be called from any thread at any time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/device_loss.h"
#include "kernels/tensor.h"

namespace muond::kernels {

// What one pass over a reduced gradient finds. Sums and maxima are of unscaled values.
struct GradientScan {
  std::uint64_t nonfinite = 0;     // NaN and infinite elements; when > 0 the sums mean nothing
  double max_abs = 0;              // max |G| over the finite elements
  std::vector<double> block_sums;  // sum of G^2 in fp64 per block of kBlockElements elements
};

// `elements` values of state.
struct StateView {
  const void* data = nullptr;
  std::size_t elements = 0;
  Dtype dtype = Dtype::kF32;  // or kBF16
};

// Facts about state just written, gathered in the same pass. They feed the next step's
// state-overflow check and the health metrics.
struct StateScan {
  std::uint64_t nonfinite = 0;
  double max_abs = 0;
  double sum_squares = 0;  // fp64, in block order
};

// Where the new master weights also go, rounded to nearest even, in the same pass; null: nowhere.
struct RoundedCopy {
  void* data = nullptr;
  Dtype dtype = Dtype::kBF16;
};

enum class MomentumForm : std::uint8_t {
  kEma = 0,  // M <- M + (1 - beta)(G - M), the default (torch.optim.Muon)
  kSum = 1,  // M <- beta M + G (KellerJordan's first form)
};

struct MomentumRule {
  MomentumForm form = MomentumForm::kEma;
  double beta = 0.95;
  bool nesterov = true;
  double gradient_scale = 1.0;  // clip coefficient under clip policy `all`, else 1
  // What M is kept in: kF32 or kBF16. A bf16 M is widened, the new one computed as an fp32 M is and
  // then rounded to nearest even; U is made of what is kept.
  Dtype m_dtype = Dtype::kF32;
};

// One Newton-Schulz step: A = X X^T; X <- a X + (b A + c A^2) X.
struct NewtonSchulzStep {
  double a, b, c;
};

enum class NewtonSchulzMethod : std::uint8_t {
  kAuto = 0,      // the backend's choice per shape, by measurement
  kStandard = 1,  // products with X in every step
  kGram = 2,      // iterate on X X^T, restart after step 2; square matrices and lists of steps
                  // that are not gram-safe (kernels/coefficients.h) use kStandard
};

struct NewtonSchulzRule {
  std::vector<NewtonSchulzStep> steps;
  NewtonSchulzMethod method = NewtonSchulzMethod::kAuto;
  double norm_floor = 0;  // X = U / max(|U|_F, norm_floor); 0 makes the result scale-free
  // A plausible result has RMS residual |O^T O - I|_F / sqrt(min(rows, cols)) at most this; sets
  // bring their own limit (kernels/coefficients.h). A product costs time, so backends check
  // |O|_F^2 <= min(rows, cols) * (1 + residual_max) instead, plus finiteness of every element; a
  // result that fails is redone in the fp32 standard form.
  double residual_max = 1.05;
};

// The input U and the output O of Newton-Schulz are kept in the backend's own element type, its
// iterate dtype: fp32 on the CPU, 16 bits where the products are made of 16-bit values anyway. U is
// stored times a power of two, `u_scale`, so that a 16-bit type holds every magnitude of fp32. For
// the same reason O comes with an `o_scale`: norm_floor can make it as small as anything.

// Momentum of a whole parameter: writes the new M and U = G + ... as the rule says; without
// Nesterov U is a copy of M: Newton-Schulz never sees M itself.
struct MomentumJob {
  GradientView gradient;
  MomentumRule rule;
  void* m = nullptr;    // gradient.elements values of rule.m_dtype
  bool write_m = true;  // false: M is only read (Newton-Schulz before the verdict)
  void* u = nullptr;    // gradient.elements values of the iterate dtype
  double u_scale = 1;   // IterateScale(bound on max |U|)
};

// One matrix to orthogonalize: row-major rows x cols, contiguous, of the iterate dtype. `o` must
// not overlap `u`.
struct MatrixJob {
  const void* u = nullptr;
  void* o = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  double u_scale = 1;  // what `u` was stored with; matters to norm_floor only
};

struct MatrixShape {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

struct NewtonSchulzResult {
  bool zero_input = false;  // U = 0, so O = 0 by definition
  bool fallback = false;    // the fast path was implausible; redone by the fp32 standard path
  bool failed = false;      // the fallback was bad as well: O must not be used
  double output_norm = 0;   // |O|_F
  double o_scale = 1;       // O is this times what lies in `o`; not 1 only below norm_floor
};

// W <- decay W - step O, elementwise, in fp32.
struct ApplyJob {
  float* w = nullptr;
  const void* o = nullptr;  // `elements` values of the iterate dtype
  std::size_t elements = 0;
  double decay = 1;
  double step = 0;
  RoundedCopy rounded;
};

struct AdamWRule {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double decay = 1.0;           // factor on W before the update: 1 - lr * weight_decay
  std::int64_t t = 1;           // applied steps of this parameter, this one included
  double gradient_scale = 1.0;  // clip coefficient, else 1
};

struct AdamWState {
  float* w = nullptr;           // master weights
  float* exp_avg = nullptr;     // m
  float* exp_avg_sq = nullptr;  // v
};

// One AdamW step, one pass: W <- decay W; m, v; W <- W - lr m_hat / (sqrt(v_hat) + eps).
// The new v is computed as beta2 v + ((1 - beta2) g) g, so that g^2 alone cannot overflow.
struct AdamWJob {
  GradientView gradient;
  AdamWRule rule;
  AdamWState state;
  RoundedCopy rounded;
};

// Bytes from `src` to `dst`, not overlapping.
struct CopyJob {
  void* dst = nullptr;
  const void* src = nullptr;
  std::size_t bytes = 0;
};

// dst[i] = round_to_nearest_even(src[i]) in `dtype`, to memory that the backend's device reaches:
// its own, shared blocks included (device_memory.h), or staging memory.
struct RoundJob {
  void* dst = nullptr;
  Dtype dtype = Dtype::kF32;
  const float* src = nullptr;
  std::size_t elements = 0;
};

struct AdamWScan {
  StateScan weight;
  StateScan exp_avg;
  StateScan exp_avg_sq;
};

class Backend : public Losable {
 public:
  virtual ~Backend() = default;

  // "reference", "cpu" or "cuda": the value of --backend and of the metric label.
  virtual std::string_view name() const = 0;
  // One line for the log: instruction set or device, library, threads.
  virtual std::string description() const = 0;
  virtual Dtype iterate_dtype() const { return Dtype::kF32; }

  // -- Memory. Any thread, any time.
  // `bytes` zeroed bytes of the backend's memory aligned to 64, or null when there are none left.
  virtual void* Allocate(std::size_t bytes) = 0;
  virtual void Free(void* memory) = 0;
  // True when Allocate's memory is host memory: the host may read and write it.
  virtual bool host_memory() const { return true; }
  // Host memory that incoming bytes are written to, contents undefined, aligned to 64, or null.
  // Where host_memory() it is the same as Allocate's and every call may read it; elsewhere only
  // Upload and Accumulate take it.
  virtual void* AllocateStaging(std::size_t bytes) { return Allocate(bytes); }
  virtual void FreeStaging(void* memory) { Free(memory); }
  // Bytes that Allocate can still give; 0: not known.
  virtual std::size_t FreeBytes() const { return 0; }

  // -- Moving. On return the bytes are there.
  virtual Error Copy(std::span<const CopyJob> jobs) = 0;
  // From host memory, to host memory.
  virtual Error Upload(void* dst, const void* host, std::size_t bytes) = 0;
  virtual Error Download(void* host, const void* src, std::size_t bytes) = 0;
  // host[i] = round_to_nearest_even(src[i]) in `dtype`, to host memory: what Pull sends.
  virtual Error Round(void* host, Dtype dtype, const float* src, std::size_t elements) = 0;
  // What RoundJob says, many tensors at once.
  virtual Error RoundAll(std::span<const RoundJob> jobs) {
    for (const RoundJob& job : jobs) {
      if (Error error = Round(job.dst, job.dtype, job.src, job.elements)) return error;
    }
    return {};
  }
  // iterate[i] = src[i] * scale in the iterate dtype, and back (without the scale).
  virtual Error StoreIterate(void* iterate, const float* src, std::size_t elements,
                             double scale) = 0;
  virtual Error LoadIterate(float* dst, const void* iterate, std::size_t elements) = 0;

  // -- Gradients.
  // acc[i] (+)= float(data[i]): the fp32 sum over ranks and micro-batches, one call per
  // contribution in contribution order. `first` overwrites instead of adding. `data` may be staging
  // memory; it is not read after the return.
  virtual Error Accumulate(float* acc, const void* data, Dtype dtype, std::size_t elements,
                           bool first) = 0;
  // One pass over each reduced gradient: non-finite count, maximum, sum of squares per block.
  virtual Error Scan(std::span<const GradientView> gradients, std::span<GradientScan> results) = 0;

  // -- State.
  virtual Error ScanState(std::span<const StateView> tensors, std::span<StateScan> results) = 0;
  // states[i] describes the new M; it is left alone where write_m is false.
  virtual Error Momentum(std::span<const MomentumJob> jobs, std::span<StateScan> states) = 0;
  // Orthogonalizes every job. Shapes may differ; equal shapes are batched. A matrix gives the same
  // bits alone and in any batch.
  virtual Error NewtonSchulz(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                             std::span<NewtonSchulzResult> results) = 0;
  // states[i] describes the new W.
  virtual Error Apply(std::span<const ApplyJob> jobs, std::span<StateScan> states) = 0;
  virtual Error AdamW(std::span<const AdamWJob> jobs, std::span<AdamWScan> scans) = 0;

  // Bytes of scratch that NewtonSchulz takes for one call with jobs of these shapes, and keeps for
  // the calls after it.
  virtual std::size_t NewtonSchulzScratchBytes(std::span<const MatrixShape> shapes,
                                               const NewtonSchulzRule& rule) const = 0;

  // Fault injection: a kernel that traps. The device is lost then; the host, where nothing can be,
  // only says that it is.
  virtual Error Trap() { return Lost(Error("injected fault: a kernel trapped")); }
};

// The power of two that U is stored with in `dtype` when no element exceeds `bound` in magnitude:
// 1 for kF32, else such that bound x scale lies in (2^13, 2^14]. 1 when bound is 0 or not finite.
double IterateScale(Dtype dtype, double bound);

// Fault injection for tests of `fallback` and `failed`: how many of the next Newton-Schulz results
// get one NaN, as a broken fast path or processor would leave. Counted down as they are used up.
struct NewtonSchulzFault {
  std::atomic<int> fast_path{0};  // results of the first attempt
  std::atomic<int> fallback{0};   // results of the fp32 standard redo
};

// What the cpu backend makes the products of Newton-Schulz of.
enum class Products : std::uint8_t {
  kAuto = 0,      // bf16 where the processor has it and the matrix is large enough, else fp32
  kF32 = 1,       // fp32, by the library that is faster on this processor
  kBF16 = 2,      // bf16 products with fp32 sums, in every matrix
  kOpenBlas = 3,  // fp32 by OpenBLAS: what processors without AVX-512 get
};

struct BackendOptions {
  int threads = 0;                                   // 0: one per core
  Products products = Products::kAuto;               // cpu only
  NewtonSchulzFault* newton_schulz_fault = nullptr;  // null, always, outside tests
};

// The plain fp64 truth: loops one can check against the formulas.
std::unique_ptr<Backend> MakeReferenceBackend();
// oneDNN, OpenBLAS and oneTBB; docs/kernels.md. Null for Products::kBF16 where the processor has no
// bf16 products.
std::unique_ptr<Backend> MakeCpuBackend(const BackendOptions& options);

}  // namespace muond::kernels
