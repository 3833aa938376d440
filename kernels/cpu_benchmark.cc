// How fast the cpu backend is, beside what the machine can do: sgemm's rate for Newton-Schulz,
// memcpy's for the elementwise passes, measured in the same run.
//
// Counters: GFLOP/s counts the standard form's products at full cost (5 steps of
// 2 n m^2 + 2 m^3 + 2 n m^2), whatever the form did, so that forms compare by time; bytes/s counts
// what a pass must read and write.
#include <benchmark/benchmark.h>
#include <cblas.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/backend.h"
#include "kernels/coefficients.h"

namespace muond::kernels {
namespace {

// 64 Mi elements: beyond any cache.
constexpr std::size_t kElements = std::size_t{1} << 26;

Backend& Cpu() {
  static const std::unique_ptr<Backend> backend = MakeCpuBackend({});
  return *backend;
}

class Buffer {
 public:
  explicit Buffer(std::size_t floats)
      : data_(static_cast<float*>(Cpu().Allocate(floats * sizeof(float)))) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { Cpu().Free(data_); }
  float* get() const { return data_; }

 private:
  float* data_;
};

void FillGaussian(float* data, std::size_t count) {
  std::mt19937 random(7);
  std::normal_distribution<float> gaussian;
  for (std::size_t i = 0; i < count; ++i) data[i] = gaussian(random);
}

// A result of the wrong size would make the time worthless.
bool IsOrthogonalEnough(const NewtonSchulzResult& result, std::int64_t min_side) {
  const double ratio = result.output_norm * result.output_norm / static_cast<double>(min_side);
  return !result.fallback && !result.failed && ratio > 0.5 && ratio < 1.5;
}

void BM_NewtonSchulz(benchmark::State& state) {
  const std::int64_t m = state.range(0);
  const std::int64_t n = state.range(1);
  const auto count = static_cast<std::size_t>(m * n);
  const Buffer u(count);
  const Buffer o(count);
  FillGaussian(u.get(), count);
  const NewtonSchulzRule rule{.steps = FindCoefficientSet("simple")->steps,
                              .method = static_cast<NewtonSchulzMethod>(state.range(2))};
  const MatrixJob job{.u = u.get(), .o = o.get(), .rows = m, .cols = n};
  NewtonSchulzResult result;
  for (auto _ : state) {
    if (Cpu().NewtonSchulz({&job, 1}, rule, {&result, 1})) state.SkipWithError("out of memory");
  }
  if (!IsOrthogonalEnough(result, m)) state.SkipWithError("wrong result");
  const double flops = 5.0 * (4.0 * n * m * m + 2.0 * m * m * m);
  state.counters["FLOP/s"] =
      benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
}

void NewtonSchulzShapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"m", "n", "method"})->Unit(benchmark::kMillisecond)->UseRealTime();
  for (const int method : {1, 2}) {
    for (const auto& [m, n] : {std::pair{256, 384}, {256, 1024}, {768, 1152}, {768, 3072}}) {
      benchmark->Args({m, n, method});
    }
  }
  benchmark->Args({768, 768, 0})->Args({2048, 2048, 0});
}
BENCHMARK(BM_NewtonSchulz)->Apply(NewtonSchulzShapes);

// One core, one call: times the core count, the ceiling of BM_NewtonSchulz.
void BM_Sgemm(benchmark::State& state) {
  const auto n = static_cast<int>(state.range(0));
  const auto count = static_cast<std::size_t>(n) * static_cast<std::size_t>(n);
  const Buffer a(count), c(count);
  FillGaussian(a.get(), count);
  benchmark::DoNotOptimize(&Cpu());
  for (auto _ : state) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1, a.get(), n, a.get(), n, 0,
                c.get(), n);
  }
  state.counters["FLOP/s"] =
      benchmark::Counter(2.0 * n * n * n, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Sgemm)->Arg(768)->Arg(2048)->Unit(benchmark::kMillisecond)->UseRealTime();

void SetBytes(benchmark::State& state, std::size_t bytes_per_element) {
  state.SetBytesProcessed(state.iterations() *
                          static_cast<std::int64_t>(kElements * bytes_per_element));
}

void BM_Memcpy(benchmark::State& state) {
  const Buffer from(kElements), to(kElements);
  for (auto _ : state) {
    if (state.range(0) == 1) {
      std::memcpy(to.get(), from.get(), kElements * sizeof(float));
    } else if (Cpu().Copy(to.get(), from.get(), kElements * sizeof(float))) {
      state.SkipWithError("copy");
    }
    benchmark::ClobberMemory();
  }
  SetBytes(state, 8);
}
BENCHMARK(BM_Memcpy)->ArgName("one_thread")->Arg(1)->Arg(0)->UseRealTime();

void BM_Scan(benchmark::State& state) {
  const auto dtype = static_cast<Dtype>(state.range(0));
  const Buffer gradient(kElements);
  GradientScan scan;
  for (auto _ : state) {
    if (Cpu().Scan({gradient.get(), dtype, kElements, 0.5f}, scan)) state.SkipWithError("scan");
  }
  SetBytes(state, DtypeBytes(dtype));
}
BENCHMARK(BM_Scan)->ArgName("dtype")->Arg(0)->Arg(1)->Arg(2)->UseRealTime();

void BM_Momentum(benchmark::State& state) {
  const auto dtype = static_cast<Dtype>(state.range(0));
  const Buffer gradient(kElements), m(kElements), u(kElements);
  StateScan scan;
  for (auto _ : state) {
    if (Cpu().Momentum({gradient.get(), dtype, kElements, 0.5f}, {}, m.get(), true, u.get(),
                       scan)) {
      state.SkipWithError("momentum");
    }
  }
  SetBytes(state, DtypeBytes(dtype) + 12);
}
BENCHMARK(BM_Momentum)->ArgName("dtype")->Arg(0)->Arg(1)->UseRealTime();

void BM_AdamW(benchmark::State& state) {
  const auto dtype = static_cast<Dtype>(state.range(0));
  const Buffer gradient(kElements), w(kElements), m(kElements), v(kElements);
  AdamWScan scan;
  for (auto _ : state) {
    if (Cpu().AdamW({gradient.get(), dtype, kElements, 0.5f}, {}, {w.get(), m.get(), v.get()},
                    scan)) {
      state.SkipWithError("adamw");
    }
  }
  SetBytes(state, DtypeBytes(dtype) + 24);
}
BENCHMARK(BM_AdamW)->ArgName("dtype")->Arg(0)->Arg(1)->UseRealTime();

void BM_Apply(benchmark::State& state) {
  const Buffer w(kElements), o(kElements);
  StateScan scan;
  for (auto _ : state) {
    if (Cpu().Apply(w.get(), o.get(), kElements, 0.99, 0.1, scan)) state.SkipWithError("apply");
  }
  SetBytes(state, 12);
}
BENCHMARK(BM_Apply)->UseRealTime();

void BM_Round(benchmark::State& state) {
  const auto dtype = static_cast<Dtype>(state.range(0));
  const Buffer w(kElements), out(kElements);
  for (auto _ : state) {
    if (Cpu().Round(out.get(), dtype, w.get(), kElements)) state.SkipWithError("round");
  }
  SetBytes(state, 4 + DtypeBytes(dtype));
}
BENCHMARK(BM_Round)->ArgName("dtype")->Arg(1)->Arg(2)->UseRealTime();

}  // namespace
}  // namespace muond::kernels

BENCHMARK_MAIN();
