// A whole optimizer step on the shapes of three models, as the engine makes it: scan of every
// gradient, momentum, Newton-Schulz, update of the matrices, AdamW of the rest, bf16 parameters.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "kernels/coefficients.h"
#include "kernels/cuda/benchmark/benchmark.h"

namespace muond::kernels::cuda {
namespace {

struct Matrix {
  std::int64_t rows, cols;
};

struct Model {
  const char* name;
  int layers;
  std::vector<Matrix> matrices;          // of each layer, under Muon
  std::vector<std::size_t> adamw;        // elements of the rest of the model
  std::vector<std::size_t> adamw_layer;  // and of each layer
};

std::vector<Model> Models() {
  return {
      {"llama1b",
       16,
       {{2048, 2048},
        {512, 2048},
        {512, 2048},
        {2048, 2048},
        {8192, 2048},
        {8192, 2048},
        {2048, 8192}},
       {128256 * 2048, 2048},
       {2048, 2048}},
      {"gpt2",
       12,
       {{2304, 768}, {768, 768}, {3072, 768}, {768, 3072}},
       {50304 * 768, 1024 * 768},
       {}},
      {"7b8",
       8,
       {{4096, 4096},
        {4096, 4096},
        {4096, 4096},
        {4096, 4096},
        {11008, 4096},
        {11008, 4096},
        {4096, 11008}},
       {32000 * 4096},
       {}},
  };
}

constexpr double kLr = 1e-3;
constexpr double kDecay = 0.1;

class Optimizer {
 public:
  Optimizer(Benchmark& benchmark, const Model& model, Dtype gradient_dtype)
      : backend_(benchmark.backend()),
        matrices_(MatricesOf(model)),
        sizes_(SizesOf(model, matrices_)),
        total_(TotalOf(sizes_)),
        muon_total_(MuonTotal()),
        g_(backend_, gradient_dtype, total_),
        w_(backend_, Dtype::kF32, total_),
        m_(backend_, Dtype::kF32, total_),
        v_(backend_, Dtype::kF32, total_ - muon_total_),
        u_(backend_, backend_.iterate_dtype(), muon_total_),
        o_(backend_, backend_.iterate_dtype(), muon_total_),
        parameters_(backend_, Dtype::kBF16, total_) {
    g_.FillGaussian(1e-3f, 1);
    Restart();
    MakeJobs();
  }

  void Restart() {
    w_.FillGaussian(0.02f, 2);
    m_.FillGaussian(1e-3f, 3);
    v_.FillGaussian(0, 0);
    states_.assign(matrices_.size(), {.max_abs = 0.01});
  }

  // One step; adds the seconds of each part to `parts`.
  void Step(Benchmark& benchmark, std::vector<double>& parts) {
    auto last = std::chrono::steady_clock::now();
    std::size_t part = 0;
    const auto lap = [&] {
      const auto now = std::chrono::steady_clock::now();
      parts[part++] += std::chrono::duration<double>(now - last).count();
      last = now;
    };
    Check(backend_.Scan(views_, scans_));
    double norm = 0;
    for (std::size_t i = 0; i < scans_.size(); ++i) {
      if (scans_[i].nonfinite > 0) benchmark.Fail("a finite gradient was found non-finite");
      for (const double sum : scans_[i].block_sums) norm += sum;
    }
    grad_norm_ = std::sqrt(norm);
    for (std::size_t i = 0; i < momentum_.size(); ++i) {
      const double scale =
          IterateScale(backend_.iterate_dtype(), scans_[i].max_abs + states_[i].max_abs);
      momentum_[i].u_scale = products_[i].u_scale = scale;
    }
    lap();
    Check(backend_.Momentum(momentum_, states_));
    lap();
    Check(backend_.NewtonSchulz(products_, rule_, results_));
    lap();
    for (const NewtonSchulzResult& result : results_) {
      if (result.fallback || result.failed) benchmark.Fail("newton-schulz fell back");
    }
    Check(backend_.Apply(apply_, weights_));
    lap();
    Check(backend_.AdamW(adamw_, adamw_scans_));
    lap();
  }

  double grad_norm() const { return grad_norm_; }
  // FNV-1a over the new parameters and weights of the whole model.
  std::uint64_t Digest() const {
    std::uint64_t hash = 0xcbf29ce484222325ull;
    for (const DeviceArray* array : {&w_, &parameters_}) {
      const std::vector<unsigned char> bytes = array->Read();
      for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
        std::uint64_t word;
        std::memcpy(&word, &bytes[i], 8);
        hash = (hash ^ word) * 0x100000001b3ull;
      }
    }
    return hash;
  }
  double muon_elements() const { return static_cast<double>(muon_total_); }
  double adamw_elements() const { return static_cast<double>(total_ - muon_total_); }

 private:
  static std::vector<Matrix> MatricesOf(const Model& model) {
    std::vector<Matrix> matrices;
    for (int layer = 0; layer < model.layers; ++layer) {
      matrices.insert(matrices.end(), model.matrices.begin(), model.matrices.end());
    }
    return matrices;
  }
  static std::vector<std::size_t> SizesOf(const Model& model, const std::vector<Matrix>& matrices) {
    std::vector<std::size_t> sizes;
    for (const Matrix& matrix : matrices) {
      sizes.push_back(static_cast<std::size_t>(matrix.rows * matrix.cols));
    }
    sizes.insert(sizes.end(), model.adamw.begin(), model.adamw.end());
    for (int layer = 0; layer < model.layers; ++layer) {
      sizes.insert(sizes.end(), model.adamw_layer.begin(), model.adamw_layer.end());
    }
    return sizes;
  }
  static std::size_t TotalOf(const std::vector<std::size_t>& sizes) {
    std::size_t total = 0;
    for (const std::size_t size : sizes) total += size;
    return total;
  }
  std::size_t MuonTotal() const {
    return TotalOf(
        {sizes_.begin(), sizes_.begin() + static_cast<std::ptrdiff_t>(matrices_.size())});
  }

  void MakeJobs() {
    std::size_t at = 0;
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      views_.push_back({g_.at(at), g_.dtype(), sizes_[i], 0.5f});
      const RoundedCopy parameter{parameters_.at(at), Dtype::kBF16};
      if (i < matrices_.size()) {
        const auto [rows, cols] = matrices_[i];
        const double factor =
            std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(cols)));
        momentum_.push_back({.gradient = views_[i], .m = m_.floats(at), .u = u_.at(at)});
        products_.push_back({u_.at(at), o_.at(at), rows, cols, 1});
        apply_.push_back(
            {w_.floats(at), o_.at(at), sizes_[i], 1 - kLr * kDecay, kLr * factor, parameter});
      } else {
        adamw_.push_back({.gradient = views_[i],
                          .rule = {.lr = kLr, .decay = 1 - kLr * kDecay, .t = 10},
                          .state = {w_.floats(at), m_.floats(at), v_.floats(at - muon_total_)},
                          .rounded = parameter});
      }
      at += sizes_[i];
    }
    scans_.resize(views_.size());
    weights_.resize(momentum_.size());
    results_.resize(momentum_.size());
    adamw_scans_.resize(adamw_.size());
  }

  Backend& backend_;
  std::vector<Matrix> matrices_;
  std::vector<std::size_t> sizes_;
  std::size_t total_, muon_total_;
  DeviceArray g_, w_, m_, v_, u_, o_, parameters_;
  NewtonSchulzRule rule_{.steps = FindCoefficientSet("simple")->steps};
  std::vector<GradientView> views_;
  std::vector<GradientScan> scans_;
  std::vector<MomentumJob> momentum_;
  std::vector<StateScan> states_, weights_;
  std::vector<MatrixJob> products_;
  std::vector<NewtonSchulzResult> results_;
  std::vector<ApplyJob> apply_;
  std::vector<AdamWJob> adamw_;
  std::vector<AdamWScan> adamw_scans_;
  double grad_norm_ = 0;
};

void MeasureModel(Benchmark& benchmark, const Model& model, Dtype dtype, bool digest) {
  Optimizer optimizer(benchmark, model, dtype);
  const std::string name = std::string(model.name) + " " + std::string(DtypeName(dtype));
  std::vector<double> parts(5);
  std::uint64_t digests[2] = {};
  for (std::uint64_t& found : digests) {
    optimizer.Restart();
    for (int i = 0; i < 3; ++i) optimizer.Step(benchmark, parts);
    if (digest) found = optimizer.Digest();
  }
  if (digests[0] != digests[1]) benchmark.Fail(name + ": two runs gave different bits");
  constexpr int kSteps = 10;
  std::fill(parts.begin(), parts.end(), 0.0);
  std::vector<double> seconds;
  for (int i = 0; i < kSteps; ++i) {
    std::vector<double> step(parts.size());
    optimizer.Step(benchmark, step);
    double total = 0;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      parts[p] += step[p] / kSteps;
      total += step[p];
    }
    seconds.push_back(total);
  }
  std::nth_element(seconds.begin(), seconds.begin() + kSteps / 2, seconds.end());
  const double g = static_cast<double>(DtypeBytes(dtype));
  const double muon = optimizer.muon_elements(), adamw = optimizer.adamw_elements();
  const double bytes = muon * (2 * g + 10 + 12) + adamw * (2 * g + 26);
  std::printf("%-13s %8.2f %8.2f %8.2f %8.2f %8.2f %8.2f %9.2f %s\n", name.c_str(),
              seconds[kSteps / 2] * 1e3, parts[0] * 1e3, parts[1] * 1e3, parts[2] * 1e3,
              parts[3] * 1e3, parts[4] * 1e3, bytes / benchmark.ceilings().copy * 1e3,
              digest ? (digests[0] == digests[1] ? "same bits twice" : "DIFFERENT BITS") : "");
  benchmark.Record("step " + name + " ms", seconds[kSteps / 2] * 1e3);
}

}  // namespace

void MeasureSteps(Benchmark& benchmark) {
  std::printf("\n== a whole step, ms\n%-13s %8s %8s %8s %8s %8s %8s %9s\n", "model", "step", "scan",
              "momentum", "newton-s", "apply", "adamw", "traffic");
  for (const Model& model : Models()) {
    for (const Dtype dtype : {Dtype::kBF16, Dtype::kF32}) {
      MeasureModel(benchmark, model, dtype, dtype == Dtype::kBF16);
    }
  }
  std::printf(
      "traffic: the least time that the passes beside newton-schulz need at the copy rate\n");
}

}  // namespace muond::kernels::cuda
