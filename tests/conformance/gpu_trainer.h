// A daemon whose devices keep their memory from the host, and a trainer whose GPU's driver opens
// what they share: the paths of GPU memory without a GPU.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/transport_paths.h"
#include "tests/support/device_like_backend.h"
#include "tests/support/fake_gpu_driver.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {

inline RunSpec GpuSpec() {
  std::vector<ParameterSpec> parameters = {cluster::Matrix("w.big", 64, 190),
                                           cluster::Matrix("w.odd", 37, 53),
                                           cluster::Vector("norm", 19)};
  return cluster::SpecOf(std::move(parameters));
}

inline ServiceOptions WithDevices(int count, bool memories = true) {
  ServiceOptions options{.threads = 1};
  options.make_backends = [count](const kernels::BackendOptions& made) {
    std::vector<std::unique_ptr<kernels::Backend>> backends;
    for (int i = 0; i < count; ++i) {
      backends.push_back(muond::testing::MakeDeviceLikeBackend(kernels::MakeCpuBackend(made)));
    }
    return backends;
  };
  options.make_memories = [count, memories] {
    std::vector<std::unique_ptr<kernels::DeviceMemory>> list;
    for (int i = 0; i < count && memories; ++i) {
      list.push_back(
          muond::testing::MakeDeviceLikeMemory(muond::testing::FakeGpuDriver::NameOf(i)));
    }
    return list;
  };
  return options;
}

// One rank whose buffers are a GPU's, as far as anybody can tell.
class GpuTrainer {
 public:
  GpuTrainer(client::SessionOptions options, cluster::Cut cut = {cluster::Cut::kRows, 1})
      : spec_(GpuSpec()), slices_(cluster::CutOf(spec_, cut, 0)) {
    options.gpu = options.gpu < 0 ? 0 : options.gpu;
    options.gpu_driver = driver_;
    gpu_ = options.gpu;
    session_ = cluster::Must(client::Session::Open(spec_, 0, slices_, options));
  }

  client::Session& session() { return *session_; }
  muond::testing::FakeGpuDriver& driver() { return *driver_; }
  const RunSpec& spec() const { return spec_; }

  std::vector<client::SliceSource> Sources(const cluster::Tensors& tensors) {
    bytes_.clear();
    std::vector<client::SliceSource> sources;
    for (const ParameterSpec& parameter : spec_.parameters) {
      const std::vector<Box>& boxes = slices_.at(parameter.name);
      for (std::size_t i = 0; i < boxes.size(); ++i) {
        bytes_.push_back(cluster::BoxBytes(boxes[i], *parameter.shape, tensors.at(parameter.name),
                                           parameter.dtype));
        sources.push_back({.parameter = parameter.name,
                           .slice = static_cast<std::int64_t>(i),
                           .elements = boxes[i].Elements(),
                           .dtype = parameter.dtype,
                           .place = {.device = gpu_}});
      }
    }
    for (std::size_t i = 0; i < sources.size(); ++i) sources[i].data = bytes_[i].data();
    return sources;
  }
  std::vector<client::SliceSource> Noise(int seed) {
    return Sources(cluster::NoiseFor(spec_, seed));
  }
  std::vector<client::SliceSink> Sinks() {
    const auto sources = Noise(1);
    pulled_.clear();
    for (const auto& source : sources) {
      pulled_.emplace_back(static_cast<std::size_t>(source.elements) * DtypeBytes(source.dtype),
                           '\xff');
    }
    std::vector<client::SliceSink> sinks;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      sinks.push_back({.parameter = sources[i].parameter,
                       .slice = sources[i].slice,
                       .data = pulled_[i].data(),
                       .elements = sources[i].elements,
                       .dtype = sources[i].dtype,
                       .place = {.device = gpu_}});
    }
    return sinks;
  }
  const std::vector<std::string>& pulled() const { return pulled_; }
  const std::vector<std::string>& bytes() const { return bytes_; }
  void Initialize() { ASSERT_TRUE(cluster::Must(session_->Initialize(Noise(1)))); }

 private:
  const RunSpec spec_;
  const RankSlices slices_;
  int gpu_ = 0;
  std::shared_ptr<muond::testing::FakeGpuDriver> driver_ =
      std::make_shared<muond::testing::FakeGpuDriver>();
  std::vector<std::string> bytes_, pulled_;
  std::unique_ptr<client::Session> session_;
};

inline client::SessionOptions Ipc(PathDaemon& daemon, const std::string& transport = "auto") {
  client::SessionOptions options;
  options.endpoint = daemon.unix_address();
  options.transport = transport;
  return options;
}

}  // namespace muond::conformance
