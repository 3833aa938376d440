// One slice on its way in: chunks of any size, ascending, each with its checksum, copied straight
// to their place in a whole tensor. Every data path that brings bytes ends here, so that order,
// cover, sizes and digests are judged in one place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "proto/values.h"

struct XXH3_state_s;

namespace muond {

// Where the bytes go. `base` null: nowhere, the slice is only digested (a repeated push).
struct SliceTarget {
  std::shared_ptr<void> keepalive;  // owns the memory
  std::byte* base = nullptr;        // first byte of the whole row-major tensor
  Dims shape;                       // of that tensor
};

// What a chunk says of itself.
struct ChunkHeader {
  std::int64_t offset = 0;  // first element in the row-major slice
  Dtype dtype = Dtype::kF32;
  std::uint32_t crc32c = 0;  // of the payload
};

class SliceReceiver {
 public:
  // `object` opens every message: parameter "w": push for step 41.
  SliceReceiver(std::string object, Box box, Dtype dtype, SliceTarget target);

  // Thread rule: any thread; a receiver that was revoked refuses with the reason.
  // INVALID_ARGUMENT for another dtype, a hole or a step back, more elements than the slice has or
  // a torn element; DATA_LOSS for a payload that does not have its checksum. Nothing is copied
  // then.
  absl::Status Receive(const ChunkHeader& header, absl::string_view payload);

  // The stream that feeds this receiver may not write again: it gets `why`, behind the object. A
  // status, not OK. The first reason stays.
  void Revoke(const absl::Status& why);

  bool complete() const;
  // INVALID_ARGUMENT naming expected and received elements unless complete.
  absl::Status CheckComplete() const;
  // Of dtype, element count and payload: independent of the chunking. Valid when complete.
  std::uint64_t digest() const;
  std::int64_t elements() const { return elements_; }
  std::int64_t received() const;
  Dtype dtype() const { return dtype_; }
  const Box& box() const { return box_; }

 private:
  const std::string object_;
  const Box box_;
  const Dtype dtype_;
  const std::int64_t elements_;
  const SliceTarget target_;
  mutable std::mutex mutex_;  // held while a chunk is copied: Revoke waits for that
  absl::Status revoked_;
  std::int64_t next_ = 0;
  struct FreeHash {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, FreeHash> hash_;
};

}  // namespace muond
