// The libraries behind the products, each held to one thread.
#include "kernels/cpu/gemm.h"

#include <cblas.h>

#include <map>
#include <memory>
#include <new>
#include <oneapi/dnnl/dnnl.hpp>
#include <stdexcept>

#include "proto/mutex.h"

// GNU OpenMP's, which libdnnl runs on. Declared here, because <omp.h> comes with a compiler switch
// that makes clang link another OpenMP.
extern "C" {
int omp_get_max_threads();
void omp_set_num_threads(int threads);
}

namespace muond::kernels::cpu {
namespace {

// oneDNN runs, and generates code for, as many threads as OpenMP allows the calling thread.
class OneOmpThread {
 public:
  OneOmpThread() : before_(omp_get_max_threads()) {
    if (before_ != 1) omp_set_num_threads(1);
  }
  OneOmpThread(const OneOmpThread&) = delete;
  OneOmpThread& operator=(const OneOmpThread&) = delete;
  ~OneOmpThread() {
    if (before_ != 1) omp_set_num_threads(before_);
  }

 private:
  int before_;
};

void RunOpenBlas(const F32Product& p) {
  // One number for the whole process, which others may have set since.
  if (openblas_get_num_threads() != 1) openblas_set_num_threads(1);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, p.b_transposed ? CblasTrans : CblasNoTrans,
              static_cast<blasint>(p.m), static_cast<blasint>(p.n), static_cast<blasint>(p.k),
              p.alpha, p.a, static_cast<blasint>(p.a_stride), p.b, static_cast<blasint>(p.b_stride),
              0.0f, p.c, static_cast<blasint>(p.c_stride));
}

void RunOneDnn(const F32Product& p) {
  const OneOmpThread alone;
  const dnnl_status_t status = dnnl_sgemm('N', p.b_transposed ? 'T' : 'N', p.m, p.n, p.k, p.alpha,
                                          p.a, p.a_stride, p.b, p.b_stride, 0.0f, p.c, p.c_stride);
  if (status == dnnl_out_of_memory) throw std::bad_alloc();
  if (status != dnnl_success) throw std::runtime_error("oneDNN sgemm failed");
}

bool HasIsa(dnnl::cpu_isa isa) {
  const auto wanted = static_cast<unsigned>(isa);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & wanted) == wanted;
}

const dnnl::engine& CpuEngine() {
  static const auto& engine = *new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

class OneDnnBF16Gemm final : public BF16Gemm {
 public:
  explicit OneDnnBF16Gemm(const BF16Shape& shape) {
    using Type = dnnl::memory::data_type;
    const OneOmpThread alone;
    const dnnl::memory::dims b_strides = shape.b_transposed ? dnnl::memory::dims{1, shape.b_stride}
                                                            : dnnl::memory::dims{shape.b_stride, 1};
    a_ = {{shape.m, shape.k}, Type::bf16, dnnl::memory::dims{shape.a_stride, 1}};
    b_ = {{shape.k, shape.n}, Type::bf16, b_strides};
    c_ = {{shape.m, shape.n}, Type::f32, dnnl::memory::dims{shape.n, 1}};
    // The library's own scratchpad belongs to the thread that made the primitive.
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(a_, b_, c_), attributes,
                                                   CpuEngine());
    scratchpad_ = description.scratchpad_desc();
    matmul_ = dnnl::matmul(description);
  }

  void Run(const std::uint16_t* a, const std::uint16_t* b, float* c) const override {
    const OneOmpThread alone;
    thread_local dnnl::stream stream(CpuEngine());
    // The arguments are only read; the library's type does not say so.
    const dnnl::memory left(a_, CpuEngine(), const_cast<std::uint16_t*>(a));
    const dnnl::memory right(b_, CpuEngine(), const_cast<std::uint16_t*>(b));
    const dnnl::memory result(c_, CpuEngine(), c);
    const dnnl::memory scratchpad(scratchpad_, CpuEngine());
    matmul_.execute(stream, {{DNNL_ARG_SRC, left},
                             {DNNL_ARG_WEIGHTS, right},
                             {DNNL_ARG_DST, result},
                             {DNNL_ARG_SCRATCHPAD, scratchpad}});
  }

 private:
  dnnl::memory::desc a_, b_, c_, scratchpad_;
  dnnl::matmul matmul_;
};

}  // namespace

const F32Gemm& OpenBlasGemm() {
  static const F32Gemm gemm{"OpenBLAS", RunOpenBlas};
  return gemm;
}

const F32Gemm& FastestF32Gemm() {
  static const F32Gemm one_dnn{"oneDNN", RunOneDnn};
  return HasIsa(dnnl::cpu_isa::avx512_core) ? one_dnn : OpenBlasGemm();
}

bool HasBF16Products() { return HasIsa(dnnl::cpu_isa::avx512_core_bf16); }

const char* BF16InstructionSet() {
  if (HasIsa(dnnl::cpu_isa::avx512_core_amx)) return "AMX bf16";
  return HasBF16Products() ? "AVX-512 bf16" : "none";
}

const BF16Gemm& BF16Gemm::For(const BF16Shape& shape) {
  static auto& mutex = *new Mutex;
  static auto& gemms = *new std::map<BF16Shape, std::unique_ptr<BF16Gemm>>;
  MutexLock lock(mutex);
  std::unique_ptr<BF16Gemm>& gemm = gemms[shape];
  if (gemm == nullptr) gemm = std::make_unique<OneDnnBF16Gemm>(shape);
  return *gemm;
}

}  // namespace muond::kernels::cpu
