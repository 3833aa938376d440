// Newton-Schulz alone, five steps, on single matrices and on batches.
#include <cmath>
#include <cstdio>
#include <string>

#include "kernels/coefficients.h"
#include "kernels/cuda/benchmark/benchmark.h"

namespace muond::kernels::cuda {
namespace {

struct Shape {
  int count;
  std::int64_t rows, cols;
  double target_ms;
};
// Those of docs/performance.md, with what is wanted of each.
constexpr Shape kShapes[] = {
    {1, 1024, 1024, .10},  {1, 2048, 2048, .33},  {1, 4096, 4096, 2.0},  {1, 8192, 8192, 16},
    {1, 1024, 4096, .16},  {1, 2048, 8192, .65},  {1, 4096, 11008, 3.2}, {1, 4096, 16384, 4.1},
    {16, 2048, 2048, 4.2}, {64, 1024, 1024, 2.4}, {128, 768, 3072, 4.2}, {64, 1408, 2048, 6.5},
    {24, 2048, 7168, 12},
};

void Measure(Benchmark& benchmark, const Shape& shape) {
  Backend& backend = benchmark.backend();
  const auto elements = static_cast<std::size_t>(shape.rows * shape.cols);
  const auto count = static_cast<std::size_t>(shape.count);
  DeviceArray u(backend, backend.iterate_dtype(), count * elements);
  const DeviceArray o(backend, backend.iterate_dtype(), count * elements);
  u.FillGaussian(1000, 1);
  std::vector<MatrixJob> jobs;
  for (std::size_t i = 0; i < count; ++i) {
    jobs.push_back({u.at(i * elements), o.at(i * elements), shape.rows, shape.cols, 1});
  }
  const NewtonSchulzRule rule{.steps = FindCoefficientSet("simple")->steps};
  std::vector<NewtonSchulzResult> results(count);
  const double seconds =
      benchmark.Seconds(10, [&] { Check(backend.NewtonSchulz(jobs, rule, results)); });
  const double m = static_cast<double>(std::min(shape.rows, shape.cols));
  const double n = static_cast<double>(std::max(shape.rows, shape.cols));
  const std::string name = std::to_string(shape.count) + " x " + std::to_string(shape.rows) +
                           " x " + std::to_string(shape.cols);
  for (const NewtonSchulzResult& result : results) {
    const double ratio = result.output_norm * result.output_norm / m;
    if (result.fallback || result.failed || !(ratio > 0.5 && ratio < 1.5)) {
      benchmark.Fail("newton-schulz " + name + ": implausible result");
      break;
    }
  }
  // The standard form's products at full cost, whatever the form did, so that forms compare.
  const double flops = count * 5 * (4 * n * m * m + 2 * m * m * m);
  const double bound = flops / benchmark.ceilings().product;
  std::printf("%-22s %9.3f %9.3f %9.3f %10.0f %9.2f %s\n", name.c_str(), seconds * 1e3,
              shape.target_ms, bound * 1e3, flops / seconds * 1e-12, seconds / bound,
              seconds * 1e3 <= shape.target_ms ? "" : "above target");
  benchmark.Record("newton-schulz " + name + " ms", seconds * 1e3);
}

}  // namespace

void MeasureNewtonSchulz(Benchmark& benchmark) {
  std::printf("\n== newton-schulz, 5 steps of `simple`, method auto\n%-22s %9s %9s %9s %10s %9s\n",
              "shape", "ms", "target", "std bound", "TFLOP/s", "of bound");
  for (const Shape& shape : kShapes) Measure(benchmark, shape);
}

}  // namespace muond::kernels::cuda
