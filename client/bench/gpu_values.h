// A benchmark's tensors in the memory of a GPU: where the session shares memory with the daemon,
// views of that; else of the benchmark's own.
#pragma once

#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/session.h"

namespace muond::bench {

class GpuValues {
 public:
  // Places for these, whose data is the host's.
  static absl::StatusOr<std::unique_ptr<GpuValues>> Make(
      client::Session& session, int device, const std::vector<client::SliceSource>& gradients,
      const std::vector<client::SliceSink>& parameters);
  ~GpuValues();

  std::span<const client::SliceSource> sources() const { return sources_; }
  std::span<const client::SliceSink> sinks() const { return sinks_; }
  // Brings the host's gradients to their places: of these parameters, or all where it is empty.
  absl::Status Upload(const std::set<std::string>& names);
  // And the parameters back to the host's.
  absl::Status Download();

 private:
  GpuValues(int device, std::shared_ptr<client::GpuDriver> driver)
      : place_{.device = device}, driver_(std::move(driver)) {}
  absl::StatusOr<void*> Own(std::size_t bytes);

  const client::GpuPlace place_;
  const std::shared_ptr<client::GpuDriver> driver_;
  std::vector<void*> own_;
  std::vector<client::SliceSource> hosts_, sources_;
  std::vector<client::SliceSink> host_sinks_, sinks_;
};

}  // namespace muond::bench
