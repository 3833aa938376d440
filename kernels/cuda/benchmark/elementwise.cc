// The elementwise passes on a billion elements: time, rate, share of the copy or read rate.
#include <cstdio>
#include <string>

#include "kernels/cuda/benchmark/benchmark.h"

namespace muond::kernels::cuda {
namespace {

constexpr std::size_t kTensors = 64;
constexpr std::size_t kPerTensor = std::size_t{1} << 24;
constexpr std::size_t kElements = kTensors * kPerTensor;

class Table {
 public:
  explicit Table(Benchmark& benchmark) : benchmark_(benchmark) {
    std::printf("\n== elementwise, %zu tensors of %zu elements\n%-44s %9s %9s %7s %s\n", kTensors,
                kPerTensor, "pass", "ms", "GB/s", "share", "of");
  }

  template <typename Call>
  void Row(const std::string& name, double bytes_per_element, bool read_only,
           const Call& call) const {
    const double seconds = benchmark_.Seconds(10, call);
    const double rate = bytes_per_element * kElements / seconds;
    const double ceiling = read_only ? benchmark_.ceilings().read : benchmark_.ceilings().copy;
    std::printf("%-44s %9.3f %9.0f %6.1f%% %s\n", name.c_str(), seconds * 1e3, rate * 1e-9,
                100 * rate / ceiling, read_only ? "read" : "copy");
    benchmark_.Record("elementwise " + name + " ms", seconds * 1e3);
    benchmark_.Record("elementwise " + name + " share", rate / ceiling);
  }

 private:
  Benchmark& benchmark_;
};

std::string Name(const char* pass, Dtype dtype, const std::string& more = "") {
  return std::string(pass) + " " + std::string(DtypeName(dtype)) + more;
}

// What the passes work on.
struct Tensors {
  explicit Tensors(Backend& backend)
      : w(backend, Dtype::kF32, kElements),
        m(backend, Dtype::kF32, kElements),
        v(backend, Dtype::kF32, kElements),
        u(backend, backend.iterate_dtype(), kElements),
        copy(backend, Dtype::kBF16, kElements) {
    w.FillGaussian(0.02f, 1);
    m.FillGaussian(1e-3f, 2);
    u.FillGaussian(1, 3);
  }

  DeviceArray w, m, v, u, copy;
};

void MeasureWithGradient(Backend& backend, Tensors& tensors, Dtype dtype, const Table& table) {
  auto& [w, m, v, u, copy] = tensors;
  DeviceArray g(backend, dtype, kElements);
  g.FillGaussian(1e-3f, 4);
  v.FillGaussian(0, 0);
  const double g_bytes = static_cast<double>(DtypeBytes(dtype));
  std::vector<GradientView> views;
  std::vector<MomentumJob> momentum;
  std::vector<AdamWJob> adamw, adamw_plain;
  for (std::size_t i = 0; i < kTensors; ++i) {
    const std::size_t at = i * kPerTensor;
    views.push_back({g.at(at), dtype, kPerTensor, 0.5f});
    momentum.push_back({.gradient = views[i],
                        .m = m.floats(at),
                        .u = u.at(at),
                        .u_scale = IterateScale(backend.iterate_dtype(), 1)});
    adamw.push_back({.gradient = views[i],
                     .rule = {.lr = 1e-5, .decay = 0.9999, .t = 10},
                     .state = {w.floats(at), m.floats(at), v.floats(at)},
                     .rounded = {copy.at(at), Dtype::kBF16}});
    adamw_plain.push_back(adamw.back());
    adamw_plain.back().rounded = {};
  }
  std::vector<GradientScan> scans(kTensors);
  std::vector<StateScan> states(kTensors);
  std::vector<AdamWScan> adamw_scans(kTensors);
  const std::string to_u = " -> M, U " + std::string(DtypeName(backend.iterate_dtype()));
  table.Row(Name("scan", dtype), g_bytes, true, [&] { Check(backend.Scan(views, scans)); });
  table.Row(Name("momentum", dtype, to_u), g_bytes + 10, false,
            [&] { Check(backend.Momentum(momentum, states)); });
  table.Row(Name("adamw", dtype, " -> w, m, v, bf16 copy"), g_bytes + 26, false,
            [&] { Check(backend.AdamW(adamw, adamw_scans)); });
  table.Row(Name("adamw", dtype, " -> w, m, v"), g_bytes + 24, false,
            [&] { Check(backend.AdamW(adamw_plain, adamw_scans)); });
  table.Row(Name("accumulate", dtype), g_bytes + 8, false, [&] {
    Check(backend.Accumulate(tensors.v.floats(), g.at(0), dtype, kElements, false));
  });
}

void MeasureOthers(Backend& backend, const Tensors& tensors, const Table& table) {
  const auto& [w, m, v, u, copy] = tensors;
  const std::string iterate(DtypeName(backend.iterate_dtype()));
  std::vector<ApplyJob> apply;
  std::vector<StateView> views;
  std::vector<CopyJob> copies;
  for (std::size_t i = 0; i < kTensors; ++i) {
    const std::size_t at = i * kPerTensor;
    apply.push_back({.w = w.floats(at),
                     .o = u.at(at),
                     .elements = kPerTensor,
                     .decay = 0.9999,
                     .step = 1e-6,
                     .rounded = {copy.at(at), Dtype::kBF16}});
    views.push_back({w.floats(at), kPerTensor});
    copies.push_back({m.at(at), w.at(at), kPerTensor * 4});
  }
  std::vector<StateScan> states(kTensors);
  table.Row("apply " + iterate + " -> w, bf16 copy", 12, false,
            [&] { Check(backend.Apply(apply, states)); });
  table.Row("scan state f32", 4, true, [&] { Check(backend.ScanState(views, states)); });
  table.Row("copy", 8, false, [&] { Check(backend.Copy(copies)); });
}

// What a call costs where there is next to nothing to do.
void MeasureCalls(Benchmark& benchmark, const Tensors& tensors) {
  const auto& [w, m, v, u, copy] = tensors;
  for (const std::size_t jobs : {1, 100}) {
    std::vector<AdamWJob> small;
    for (std::size_t i = 0; i < jobs; ++i) {
      const std::size_t at = 1024 * i;
      small.push_back({.gradient = {u.at(at), Dtype::kBF16, 1000, 1},
                       .rule = {},
                       .state = {w.floats(at), m.floats(at), v.floats(at)}});
    }
    std::vector<AdamWScan> scans(jobs);
    const double seconds =
        benchmark.Seconds(50, [&] { Check(benchmark.backend().AdamW(small, scans)); });
    std::printf("adamw of %3zu tensors of 1000 elements: %.1f us a call\n", jobs, seconds * 1e6);
    benchmark.Record("elementwise call of " + std::to_string(jobs) + " us", seconds * 1e6);
  }
}

}  // namespace

void MeasureElementwise(Benchmark& benchmark) {
  Backend& backend = benchmark.backend();
  const Table table(benchmark);
  Tensors tensors(backend);
  for (const Dtype dtype : {Dtype::kBF16, Dtype::kF32}) {
    MeasureWithGradient(backend, tensors, dtype, table);
  }
  MeasureOthers(backend, tensors, table);
  tensors.v.FillGaussian(0, 0);
  MeasureCalls(benchmark, tensors);
}

}  // namespace muond::kernels::cuda
