// How fast the cpu backend is beside what the machine can do, measured in the same run.
//
// Ceilings, with all threads at work: memcpy of one large piece per thread, and one large product
// per thread by each library. Everything is measured once per round, ceilings included, and each
// rate is divided by its ceiling of the same round; the table shows medians over the rounds. So a
// machine that slows down while others use it changes the times but hardly the shares.
//
// GB/s counts the bytes that a pass must read and write. A Newton-Schulz bound is the time that its
// products, symmetric ones at half their cost, would take at the ceiling's rate.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/backend.h"
#include "kernels/benchmark_table.h"
#include "kernels/coefficients.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/newton_schulz.h"

namespace muond::kernels {
namespace {

constexpr const char* kUsage =
    "usage: muond_kernels_benchmark [--threads N] [--rounds N] [--elements N] [--only TEXT]\n"
    "                               [--clock wall|processor] [--json FILE]\n"
    "  --threads   0: one per core (default)\n"
    "  --rounds    of measurements, at least 1 (default 7)\n"
    "  --elements  of each tensor of the passes (default 33554432, beyond most caches)\n"
    "  --only      the rows whose name contains TEXT, and the ceilings\n"
    "  --clock     wall (default), or processor: the time that the threads got, for a machine\n"
    "              that is busy with other work\n"
    "  --json      also write the results there; - is standard output\n";

struct Arguments {
  int threads = 0;
  int rounds = 7;
  std::size_t elements = std::size_t{1} << 25;
  Clock clock = Clock::kWall;
  std::string only;
  std::string json;
};

void Require(const Error& error) {
  if (error) throw std::runtime_error(error.message());
}

// body(thread) on `threads` threads at once.
void OnEveryThread(int threads, const std::function<void(std::size_t)>& body) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(body, static_cast<std::size_t>(i));
  body(0);
  for (std::thread& other : others) other.join();
}

void FillGaussian(float* data, std::size_t count) {
  std::mt19937 random(7);
  std::normal_distribution<float> gaussian;
  for (std::size_t i = 0; i < count; ++i) data[i] = gaussian(random);
}

class Benchmark {
 public:
  explicit Benchmark(const Arguments& arguments)
      : arguments_(arguments),
        threads_(arguments.threads > 0
                     ? arguments.threads
                     : std::max(1, static_cast<int>(std::thread::hardware_concurrency()))),
        cpu_(Make(Products::kAuto)),
        table_(arguments.clock, threads_) {
    AddCeilings();
    AddPasses();
    AddSmallTensors();
    for (const auto& [m, n] : {std::pair<std::int64_t, std::int64_t>{256, 256},
                               {768, 768},
                               {768, 2304},
                               {768, 3072},
                               {3072, 768},
                               {2048, 2048}}) {
      AddNewtonSchulz(Products::kF32, m, n);
      if (cpu::HasBF16Products()) AddNewtonSchulz(Products::kBF16, m, n);
    }
  }

  void Run() {
    table_.Run(arguments_.rounds, arguments_.only);
    const std::string title =
        cpu_->description() + ", " + std::to_string(arguments_.rounds) + " rounds";
    if (arguments_.json != "-") table_.Print(title);
    if (!arguments_.json.empty() && !table_.WriteJson(title, arguments_.json)) {
      Require(Error(arguments_.json + ": cannot be written"));
    }
  }

 private:
  std::unique_ptr<Backend> Make(Products products) const {
    return MakeCpuBackend({.threads = threads_, .products = products});
  }

  // `count` floats of one backend, zeroed, until the end.
  float* Floats(std::size_t count) {
    auto* data = static_cast<float*>(cpu_->Allocate(count * sizeof(float)));
    if (data == nullptr) Require(Error("no memory left"));
    return data;
  }

  void AddCeilings() {
    const std::size_t elements = arguments_.elements;
    a_ = Floats(elements);
    b_ = Floats(elements);
    c_ = Floats(elements);
    d_ = Floats(elements);
    e_ = Floats(elements / 2 + 1);
    auto* halves = reinterpret_cast<std::uint16_t*>(Floats(elements / 2 + 1));
    FillGaussian(a_, elements);
    Require(cpu_->Round(halves, Dtype::kBF16, a_, elements));
    gradients_[Dtype::kF32] = a_;
    gradients_[Dtype::kBF16] = halves;
    const auto threads = static_cast<std::size_t>(threads_);
    const std::size_t piece = elements / threads;
    table_.Add("memcpy", "GB/s", 8.0 * static_cast<double>(piece * threads), "", [=, this] {
      OnEveryThread(threads_, [=, this](std::size_t i) {
        std::memcpy(b_ + i * piece, a_ + i * piece, piece * sizeof(float));
      });
    });
    constexpr std::int64_t kSide = 1024;
    const auto square = static_cast<std::size_t>(kSide * kSide);
    const double work = 2.0 * kSide * kSide * kSide * threads_;
    float* left = Floats(square);
    float* result = Floats(square * threads);
    FillGaussian(left, square);
    for (const cpu::F32Gemm* gemm : {&cpu::FastestF32Gemm(), &cpu::OpenBlasGemm()}) {
      if (gemm == &cpu::OpenBlasGemm() && gemm == &cpu::FastestF32Gemm()) continue;
      const bool fastest = gemm == &cpu::FastestF32Gemm();
      table_.Add(fastest ? "fp32 product" : "fp32 product by OpenBLAS", "GFLOP/s", work, "",
                 [=, this] {
                   OnEveryThread(threads_, [=](std::size_t i) {
                     gemm->run({.m = kSide,
                                .n = kSide,
                                .k = kSide,
                                .a = left,
                                .a_stride = kSide,
                                .b = left,
                                .b_stride = kSide,
                                .c = result + i * square,
                                .c_stride = kSide});
                   });
                 });
    }
    if (!cpu::HasBF16Products()) return;
    auto* rounded = reinterpret_cast<std::uint16_t*>(Floats(square));
    Require(cpu_->Round(rounded, Dtype::kBF16, left, square));
    table_.Add("bf16 product", "GFLOP/s", work, "", [=, this] {
      OnEveryThread(threads_, [=](std::size_t i) {
        const auto& gemm = cpu::BF16Gemm::For({.b_transposed = true,
                                               .m = kSide,
                                               .n = kSide,
                                               .k = kSide,
                                               .a_stride = kSide,
                                               .b_stride = kSide});
        gemm.Run(rounded, rounded, result + i * square);
      });
    });
  }

  void AddPass(std::string name, std::size_t bytes_per_element, std::function<void()> run) {
    table_.Add(std::move(name), "GB/s",
               static_cast<double>(bytes_per_element) * static_cast<double>(arguments_.elements),
               "memcpy", std::move(run));
  }

  void AddPasses() {
    const std::size_t elements = arguments_.elements;
    AddPass("copy", 8, [=, this] {
      const CopyJob job{b_, a_, elements * sizeof(float)};
      Require(cpu_->Copy({&job, 1}));
    });
    AddPass("scan of state", 4, [=, this] {
      const StateView view{a_, elements};
      StateScan scan;
      Require(cpu_->ScanState({&view, 1}, {&scan, 1}));
    });
    AddPass("round to bf16", 6,
            [=, this] { Require(cpu_->Round(e_, Dtype::kBF16, a_, elements)); });
    AddPass("apply", 12, [=, this] { RunApply({}); });
    AddPass("apply, bf16 copy", 14, [=, this] { RunApply({e_, Dtype::kBF16}); });
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBF16}) {
      const std::string of = ", " + std::string(DtypeName(dtype)) + " gradient";
      const std::size_t bytes = DtypeBytes(dtype);
      AddPass("accumulate" + of, bytes + 8, [=, this] {
        Require(cpu_->Accumulate(b_, gradients_[dtype], dtype, elements, false));
      });
      AddPass("scan" + of, bytes, [=, this] {
        const GradientView view{gradients_[dtype], dtype, elements, 0.5f};
        Require(cpu_->Scan({&view, 1}, {&scan_, 1}));
      });
      AddPass("momentum" + of, bytes + 12, [=, this] {
        const MomentumJob job{
            .gradient = {gradients_[dtype], dtype, elements, 0.5f}, .m = b_, .u = c_};
        StateScan scan;
        Require(cpu_->Momentum({&job, 1}, {&scan, 1}));
      });
      AddPass("adamw" + of, bytes + 24, [=, this] { RunAdamW(dtype, {}); });
    }
    AddPass("adamw, bf16 gradient and copy", 28, [=, this] {
      RunAdamW(Dtype::kBF16, {e_, Dtype::kBF16});
    });
  }

  // What a tensor costs beside its bytes.
  void AddSmallTensors() {
    constexpr std::size_t kTensors = 100000, kElements = 64;
    float* memory = Floats(4 * kTensors * kElements);
    std::vector<AdamWJob> jobs(kTensors);
    for (std::size_t i = 0; i < kTensors; ++i) {
      float* data = memory + 4 * i * kElements;
      jobs[i].gradient = {data, Dtype::kF32, kElements, 1};
      jobs[i].state = {data + kElements, data + 2 * kElements, data + 3 * kElements};
    }
    table_.Add("adamw, 100000 tensors of 64", "Mtensor/s", 1e3 * kTensors, "",
               [this, jobs, scans = std::vector<AdamWScan>(kTensors)]() mutable {
                 Require(cpu_->AdamW(jobs, scans));
               });
  }

  void RunApply(const RoundedCopy& rounded) {
    const ApplyJob job{.w = b_,
                       .o = a_,
                       .elements = arguments_.elements,
                       .decay = 0.99,
                       .step = 0.1,
                       .rounded = rounded};
    StateScan scan;
    Require(cpu_->Apply({&job, 1}, {&scan, 1}));
  }

  void RunAdamW(Dtype dtype, const RoundedCopy& rounded) {
    const AdamWJob job{.gradient = {gradients_[dtype], dtype, arguments_.elements, 0.5f},
                       .rule = {},
                       .state = {.w = b_, .exp_avg = c_, .exp_avg_sq = d_},
                       .rounded = rounded};
    AdamWScan scan;
    Require(cpu_->AdamW({&job, 1}, {&scan, 1}));
  }

  // As many matrices as threads, so that each thread has one.
  void AddNewtonSchulz(Products products, std::int64_t rows, std::int64_t cols) {
    const std::int64_t m = std::min(rows, cols), n = std::max(rows, cols);
    const auto elements = static_cast<std::size_t>(rows * cols);
    const NewtonSchulzRule rule{.steps = FindCoefficientSet("simple")->steps};
    const cpu::Plan plan = cpu::ChoosePlan(rule, m, n, products);
    const bool bf16 = products == Products::kBF16;
    Backend* backend = (bf16 ? bf16_ : fp32_).get();
    if (backend == nullptr) {
      (bf16 ? bf16_ : fp32_) = Make(products);
      backend = (bf16 ? bf16_ : fp32_).get();
    }
    std::vector<MatrixJob> jobs;
    for (int i = 0; i < threads_; ++i) {
      float* u = Floats(elements);
      FillGaussian(u, elements);
      jobs.push_back({.u = u, .o = Floats(elements), .rows = rows, .cols = cols});
    }
    // Groups of steps that share one product with X: 2 1 2 in bf16, 2 3 in fp32.
    const double groups = !plan.gram ? 5 : plan.bf16 ? 3 : 2;
    const double ratio = static_cast<double>(n) / static_cast<double>(m);
    const double cubes = 3 * groups * ratio + 5 + 3 * (5 - groups);
    const double work = cubes * static_cast<double>(m * m * m) * threads_;
    const std::string name = "newton-schulz " + std::to_string(rows) + " x " +
                             std::to_string(cols) + (plan.bf16 ? ", bf16" : ", fp32") +
                             (plan.gram ? (plan.bf16 ? " paired" : " gram") : "");
    table_.Add(name, "GFLOP/s", work, plan.bf16 ? "bf16 product" : "fp32 product",
               [=, results = std::vector<NewtonSchulzResult>(jobs.size())]() mutable {
                 Require(backend->NewtonSchulz(jobs, rule, results));
                 for (const NewtonSchulzResult& result : results) {
                   const double ratio =
                       result.output_norm * result.output_norm / static_cast<double>(m);
                   if (result.fallback || result.failed || ratio < 0.5 || ratio > 1.5) {
                     Require(Error("newton-schulz: wrong result, its time is worthless"));
                   }
                 }
               });
  }

  const Arguments arguments_;
  const int threads_;
  const std::unique_ptr<Backend> cpu_;
  std::unique_ptr<Backend> fp32_, bf16_;
  BenchmarkTable table_;
  GradientScan scan_;
  float *a_ = nullptr, *b_ = nullptr, *c_ = nullptr, *d_ = nullptr, *e_ = nullptr;
  std::map<Dtype, const void*> gradients_;
};

// False where they are not understood.
bool Parse(int argc, char** argv, Arguments& arguments) {
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) return false;
    const std::string flag = argv[i], value = argv[i + 1];
    const long long number = std::atoll(value.c_str());
    if (flag == "--threads" && number >= 0) {
      arguments.threads = static_cast<int>(number);
    } else if (flag == "--rounds" && number > 0) {
      arguments.rounds = static_cast<int>(number);
    } else if (flag == "--elements" && number > 0) {
      arguments.elements = static_cast<std::size_t>(number);
    } else if (flag == "--only") {
      arguments.only = value;
    } else if (flag == "--clock" && (value == "wall" || value == "processor")) {
      arguments.clock = value == "wall" ? Clock::kWall : Clock::kProcessor;
    } else if (flag == "--json") {
      arguments.json = value;
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace muond::kernels

int main(int argc, char** argv) {
  muond::kernels::Arguments arguments;
  if (!muond::kernels::Parse(argc, argv, arguments)) {
    std::fputs(muond::kernels::kUsage, stderr);
    return 2;
  }
  try {
    muond::kernels::Benchmark(arguments).Run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "muond_kernels_benchmark: %s\n", error.what());
    return 1;
  }
  return 0;
}
