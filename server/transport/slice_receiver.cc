#include "server/transport/slice_receiver.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/crc32c.h"
#include "xxhash.h"

namespace muond {

void SliceReceiver::FreeHash::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

SliceReceiver::SliceReceiver(std::string object, Box box, Dtype dtype, SliceTarget target)
    : object_(std::move(object)),
      box_(std::move(box)),
      dtype_(dtype),
      elements_(box_.Elements()),
      target_(std::move(target)),
      hash_(XXH3_createState()) {
  MUOND_CHECK(hash_ != nullptr, "no memory for a hash state");
  XXH3_64bits_reset(hash_.get());
  const std::int64_t header[2] = {static_cast<std::int64_t>(dtype_), elements_};
  XXH3_64bits_update(hash_.get(), header, sizeof(header));
}

absl::Status SliceReceiver::Receive(const ChunkHeader& header, absl::string_view payload) {
  const std::int64_t size = static_cast<std::int64_t>(DtypeBytes(dtype_));
  std::lock_guard lock(mutex_);
  if (!revoked_.ok()) return revoked_;
  if (header.dtype != dtype_) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: expected elements of %s, got %s", object_, std::string(kernels::DtypeName(dtype_)),
        std::string(kernels::DtypeName(header.dtype))));
  }
  if (payload.size() % size != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: chunk at element %d: expected whole elements of %d bytes, got %d bytes", object_,
        header.offset, size, payload.size()));
  }
  const std::int64_t count = static_cast<std::int64_t>(payload.size()) / size;
  if (header.offset != next_) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: expected a chunk at element %d, got %d",
                                                      object_, next_, header.offset));
  }
  if (count > elements_ - next_) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: expected %d bytes, got at least %d",
                                                      object_, elements_ * size,
                                                      (next_ + count) * size));
  }
  const std::uint32_t crc = Crc32c(payload.data(), payload.size());
  if (crc != header.crc32c) {
    return absl::DataLossError(
        absl::StrFormat("%s: chunk at element %d: payload has crc32c %08x, header says %08x",
                        object_, header.offset, crc, header.crc32c));
  }
  XXH3_64bits_update(hash_.get(), payload.data(), payload.size());
  if (target_.base != nullptr) {
    ForEachRun(
        box_, target_.shape, next_, count, [&](std::int64_t at, std::int64_t from, std::int64_t n) {
          std::memcpy(target_.base + at * size, payload.data() + (from - next_) * size, n * size);
        });
  }
  next_ += count;
  return absl::OkStatus();
}

void SliceReceiver::Revoke(const absl::Status& why) {
  std::lock_guard lock(mutex_);
  if (!revoked_.ok()) return;
  revoked_ = absl::Status(why.code(), absl::StrFormat("%s: %s", object_, why.message()));
}

bool SliceReceiver::complete() const {
  std::lock_guard lock(mutex_);
  return next_ == elements_;
}

std::int64_t SliceReceiver::received() const {
  std::lock_guard lock(mutex_);
  return next_;
}

absl::Status SliceReceiver::CheckComplete() const {
  const std::int64_t got = received();
  if (got == elements_) return absl::OkStatus();
  const std::int64_t size = static_cast<std::int64_t>(DtypeBytes(dtype_));
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: expected %d bytes, got %d", object_, elements_ * size, got * size));
}

std::uint64_t SliceReceiver::digest() const {
  std::lock_guard lock(mutex_);
  return XXH3_64bits_digest(hash_.get());
}

}  // namespace muond
