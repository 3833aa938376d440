// NCCL on this machine, and the pairs that it may make.
#include <string>
#include <utility>

#include "nccl/cuda/cuda_device.h"
#include "nccl/library.h"
#include "proto/check.h"
#include "server/daemon/service_impl.h"
#include "spdlog/spdlog.h"

namespace muond {

absl::StatusOr<NcclPlatform> Service::Impl::FindNccl(const ServiceOptions& options) const {
  const auto gpus = Gpus();
  if (gpus.empty()) return absl::FailedPreconditionError("NCCL: the daemon computes on no GPU");
  if (options.nccl == "off") {
    return absl::FailedPreconditionError("NCCL: it is turned off (--nccl)");
  }
  if (options.find_nccl != nullptr) return options.find_nccl();
  NcclPlatform platform;
  MUOND_ASSIGN_OR_RETURN(platform.library, nccl::Load(options.nccl_library));
  MUOND_ASSIGN_OR_RETURN(platform.device, nccl::OpenCudaDevice(std::string(gpus[0]->uuid())));
  return platform;
}

void Service::Impl::PreparePaths(const ServiceOptions& options) {
  PrepareArenas(options);
  PreparePairs(options);
}

void Service::Impl::PreparePairs(const ServiceOptions& options) {
  auto platform = FindNccl(options);
  if (platform.ok()) {
    spdlog::info("NCCL {} ({}), for trainers on other GPUs than {}",
                 nccl::VersionText(platform->library->version), platform->library->path,
                 platform->device->uuid());
  }
  const PairLimits limits{.count_max = options.max_arenas, .patience = options.nccl_deadline};
  pairs = std::make_unique<PairTable>(
      std::move(platform), limits, [metrics = metrics.get()](std::int64_t count, std::int64_t) {
        metrics->SetNcclPairs(count);
      });
}

}  // namespace muond
