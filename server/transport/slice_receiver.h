// One slice on its way in, or the part of it that this daemon owns: chunks of any size, ascending,
// each with its checksum, copied straight to their place. Every data path that brings bytes ends
// here, so that order, cover, sizes and digests are judged in one place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/device_memory.h"
#include "proto/mutex.h"
#include "proto/shard.h"
#include "proto/values.h"

struct XXH3_state_s;

namespace muond {

class PlacingReader;

// Where the bytes go. `base` null: nowhere, the slice is only digested (a repeated push).
struct SliceTarget {
  std::shared_ptr<void> keepalive;  // owns the memory
  // First byte of the elements of `shards`, one shard behind the other.
  std::byte* base = nullptr;
  Dims shape;  // of the whole row-major tensor
  // Ascending, not overlapping; empty: the whole tensor.
  std::vector<Shard> shards;
  // Where `base` is memory of a device: what writes there. Null: host memory.
  kernels::DeviceMemory* device = nullptr;
};

// What a chunk says of itself.
struct ChunkHeader {
  std::int64_t offset = 0;  // first element in the row-major slice
  Dtype dtype = Dtype::kF32;
  std::uint32_t crc32c = 0;  // of the payload
};

class SliceReceiver {
 public:
  // `object` opens every message: parameter "w": push for step 41. What is expected of the slice
  // are its elements in the target's shards.
  SliceReceiver(std::string object, Box box, Dtype dtype, SliceTarget target);

  // Thread rule: any thread; a receiver that was revoked refuses with the reason.
  // INVALID_ARGUMENT for another dtype, a hole or a step back, more elements than the slice has or
  // a torn element; nothing is copied then. DATA_LOSS for a payload that does not have its
  // checksum: the same chunk must come again, until then its elements are undefined.
  absl::Status Receive(const ChunkHeader& header, absl::string_view payload);
  // Likewise, for a payload in pieces of any size, one behind the other. Their memory may change
  // meanwhile, as a trainer's can: each byte is read once, and what is summed is what was placed.
  absl::Status Receive(const ChunkHeader& header, std::span<const std::string_view> payload);

  // Likewise, for all that is expected at once, in memory of a device that the caller moves
  // itself: adds the moves, from `from` on, with the index `sum`, and returns a lock under which
  // they are to be carried out. Then EndMoves, with what was summed, and the lock may go. Errors
  // as Receive, and INVALID_ARGUMENT unless `bytes` are exactly those that are expected. One
  // receiver's lock may be held together with others', not together with anything else.
  absl::StatusOr<MovableLock> BeginMoves(const ChunkHeader& header,
                                                          const std::byte* from, std::int64_t bytes,
                                                          std::uint32_t sum,
                                                          std::vector<kernels::MoveJob>& moves);
  void EndMoves(std::uint64_t sum);

  // The stream that feeds this receiver may not write again: it gets `why`, behind the object. A
  // status, not OK. The first reason stays.
  void Revoke(const absl::Status& why);

  bool complete() const;
  // INVALID_ARGUMENT naming expected and received elements unless complete.
  absl::Status CheckComplete() const;
  // Of dtype, element count and payload: independent of the chunking. Valid when complete. Two
  // kinds of it: of what came in chunks, and of what was moved. A slice in chunks that is only
  // digested (`base` null) has both, so that one which was moved before is known again.
  std::uint64_t digest() const;
  std::optional<std::uint64_t> other_digest() const;
  std::int64_t elements() const { return elements_; }  // expected
  std::int64_t received() const;
  Dtype dtype() const { return dtype_; }
  const Box& box() const { return box_; }

 private:
  const std::string object_;
  absl::Status Check(const ChunkHeader& header, std::int64_t bytes) const MUOND_REQUIRES(mutex_);
  absl::Status Copy(std::int64_t first, std::int64_t count, PlacingReader& reader) const;
  std::uint64_t MovedDigest() const MUOND_REQUIRES(mutex_);
  void AddToSum(std::span<const std::string_view> payload) MUOND_REQUIRES(mutex_);
  // visit(to, n): the next n elements go there; null: nowhere. In the slice's order.
  template <typename Visit>
  void ForEachPlace(std::int64_t first, std::int64_t count, const Visit& visit) const;
  std::int64_t Next() const MUOND_REQUIRES(mutex_);

  const Box box_;
  const Dtype dtype_;
  const SliceTarget target_;
  // Of the slice's elements in its own order: those that are expected. Ascending, none adjacent.
  const std::vector<ElementRange> ranges_;
  const std::int64_t elements_;  // in all ranges
  mutable Mutex mutex_;  // held while a chunk is copied: Revoke waits for that
  absl::Status revoked_ MUOND_GUARDED_BY(mutex_);
  std::size_t range_ MUOND_GUARDED_BY(mutex_) = 0;  // that is coming in
  std::int64_t received_ MUOND_GUARDED_BY(mutex_) = 0;  // elements, of all ranges
  std::int64_t in_range_ MUOND_GUARDED_BY(mutex_) = 0;  // likewise, of this one
  struct FreeHash {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, FreeHash> hash_ MUOND_GUARDED_BY(mutex_);
  bool moved_ MUOND_GUARDED_BY(mutex_) = false;  // all of it came by BeginMoves
  std::uint64_t sum_ MUOND_GUARDED_BY(mutex_) = 0;  // of the elements so far, as moves take it
};

}  // namespace muond
