// Small tensors on their way to a device travel together: what a transfer costs beyond its bytes is
// paid once for many.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/backend.h"
#include "server/engine/buffer.h"

namespace muond {

class UploadPack {
 public:
  // What `host` must hold, and `device` at least.
  static constexpr std::size_t kBytes = std::size_t{4} << 20;

  // Packs in `host` and unpacks from `device`; both are the caller's, and free for this use until
  // Flush. One thread.
  UploadPack(kernels::Backend& backend, const StagingBuffer& host, const Buffer& device)
      : backend_(backend), host_(host), device_(device) {}

  // Brings `bytes` of staging memory to `dst`: now, or with others by Flush. `from` is not read
  // after the return.
  kernels::Error Add(void* dst, const void* from, std::size_t bytes);
  kernels::Error Flush();

 private:
  kernels::Backend& backend_;
  const StagingBuffer& host_;
  const Buffer& device_;
  std::size_t used_ = 0;
  std::vector<kernels::CopyJob> jobs_;
};

}  // namespace muond
