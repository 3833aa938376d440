// What the kernel suites share: the list of backends, memory of theirs, and one parameter that is
// stepped the way an engine would do it.
//
// A new backend is one more entry in BackendCases(), nothing else.
#pragma once

#include <gtest/gtest.h>

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
  std::unique_ptr<Backend> (*make)();
  double tolerance;  // of an O on well-conditioned input, against fp64, elementwise
};

std::vector<BackendCase> BackendCases();
std::string CaseName(const ::testing::TestParamInfo<BackendCase>& info);

// A suite of tests that run on every backend.
class BackendTest : public ::testing::TestWithParam<BackendCase> {
 protected:
  BackendTest() : backend_(GetParam().make()) {}
  double tolerance() const { return GetParam().tolerance; }

  std::unique_ptr<Backend> backend_;
};

#define MUOND_FOR_EVERY_BACKEND(suite) \
  INSTANTIATE_TEST_SUITE_P(Backends, suite, ::testing::ValuesIn(BackendCases()), CaseName)

// Floats in a backend's memory. `shift` floats off its alignment, to test awkward pointers.
class Buffer {
 public:
  Buffer(Backend& backend, const std::vector<float>& values, std::size_t shift = 0);
  // A template, so that {1} can only mean one element of value 1.
  template <std::integral Count>
  Buffer(Backend& backend, Count zeros, std::size_t shift = 0)
      : Buffer(backend, std::vector<float>(static_cast<std::size_t>(zeros)), shift) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { backend_.Free(memory_); }

  float* get() const { return memory_ + shift_; }
  std::size_t size() const { return elements_; }
  std::vector<float> Read() const;

 private:
  Backend& backend_;
  std::size_t elements_;
  std::size_t shift_;
  float* memory_;
};

// Fails the running test on an error.
void Check(const Error& error);

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
  Buffer w_, m_, u_, o_;
  NewtonSchulzResult result_;
  StateScan weight_scan_, momentum_scan_;
};

}  // namespace muond::kernels::testing
