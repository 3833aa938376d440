#include "client/bench/sample_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace muond::bench {
namespace {

// FLOPs of a Newton-Schulz step, up to a factor.
double Cost(const models::ModelTensor& tensor) {
  const auto m = static_cast<double>(std::min(tensor.shape[0], tensor.shape[1]));
  const auto n = static_cast<double>(std::max(tensor.shape[0], tensor.shape[1]));
  return 2 * n * m * m + m * m * m;
}

void RoundToBF16(Doubles& values) {
  for (double& value : values) {
    value = kernels::BF16ToFloat(kernels::FloatToBF16(static_cast<float>(value)));
  }
}

}  // namespace

SampleCheck::SampleCheck(const models::Model& model, const v1::RoutingReport& routing,
                         Values* gradients, Dtype momentum_dtype)
    : gradients_(gradients), momentum_dtype_(momentum_dtype) {
  std::map<std::string, v1::Algorithm> algorithms;
  for (const v1::RoutedParameter& routed : routing.parameters()) {
    algorithms[routed.name()] = routed.algorithm();
  }
  struct Choice {
    const models::ModelTensor* tensor = nullptr;
    double cost = 0;
    std::size_t first = 0;
  };
  Choice square, rectangle, adamw;
  std::size_t first = 0;
  for (const models::ModelTensor& tensor : model.tensors) {
    const auto elements = static_cast<std::size_t>(tensor.Elements());
    const bool muon = algorithms[tensor.name] == v1::ALGORITHM_MUON;
    Choice& choice = !muon ? adamw : tensor.shape[0] == tensor.shape[1] ? square : rectangle;
    const double cost = muon ? Cost(tensor) : static_cast<double>(elements);
    if (choice.tensor == nullptr || cost < choice.cost) choice = {&tensor, cost, first};
    first += elements;
  }
  for (const Choice& choice : {square, rectangle}) {
    if (choice.tensor != nullptr) Add(*choice.tensor, true, choice.first);
  }
  if (adamw.tensor != nullptr) Add(*adamw.tensor, false, adamw.first);
}

void SampleCheck::Add(const models::ModelTensor& tensor, bool muon, std::size_t first) {
  Sample& sample = samples_.emplace_back();
  sample.tensor = &tensor;
  sample.muon = muon;
  sample.first = first;
  sample.elements = static_cast<std::size_t>(tensor.Elements());
  if (!muon) sample.stride = std::max<std::size_t>(sample.elements / kAdamWElements, 1);
  const std::size_t followed = (sample.elements + sample.stride - 1) / sample.stride;
  sample.gradient.resize(followed);
  sample.m.resize(followed);
  if (!muon) sample.v.resize(followed);
}

void SampleCheck::BeginStep(std::uint64_t seed, float scale) {
  Random random(seed);
  ++t_;
  for (Sample& sample : samples_) {
    for (std::size_t i = 0; i < sample.gradient.size(); ++i) {
      const std::size_t at = sample.first + i * sample.stride;
      gradients_->Set(at, random.Normal() * scale);
      sample.gradient[i] = gradients_->At(at);  // as rounded
    }
    if (sample.muon) {
      ReferenceMomentum({}, sample.gradient, sample.m);
      if (momentum_dtype_ == Dtype::kBF16) RoundToBF16(sample.m);
    } else {
      ReferenceMoments({}, sample.gradient, sample.m, sample.v);
    }
  }
}

std::vector<client::SliceSink> SampleCheck::Sinks(std::vector<Sample>& samples,
                                                  std::vector<float> Sample::*values) {
  std::vector<client::SliceSink> sinks;
  for (Sample& sample : samples) {
    (sample.*values).resize(sample.elements);
    sinks.push_back({.parameter = sample.tensor->name,
                     .data = (sample.*values).data(),
                     .elements = static_cast<std::int64_t>(sample.elements),
                     .dtype = Dtype::kF32});
  }
  return sinks;
}

std::vector<client::SliceSink> SampleCheck::Before() { return Sinks(samples_, &Sample::before); }
std::vector<client::SliceSink> SampleCheck::After() { return Sinks(samples_, &Sample::after); }

std::int64_t SampleCheck::Bytes() const {
  std::size_t doubles = 0;
  for (const Sample& sample : samples_) {
    doubles += sample.gradient.size() + sample.m.size() + sample.v.size();
  }
  return static_cast<std::int64_t>(doubles * sizeof(double));
}

Doubles SampleCheck::Followed(const Sample& sample, const std::vector<float>& values) const {
  Doubles followed(sample.gradient.size());
  for (std::size_t i = 0; i < followed.size(); ++i) followed[i] = values[i * sample.stride];
  return followed;
}

std::vector<SampleError> SampleCheck::Compare(const ReferenceMuon& muon,
                                              const ReferenceAdamW& adamw) const {
  std::vector<SampleError> errors;
  for (const Sample& sample : samples_) {
    const Doubles before = Followed(sample, sample.before);
    const Doubles after = Followed(sample, sample.after);
    const Doubles wanted = sample.muon
                               ? ReferenceMuonStep(muon, before, sample.gradient, sample.m,
                                                   sample.tensor->shape[0], sample.tensor->shape[1])
                               : ReferenceAdamWStep(adamw, before, sample.m, sample.v, t_);
    double off = 0, step = 0, along = 0, weights = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const double expected = wanted[i] - before[i];
      off += (after[i] - wanted[i]) * (after[i] - wanted[i]);
      step += expected * expected;
      weights += wanted[i] * wanted[i];
      along += (after[i] - before[i]) * expected;
    }
    SampleError& error = errors.emplace_back();
    error.parameter = sample.tensor->name;
    error.algorithm = sample.muon ? "muon" : "adamw";
    error.elements = static_cast<std::int64_t>(wanted.size());
    // A NaN fails every comparison: what is not finite does not pass.
    error.error = std::sqrt(off / step);
    error.scale_error = std::abs(along / step - 1);
    const double rounding = std::numeric_limits<float>::epsilon() * std::sqrt(weights / step);
    error.tolerance = (sample.muon ? kMuonTolerance : kAdamWTolerance) + rounding;
    error.scale_tolerance = (sample.muon ? kMuonScaleTolerance : kAdamWTolerance) + rounding;
  }
  return errors;
}

}  // namespace muond::bench
