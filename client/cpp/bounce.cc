#include "client/cpp/bounce.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond::client {

Bounce::~Bounce() {
  for (const auto& [key, buffer] : buffers_) driver_->FreePinned(buffer.device, buffer.data);
}

absl::StatusOr<void*> Bounce::BufferFor(const Key& key, int device, std::size_t bytes) {
  Buffer& buffer = buffers_[key];
  if (buffer.bytes >= bytes && buffer.data != nullptr) return buffer.data;
  if (buffer.data != nullptr) driver_->FreePinned(buffer.device, buffer.data);
  buffer = {driver_->AllocatePinned(device, bytes), bytes, device};
  if (buffer.data != nullptr) return buffer.data;
  buffers_.erase(key);
  return absl::ResourceExhaustedError(absl::StrFormat(
      "parameter \"%s\": no pinned memory for %d bytes", std::get<0>(key), bytes));
}

absl::StatusOr<std::vector<SliceSource>> Bounce::ToHost(const std::shared_ptr<GpuDriver>& driver,
                                                        std::span<const SliceSource> sources) {
  driver_ = driver;
  std::vector<SliceSource> hosts(sources.begin(), sources.end());
  for (SliceSource& host : hosts) {
    if (!host.place.on_gpu()) continue;
    const std::size_t bytes = static_cast<std::size_t>(host.elements) * DtypeBytes(host.dtype);
    MUOND_ASSIGN_OR_RETURN(
        void* const data,
        BufferFor({host.parameter, host.slice, host.micro_batch}, host.place.device, bytes));
    MUOND_RETURN_IF_ERROR(driver->Copy(host.place, data, host.data, bytes));
    host.data = data;
  }
  for (SliceSource& host : hosts) {
    if (host.place.on_gpu()) MUOND_RETURN_IF_ERROR(driver->Wait(host.place));
    host.place = {};
  }
  return hosts;
}

absl::StatusOr<std::vector<SliceSink>> Bounce::HostSinks(const std::shared_ptr<GpuDriver>& driver,
                                                         std::span<const SliceSink> sinks) {
  driver_ = driver;
  std::vector<SliceSink> hosts(sinks.begin(), sinks.end());
  for (SliceSink& host : hosts) {
    if (!host.place.on_gpu()) continue;
    const std::size_t bytes = static_cast<std::size_t>(host.elements) * DtypeBytes(host.dtype);
    MUOND_ASSIGN_OR_RETURN(host.data,
                           BufferFor({host.parameter, host.slice, -1}, host.place.device, bytes));
    host.place = {};
  }
  return hosts;
}

absl::Status Bounce::FromHost(std::span<const SliceSink> sinks, std::span<const SliceSink> hosts) {
  for (std::size_t i = 0; i < sinks.size(); ++i) {
    const SliceSink& sink = sinks[i];
    if (!sink.place.on_gpu()) continue;
    MUOND_RETURN_IF_ERROR(
        driver_->Copy(sink.place, sink.data, hosts[i].data,
                      static_cast<std::size_t>(sink.elements) * DtypeBytes(sink.dtype)));
  }
  for (const SliceSink& sink : sinks) {
    if (sink.place.on_gpu()) MUOND_RETURN_IF_ERROR(driver_->Wait(sink.place));
  }
  return absl::OkStatus();
}

}  // namespace muond::client
