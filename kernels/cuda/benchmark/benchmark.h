// What the parts of muond_cuda_benchmark share: the device under test, timing, results by name.
//
// Every part prints a table of its own and records its figures, so that a script can put them
// beside a peer's from the same run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace muond::kernels::cuda {

// Rates that nothing on this device exceeds, measured in this run.
struct Ceilings {
  double copy = 0;     // bytes read and written per second, cudaMemcpy on the device
  double read = 0;     // bytes read per second
  double product = 0;  // bf16 FLOP/s at 8192^3, cuBLAS
};

class Benchmark {
 public:
  explicit Benchmark(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}

  Backend& backend() const { return *backend_; }
  Ceilings& ceilings() { return ceilings_; }

  // Seconds that `call` takes, the median of `repeats` after one for warming up. `call` waits for
  // its own results.
  double Seconds(int repeats, const std::function<void()>& call) const;
  void Record(const std::string& name, double value) { figures_[name] = value; }
  // The figures as a JSON object; false where the file cannot be written.
  bool WriteFigures(const std::string& path) const;
  // Remembers that something was wrong: the program's exit status.
  void Fail(const std::string& what);
  bool failed() const { return failed_; }

 private:
  std::unique_ptr<Backend> backend_;
  Ceilings ceilings_;
  std::map<std::string, double> figures_;
  bool failed_ = false;
};

// Device memory for the time of a measurement. Ends the program when there is none left.
class DeviceArray {
 public:
  DeviceArray(Backend& backend, Dtype dtype, std::size_t elements);
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { backend_.Free(data_); }

  void FillGaussian(float sigma, std::uint64_t seed);
  void* at(std::size_t element) const {
    return static_cast<char*>(data_) + element * DtypeBytes(dtype_);
  }
  float* floats(std::size_t element = 0) const { return static_cast<float*>(at(element)); }
  Dtype dtype() const { return dtype_; }
  std::size_t elements() const { return elements_; }
  std::vector<unsigned char> Read() const;

 private:
  Backend& backend_;
  Dtype dtype_;
  std::size_t elements_;
  void* data_;
};

// Ends the program with the error's message, if there is one.
void Check(const Error& error);

void MeasureCeilings(Benchmark& benchmark);
// Elementwise results against the reference, bit for bit, on ordinary and extreme values.
void CheckElementwise(Benchmark& benchmark);
void MeasureElementwise(Benchmark& benchmark);
// Newton-Schulz on the shapes of docs/performance.md; `method` as in NewtonSchulzRule.
void MeasureNewtonSchulz(Benchmark& benchmark);
// A whole optimizer step on the shapes of three models, twice from the same start.
void MeasureSteps(Benchmark& benchmark);

}  // namespace muond::kernels::cuda
