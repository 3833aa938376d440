// muond_cuda_benchmark: how fast the cuda backend is beside what the device can do, and whether its
// results are right, in one run.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "kernels/cuda/benchmark/benchmark.h"
#include "kernels/cuda/benchmark/device_data.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/devices.h"

namespace muond::kernels::cuda {

double Benchmark::Seconds(int repeats, const std::function<void()>& call) const {
  std::vector<double> seconds;
  for (int i = 0; i <= repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    if (i > 0) seconds.push_back(spent.count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[static_cast<std::size_t>(repeats / 2)];
}

bool Benchmark::WriteFigures(const std::string& path) const {
  std::ofstream out(path);
  const char* separator = "{";
  for (const auto& [name, value] : figures_) {
    out << separator << "\n  \"" << name << "\": " << value;
    separator = ",";
  }
  out << "\n}\n";
  return out.good();
}

void Benchmark::Fail(const std::string& what) {
  std::printf("FAIL: %s\n", what.c_str());
  failed_ = true;
}

void Check(const Error& error) {
  if (!error) return;
  std::fprintf(stderr, "muond_cuda_benchmark: %s\n", error.message().c_str());
  std::exit(1);
}

DeviceArray::DeviceArray(Backend& backend, Dtype dtype, std::size_t elements)
    : backend_(backend),
      dtype_(dtype),
      elements_(elements),
      data_(backend.Allocate(elements * DtypeBytes(dtype))) {
  if (data_ == nullptr) Check(Error("no device memory left for the measurement"));
}

void DeviceArray::FillGaussian(float sigma, std::uint64_t seed) {
  const cudaError_t error = cuda::FillGaussian(data_, dtype_, elements_, sigma, seed);
  if (error != cudaSuccess) Check(Error(cudaGetErrorString(error)));
}

std::vector<unsigned char> DeviceArray::Read() const {
  std::vector<unsigned char> bytes(elements_ * DtypeBytes(dtype_));
  Check(backend_.Download(bytes.data(), data_, bytes.size()));
  return bytes;
}

namespace {

struct Part {
  const char* name;
  void (*measure)(Benchmark&);
};
constexpr Part kParts[] = {
    {"ceilings", MeasureCeilings},
    {"check", CheckElementwise},
    {"elementwise", MeasureElementwise},
    {"newton-schulz", MeasureNewtonSchulz},
    {"steps", MeasureSteps},
};

int Main(int argc, char** argv) {
  std::string figures;
  std::vector<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--figures") == 0 && i + 1 < argc) {
      figures = argv[++i];
      continue;
    }
    const auto known = [&](const Part& part) { return part.name == std::string(argv[i]); };
    if (std::none_of(std::begin(kParts), std::end(kParts), known)) {
      std::fprintf(stderr, "usage: muond_cuda_benchmark [--figures FILE.json] [PART ...]\nparts:");
      for (const Part& part : kParts) std::fprintf(stderr, " %s", part.name);
      std::fprintf(stderr, "; all when none is named\n");
      return 2;
    }
    wanted.push_back(argv[i]);
  }
  Error error;
  std::unique_ptr<Backend> backend = MakeCudaBackend(0, {}, error);
  Check(error);
  std::printf("%s\n", backend->description().c_str());
  Benchmark benchmark(std::move(backend));
  const auto named = [&](const char* name) {
    return std::find(wanted.begin(), wanted.end(), name) != wanted.end();
  };
  // Measurements stand beside their ceilings; correctness alone does not need them.
  const bool only_check = wanted.size() == 1 && named("check");
  for (const Part& part : kParts) {
    const bool ceilings = part.measure == MeasureCeilings && !only_check;
    if (!wanted.empty() && !named(part.name) && !ceilings) continue;
    part.measure(benchmark);
    std::fflush(stdout);
  }
  if (!figures.empty() && !benchmark.WriteFigures(figures)) {
    benchmark.Fail("cannot write " + figures);
  }
  return benchmark.failed() ? 1 : 0;
}

}  // namespace
}  // namespace muond::kernels::cuda

int main(int argc, char** argv) { return muond::kernels::cuda::Main(argc, argv); }
