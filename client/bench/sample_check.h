// Whether a daemon computes what it should: some parameters of the model are followed in fp64
// beside the run, and their weights after one step are compared.
//
// The sample: the cheapest square and the cheapest rectangular Muon matrix, whole, and the smallest
// AdamW tensor (at most kAdamWElements of its elements, evenly spaced). Their gradients are new in
// every step, so that a wrong momentum cannot hide behind the scale-freeness of Newton-Schulz.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/bench/reference_step.h"
#include "client/bench/values.h"
#include "client/cpp/session.h"
#include "client/models/model.h"
#include "muond/v1/types.pb.h"

namespace muond::bench {

struct SampleError {
  std::string parameter;
  std::string algorithm;      // "muon" or "adamw"
  std::int64_t elements = 0;  // compared
  // |W - W_reference|_F / |step|_F, step being the reference's change of W.
  double error = 0;
  double tolerance = 0;
  // How much longer or shorter the step is than the reference's, along it: 0.1 for a learning rate
  // that is a tenth too high. Finer than `error` where products are made of 16-bit values.
  double scale_error = 0;
  double scale_tolerance = 0;
  bool passed() const { return error <= tolerance && scale_error <= scale_tolerance; }
};

class SampleCheck {
 public:
  static constexpr std::int64_t kAdamWElements = 65'536;

  // `gradients` holds the tensors of `model` in order and outlives the check, like the model.
  // `momentum_dtype`: what the momentum that is followed is rounded to.
  SampleCheck(const models::Model& model, const v1::RoutingReport& routing, Values* gradients,
              Dtype momentum_dtype = Dtype::kF32);

  // Puts new gradients of standard deviation `scale` into the sample for the step that is pushed
  // next, and follows its momentum.
  void BeginStep(std::uint64_t seed, float scale);

  // Where the fp32 masters of the sample go before the compared step, and after it.
  std::vector<client::SliceSink> Before();
  std::vector<client::SliceSink> After();

  // Bytes that following the sample takes from construction on.
  std::int64_t Bytes() const;

  // Compares what was pulled: the last step begun, done with these rules. Tests give a wrong one.
  std::vector<SampleError> Compare(const ReferenceMuon& muon, const ReferenceAdamW& adamw) const;

 private:
  struct Sample {
    const models::ModelTensor* tensor = nullptr;
    bool muon = false;
    std::size_t first = 0;   // of the tensor, in the model's elements
    std::size_t stride = 1;  // between elements that are followed
    std::size_t elements = 0;
    Doubles gradient, m, v;  // of the elements that are followed
    std::vector<float> before, after;
  };
  void Add(const models::ModelTensor& tensor, bool muon, std::size_t first);
  Doubles Followed(const Sample& sample, const std::vector<float>& values) const;
  static std::vector<client::SliceSink> Sinks(std::vector<Sample>& samples,
                                              std::vector<float> Sample::*values);

  Values* gradients_;
  Dtype momentum_dtype_;
  std::vector<Sample> samples_;
  std::int64_t t_ = 0;  // steps begun
};

// How far a result may be off, relative to the step. Products of 16-bit values come within a few
// percent of fp64, without a bias of their length; AdamW is fp32 everywhere. What rounding the new
// weights to fp32 costs is added.
inline constexpr double kMuonTolerance = 0.05;
inline constexpr double kMuonScaleTolerance = 0.005;
inline constexpr double kAdamWTolerance = 2e-5;

}  // namespace muond::bench
