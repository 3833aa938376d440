// What the kernel suites share: the list of backends, memory of theirs, single calls of batched
// methods, and one parameter that is stepped the way an engine would do it.
//
// Nothing here or in the suites reads or writes a backend's memory but through the backend, so they
// run on devices as well. A new backend is one more entry in BackendCases(), nothing else.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace muond::kernels::testing {

// Printed as its name in test output.
struct BackendCase {
  friend void PrintTo(const BackendCase& backend, std::ostream* out) { *out << backend.name; }

  const char* name;
  // Null where this machine lacks what the backend needs.
  std::unique_ptr<Backend> (*make)(const BackendOptions& options);
  double tolerance;  // of an O on well-conditioned input, against fp64, elementwise
  // What no result of Newton-Schulz can be held below: 0 with fp32 products, 2e-2 with 16-bit ones
  // (docs/semantics.md).
  double floor = 0;
  bool has_fallback = true;  // a fast path that can fail and be redone
};

// Of this program: the host's backends, or the device's.
std::vector<BackendCase> BackendCases();
// Those with a fast path.
std::vector<BackendCase> FallbackCases();
std::string CaseName(const ::testing::TestParamInfo<BackendCase>& info);

// Makes the backend. Without one the running test is skipped with the reason, or, where
// MUOND_REQUIRE_GPU=1 says that there must be a device, failed: the caller returns on null.
std::unique_ptr<Backend> MakeOrSkip(const BackendCase& backend, const BackendOptions& options = {});

// A suite of tests that run on every backend.
class BackendTest : public ::testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override { backend_ = MakeOrSkip(GetParam()); }
  double tolerance() const { return GetParam().tolerance; }
  // A tolerance of fp32 products, or what this backend can be held to.
  double Within(double fp32) const { return std::max(fp32, GetParam().floor); }

  std::unique_ptr<Backend> backend_;
};

#define MUOND_FOR_EVERY_BACKEND(suite) \
  INSTANTIATE_TEST_SUITE_P(Backends, suite, ::testing::ValuesIn(BackendCases()), CaseName)

// Bytes in a backend's memory, `shift` bytes off its alignment.
class Bytes {
 public:
  Bytes(Backend& backend, const void* host, std::size_t bytes, std::size_t shift = 0);
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { backend_.Free(memory_); }

  void* get() const { return memory_ + shift_; }
  void Read(void* host) const;

 private:
  Backend& backend_;
  std::size_t bytes_, shift_;
  unsigned char* memory_;
};

// Bytes as they come in: in a backend's staging memory.
class Staged {
 public:
  Staged(Backend& backend, const void* host, std::size_t bytes);
  Staged(Backend& backend, const std::vector<float>& values)
      : Staged(backend, values.data(), values.size() * sizeof(float)) {}
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;
  ~Staged() { backend_.FreeStaging(memory_); }

  const void* get() const { return memory_; }

 private:
  Backend& backend_;
  void* memory_;
};

// Floats in a backend's memory. `shift` floats off its alignment, to test awkward pointers.
class Buffer {
 public:
  Buffer(Backend& backend, const std::vector<float>& values, std::size_t shift = 0);
  // A template, so that {1} can only mean one element of value 1.
  template <std::integral Count>
  Buffer(Backend& backend, Count zeros, std::size_t shift = 0)
      : Buffer(backend, std::vector<float>(static_cast<std::size_t>(zeros)), shift) {}

  float* get() const { return static_cast<float*>(bytes_.get()); }
  std::size_t size() const { return elements_; }
  std::vector<float> Read() const;

 private:
  std::size_t elements_;
  Bytes bytes_;
};

// Values in a backend's iterate dtype, stored times the power of two that suits the largest.
class IterateBuffer {
 public:
  IterateBuffer(Backend& backend, const std::vector<float>& values, std::size_t shift = 0);
  template <std::integral Count>
  IterateBuffer(Backend& backend, Count zeros, std::size_t shift = 0)
      : IterateBuffer(backend, std::vector<float>(static_cast<std::size_t>(zeros)), shift) {}

  void* get(std::size_t element = 0) const;
  double scale() const { return scale_; }
  std::vector<float> Read() const;  // without the scale

 private:
  Backend& backend_;
  std::size_t elements_;
  double scale_;
  Bytes bytes_;
};

// Fails the running test on an error.
void Check(const Error& error);

// One job alone in its batch.
GradientScan ScanOne(Backend& backend, const GradientView& gradient);
StateScan ScanStateOne(Backend& backend, const void* data, std::size_t elements,
                       Dtype dtype = Dtype::kF32);
StateScan MomentumOne(Backend& backend, const MomentumJob& job);
StateScan ApplyOne(Backend& backend, const ApplyJob& job);
AdamWScan AdamWOne(Backend& backend, const AdamWJob& job);
bool SameScan(const StateScan& x, const StateScan& y);

// `count` Gaussian numbers from a fixed seed.
std::vector<float> Gaussian(std::size_t count, unsigned seed);
// U = A B with A rows x rank, B rank x cols.
std::vector<float> LowRank(std::int64_t rows, std::int64_t cols, std::int64_t rank, unsigned seed);
std::vector<float> Transposed(const std::vector<float>& x, std::int64_t rows, std::int64_t cols);

double Norm(const std::vector<float>& x);
// |x - y|.
double Distance(const std::vector<float>& x, const std::vector<float>& y);
double Distance(const std::vector<float>& x, const std::vector<double>& y);
bool SameBits(const std::vector<float>& x, const std::vector<float>& y);

// `simple` x 5 by the backend's own choice of method.
NewtonSchulzRule SimpleRule();
NewtonSchulzRule RuleOf(const char* set_name,
                        NewtonSchulzMethod method = NewtonSchulzMethod::kAuto);

struct Orthogonalized {
  std::vector<float> o;
  NewtonSchulzResult result;
};
// One matrix, alone in its batch.
Orthogonalized Orthogonalize(Backend& backend, const std::vector<float>& u, std::int64_t rows,
                             std::int64_t cols, const NewtonSchulzRule& rule = SimpleRule());

struct MuonSettings {
  double lr = 0.1;
  double weight_decay = 0.1;
  MomentumRule momentum{};
  NewtonSchulzRule newton_schulz = SimpleRule();
  bool match_rms_adamw = false;  // factor 0.2 sqrt(max(rows, cols)), else `original`
  float unscale = 1;
};

// One matrix under Muon: momentum, Newton-Schulz, apply.
class MuonParameter {
 public:
  MuonParameter(Backend& backend, std::int64_t rows, std::int64_t cols,
                const std::vector<float>& w);
  void Step(const std::vector<float>& gradient, const MuonSettings& settings);
  // The gradient in 16 bits, as a trainer sends it.
  void Step(const std::vector<std::uint16_t>& gradient, Dtype dtype, const MuonSettings& settings);

  std::vector<float> w() const { return w_.Read(); }
  std::vector<float> m() const { return m_.Read(); }
  std::vector<float> o() const { return o_.Read(); }
  const NewtonSchulzResult& result() const { return result_; }
  const StateScan& weight_scan() const { return weight_scan_; }
  const StateScan& momentum_scan() const { return momentum_scan_; }

 private:
  void Step(const GradientView& gradient, const MuonSettings& settings);

  Backend& backend_;
  std::int64_t rows_, cols_;
  Buffer w_, m_;
  IterateBuffer u_, o_;
  NewtonSchulzResult result_;
  StateScan weight_scan_, momentum_scan_;
};

}  // namespace muond::kernels::testing
