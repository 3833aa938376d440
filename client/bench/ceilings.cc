#include "client/bench/ceilings.h"

#include <cblas.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "client/bench/statistics.h"
#include "client/bench/values.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "proto/check.h"

// GNU OpenMP's, which libdnnl runs on. Declared here, because <omp.h> comes with a compiler switch
// that makes clang link another OpenMP.
extern "C" void omp_set_num_threads(int threads);

namespace muond::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRepetitions = 5;
constexpr int kSide = 1024;
constexpr double kProductFlops = 2.0 * kSide * kSide * kSide;

using Work = std::function<void()>;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The least seconds until all threads have done their work once, all starting together.
// `prepare(thread)` makes the work on its thread. The first repetition warms up and doesn't count.
double TimeTogether(int threads, const std::function<Work(int)>& prepare) {
  std::vector<double> seconds;
  Clock::time_point start;
  std::barrier begin(threads, [&start]() noexcept { start = Clock::now(); });
  std::barrier end(threads, [&]() noexcept { seconds.push_back(SecondsSince(start)); });
  std::vector<std::thread> workers;
  for (int thread = 0; thread < threads; ++thread) {
    workers.emplace_back([&, thread] {
      const Work work = prepare(thread);
      for (int i = 0; i <= kRepetitions; ++i) {
        begin.arrive_and_wait();
        work();
        end.arrive_and_wait();
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  seconds.erase(seconds.begin());
  return Summarize(seconds).min;
}

std::vector<float> NormalMatrix(int seed) {
  std::vector<float> matrix(static_cast<std::size_t>(kSide) * kSide);
  Random random(static_cast<std::uint64_t>(seed));
  for (float& value : matrix) value = random.Normal();
  return matrix;
}

// FLOP/s of OpenBLAS.
double MeasureOpenBlas(int threads) {
  // Each thread a product of its own, of one thread: BLAS must not start others beside them.
  const int before = openblas_get_num_threads();
  openblas_set_num_threads(1);
  const double seconds = TimeTogether(threads, [](int thread) -> Work {
    return [a = NormalMatrix(2 * thread), b = NormalMatrix(2 * thread + 1),
            c = NormalMatrix(0)]() mutable {
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kSide, kSide, kSide, 1.0f, a.data(),
                  kSide, b.data(), kSide, 0.0f, c.data(), kSide);
    };
  });
  openblas_set_num_threads(before);
  return threads * kProductFlops / seconds;
}

// A product of oneDNN on the thread that makes it and runs it, its second operand in the layout
// that the library likes best.
class OneDnnProduct {
 public:
  OneDnnProduct(dnnl::memory::data_type type, int seed)
      : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    using Tag = dnnl::memory::format_tag;
    omp_set_num_threads(1);  // of this thread; before the code for it is generated
    const dnnl::memory::dims dims = {kSide, kSide};
    description_ = dnnl::matmul::primitive_desc(
        {{dims, type, Tag::ab}, {dims, type, Tag::any}, {dims, F32(), Tag::ab}}, engine_);
    product_ = dnnl::matmul(description_);
    a_ = Filled(description_.src_desc(), seed);
    b_ = Filled(description_.weights_desc(), seed + 1);
    c_ = dnnl::memory(description_.dst_desc(), engine_);
  }

  void Run() {
    product_.execute(stream_, {{DNNL_ARG_SRC, a_}, {DNNL_ARG_WEIGHTS, b_}, {DNNL_ARG_DST, c_}});
    stream_.wait();
  }

  std::string name() const { return std::string("oneDNN ") + description_.impl_info_str(); }

 private:
  static dnnl::memory::data_type F32() { return dnnl::memory::data_type::f32; }

  dnnl::memory Filled(const dnnl::memory::desc& layout, int seed) {
    dnnl::memory memory(layout, engine_);
    Random random(static_cast<std::uint64_t>(seed));
    void* data = memory.get_data_handle();
    const bool wide = layout.data_type() == F32();
    for (std::size_t i = 0; i < layout.get_size() / (wide ? 4 : 2); ++i) {
      const float value = random.Normal();
      if (wide) {
        static_cast<float*>(data)[i] = value;
      } else {
        static_cast<std::uint16_t*>(data)[i] = kernels::FloatToBF16(value);
      }
    }
    return memory;
  }

  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::matmul::primitive_desc description_;
  dnnl::matmul product_;
  dnnl::memory a_, b_, c_;
};

// FLOP/s of oneDNN, and what it calls its code.
double MeasureOneDnn(dnnl::memory::data_type type, int threads, std::string* name) {
  const double seconds = TimeTogether(threads, [type, name](int thread) -> Work {
    const auto product = std::make_shared<OneDnnProduct>(type, 2 * thread);
    if (thread == 0) *name = product->name();
    return [product] { product->Run(); };
  });
  return threads * kProductFlops / seconds;
}

// Instruction sets are sets of bits; oneDNN would emulate bf16 where they lack it.
bool HasBf16Products() {
  constexpr auto kBf16 = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & kBf16) == kBf16;
}

}  // namespace

double MeasureMemcpy(int threads) {
  constexpr std::size_t kBytes = std::size_t{128} << 20;  // of all threads; beyond any cache
  const std::size_t each = kBytes / static_cast<std::size_t>(threads);
  const double seconds = TimeTogether(threads, [each](int) -> Work {
    return [from = std::vector<std::byte>(each, std::byte{1}),
            to = std::vector<std::byte>(each)]() mutable {
      std::memcpy(to.data(), from.data(), to.size());
      // The copy must happen.
      MUOND_CHECK(to.back() == std::byte{1}, "memcpy copied");
      to.back() = std::byte{0};
    };
  });
  return static_cast<double>(each) * threads / seconds;
}

Ceilings MeasureCeilings(int threads) {
  Ceilings ceilings;
  ceilings.threads =
      threads > 0 ? threads : std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
  ceilings.memcpy_one_thread = MeasureMemcpy(1);
  ceilings.memcpy = MeasureMemcpy(ceilings.threads);
  ceilings.sgemm_flops =
      MeasureOneDnn(dnnl::memory::data_type::f32, ceilings.threads, &ceilings.sgemm_library);
  if (const double openblas = MeasureOpenBlas(ceilings.threads); openblas > ceilings.sgemm_flops) {
    ceilings.sgemm_flops = openblas;
    ceilings.sgemm_library = std::string("OpenBLAS ") + openblas_get_corename();
  }
  if (HasBf16Products()) {
    ceilings.bf16_flops =
        MeasureOneDnn(dnnl::memory::data_type::bf16, ceilings.threads, &ceilings.bf16_library);
  } else {
    ceilings.bf16_library = "this processor has no bf16 products";
  }
  return ceilings;
}

}  // namespace muond::bench
