#include "server/engine/upload_pack.h"

#include <cstring>

namespace muond {
namespace {

// Larger ones go by themselves: the bytes cost more than the call.
constexpr std::size_t kSmallBytes = std::size_t{64} << 10;
constexpr std::size_t kAlignment = 64;

}  // namespace

kernels::Error UploadPack::Add(void* dst, const void* from, std::size_t bytes) {
  if (bytes > kSmallBytes) return backend_.Upload(dst, from, bytes);
  if (used_ + bytes > kBytes) {
    if (auto error = Flush()) return error;
  }
  if (bytes > 0) std::memcpy(static_cast<char*>(host_.data()) + used_, from, bytes);
  jobs_.push_back({dst, static_cast<char*>(device_.data()) + used_, bytes});
  used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return {};
}

kernels::Error UploadPack::Flush() {
  if (jobs_.empty()) return {};
  kernels::Error error = backend_.Upload(device_.data(), host_.data(), used_);
  if (!error) error = backend_.Copy(jobs_);
  jobs_.clear();
  used_ = 0;
  return error;
}

}  // namespace muond
