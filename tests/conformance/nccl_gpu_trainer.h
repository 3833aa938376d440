// A trainer of the tests on several GPUs, and what its process is told to do.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/cpp/session.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {

// Of the environment; empty: not set.
std::string Variable(const char* name);

// Slices above and below what travels alone.
RunSpec SomeSpec(int world);
// So many millions of elements, in 16 large tensors and 16 small ones; AdamW's, which is quick.
RunSpec LargeSpec(std::int64_t millions);

// One rank with all its buffers on a GPU.
class DeviceTrainer {
 public:
  DeviceTrainer(client::SessionOptions options, RunSpec spec, int rank)
      : driver_(cluster::Must(client::LoadGpuDriver())), spec_(std::move(spec)), gpu_(options.gpu) {
    const int world = static_cast<int>(spec_.world_size);
    slices_ = cluster::CutOf(spec_, {cluster::Cut::kFlat, world}, rank);  // as ZeRO cuts
    session_ = cluster::Must(client::Session::Open(spec_, rank, slices_, options));
    for (const ParameterSpec& parameter : spec_.parameters) {
      const auto held = slices_.find(parameter.name);
      if (held == slices_.end()) continue;
      for (std::size_t i = 0; i < held->second.size(); ++i) {
        const std::int64_t elements = held->second[i].Elements();
        const std::size_t bytes = static_cast<std::size_t>(elements) * 4;
        void* const gradient = driver_->Allocate(gpu_, bytes);
        void* const values = driver_->Allocate(gpu_, bytes);
        MUOND_CHECK(gradient != nullptr && values != nullptr, "device memory");
        const auto slice = static_cast<std::int64_t>(i);
        sources_.push_back({.parameter = parameter.name,
                            .slice = slice,
                            .data = gradient,
                            .elements = elements,
                            .place = {.device = gpu_}});
        sinks_.push_back({.parameter = parameter.name,
                          .slice = slice,
                          .data = values,
                          .elements = elements,
                          .place = {.device = gpu_}});
      }
    }
  }
  ~DeviceTrainer() {
    session_.reset();
    for (const auto& source : sources_) driver_->Free(gpu_, const_cast<void*>(source.data));
    for (const auto& sink : sinks_) driver_->Free(gpu_, sink.data);
  }

  client::Session& session() { return *session_; }
  std::span<const client::SliceSink> sinks() const { return sinks_; }
  std::span<const client::SliceSource> sources() const { return sources_; }

  std::span<const client::SliceSource> Sources(const cluster::Tensors& tensors) {
    for (const client::SliceSource& source : sources_) {
      const ParameterSpec& parameter = *std::find_if(
          spec_.parameters.begin(), spec_.parameters.end(),
          [&](const ParameterSpec& p) { return p.name == source.parameter; });
      const std::string bytes = cluster::BoxBytes(
          slices_.at(source.parameter)[static_cast<std::size_t>(source.slice)], *parameter.shape,
          tensors.at(source.parameter), Dtype::kF32);
      cluster::Must(driver_->Copy(source.place, const_cast<void*>(source.data), bytes.data(),
                         bytes.size()));
      cluster::Must(driver_->Wait(source.place));
    }
    return sources_;
  }
  std::span<const client::SliceSource> Noise(int seed) {
    return Sources(cluster::NoiseFor(spec_, seed));
  }
  std::string Parameters() {
    std::string all;
    for (const client::SliceSink& sink : sinks_) {
      std::string bytes(static_cast<std::size_t>(sink.elements) * 4, '\0');
      cluster::Must(driver_->Copy(sink.place, bytes.data(), sink.data, bytes.size()));
      cluster::Must(driver_->Wait(sink.place));
      all += bytes;
    }
    return all;
  }
  const RunSpec& spec() const { return spec_; }

 private:
  const std::shared_ptr<client::GpuDriver> driver_;
  const RunSpec spec_;
  const int gpu_;
  RankSlices slices_;
  std::vector<client::SliceSource> sources_;
  std::vector<client::SliceSink> sinks_;
  std::unique_ptr<client::Session> session_;
};

// Twenty steps, one of them skipped; the parameters after the last.
std::string TwentySteps(DeviceTrainer& trainer);
// Gives the gradients some values.
void Fill(DeviceTrainer& trainer);
// What a process of its own does that was told so by MUOND_NCCL_CHILD.
void RunChild();

}  // namespace muond::conformance
