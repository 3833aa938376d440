#include "client/bench/gpu_values.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond::bench {
namespace {

std::size_t BytesOf(std::int64_t elements, Dtype dtype) {
  return static_cast<std::size_t>(elements) * DtypeBytes(dtype);
}

}  // namespace

absl::StatusOr<void*> GpuValues::Own(std::size_t bytes) {
  void* const memory = driver_->Allocate(place_.device, bytes);
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("GPU %d: no memory for %d bytes", place_.device, bytes));
  }
  own_.push_back(memory);
  return memory;
}

absl::StatusOr<std::unique_ptr<GpuValues>> GpuValues::Make(
    client::Session& session, int device, const std::vector<client::SliceSource>& gradients,
    const std::vector<client::SliceSink>& parameters) {
  MUOND_ASSIGN_OR_RETURN(auto driver, client::LoadGpuDriver());
  std::unique_ptr<GpuValues> values(new GpuValues(device, std::move(driver)));
  values->hosts_ = values->sources_ = gradients;
  values->host_sinks_ = values->sinks_ = parameters;
  for (client::SliceSource& source : values->sources_) {
    const auto place = session.GradientPlace(source.parameter, source.slice, 0);
    if (place.ok()) {
      source.data = *place;
    } else {
      MUOND_ASSIGN_OR_RETURN(source.data, values->Own(BytesOf(source.elements, source.dtype)));
    }
    source.place = values->place_;
  }
  for (client::SliceSink& sink : values->sinks_) {
    const auto place = session.ParameterPlace(sink.parameter, sink.slice);
    if (place.ok()) {
      sink.data = *place;
    } else {
      MUOND_ASSIGN_OR_RETURN(sink.data, values->Own(BytesOf(sink.elements, sink.dtype)));
    }
    sink.place = values->place_;
  }
  MUOND_RETURN_IF_ERROR(values->Upload({}));
  return values;
}

GpuValues::~GpuValues() {
  for (void* const memory : own_) driver_->Free(place_.device, memory);
}

absl::Status GpuValues::Upload(const std::set<std::string>& names) {
  for (std::size_t i = 0; i < hosts_.size(); ++i) {
    if (!names.empty() && !names.contains(hosts_[i].parameter)) continue;
    MUOND_RETURN_IF_ERROR(driver_->Copy(place_, const_cast<void*>(sources_[i].data),
                                        hosts_[i].data,
                                        BytesOf(hosts_[i].elements, hosts_[i].dtype)));
  }
  return driver_->Wait(place_);
}

absl::Status GpuValues::Download() {
  for (std::size_t i = 0; i < sinks_.size(); ++i) {
    MUOND_RETURN_IF_ERROR(driver_->Copy(place_, host_sinks_[i].data, sinks_[i].data,
                                        BytesOf(sinks_[i].elements, sinks_[i].dtype)));
  }
  return driver_->Wait(place_);
}

}  // namespace muond::bench
