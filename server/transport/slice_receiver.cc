#include "server/transport/slice_receiver.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/transport/placing_reader.h"
#define XXH_STATIC_LINKING_ONLY  // for the size of a state
#include "xxhash.h"

namespace muond {
namespace {

std::vector<ElementRange> RangesOf(const Box& box, const SliceTarget& target) {
  const std::int64_t elements = box.Elements();
  if (target.shards.empty()) return {{0, elements}};
  return RangesInShards(box, target.shape, target.shards);
}

std::int64_t CountOf(const std::vector<ElementRange>& ranges) {
  std::int64_t count = 0;
  for (const ElementRange& range : ranges) count += range.count;
  return count;
}

}  // namespace

void SliceReceiver::FreeHash::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

SliceReceiver::SliceReceiver(std::string object, Box box, Dtype dtype, SliceTarget target)
    : object_(std::move(object)),
      box_(std::move(box)),
      dtype_(dtype),
      target_(std::move(target)),
      ranges_(RangesOf(box_, target_)),
      elements_(CountOf(ranges_)),
      hash_(XXH3_createState()) {
  MUOND_CHECK(hash_ != nullptr, "no memory for a hash state");
  XXH3_64bits_reset(hash_.get());
  const std::int64_t header[2] = {static_cast<std::int64_t>(dtype_), elements_};
  UpdateHash(hash_.get(), header, sizeof(header));
}

// The element of the slice that must come next; the end of the last range when all are here.
std::int64_t SliceReceiver::Next() const {
  if (range_ < ranges_.size()) return ranges_[range_].first + in_range_;
  return ranges_.empty() ? 0 : ranges_.back().first + ranges_.back().count;
}

absl::Status SliceReceiver::Receive(const ChunkHeader& header, absl::string_view payload) {
  const std::string_view piece(payload.data(), payload.size());
  return Receive(header, {&piece, 1});
}

absl::Status SliceReceiver::Check(const ChunkHeader& header, std::int64_t bytes) const {
  const std::int64_t size = static_cast<std::int64_t>(DtypeBytes(dtype_));
  if (!revoked_.ok()) return revoked_;
  if (header.dtype != dtype_) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: expected elements of %s, got %s", object_, std::string(kernels::DtypeName(dtype_)),
        std::string(kernels::DtypeName(header.dtype))));
  }
  if (bytes % size != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: chunk at element %d: expected whole elements of %d bytes, got %d bytes", object_,
        header.offset, size, bytes));
  }
  const std::int64_t count = bytes / size;
  if (header.offset != Next()) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: expected a chunk at element %d, got %d",
                                                      object_, Next(), header.offset));
  }
  const std::int64_t room = range_ < ranges_.size() ? ranges_[range_].count - in_range_ : 0;
  if (count <= room) return absl::OkStatus();
  if (range_ + 1 < ranges_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: chunk at element %d: expected at most %d elements, the next belong to another "
        "daemon; got %d",
        object_, header.offset, room, count));
  }
  return absl::InvalidArgumentError(absl::StrFormat("%s: expected %d bytes, got at least %d",
                                                    object_, elements_ * size,
                                                    (received_ + count) * size));
}

absl::Status SliceReceiver::Receive(const ChunkHeader& header,
                                    std::span<const std::string_view> payload) {
  std::int64_t bytes = 0;
  for (const std::string_view piece : payload) bytes += std::ssize(piece);
  MutexLock lock(mutex_);
  MUOND_RETURN_IF_ERROR(Check(header, bytes));
  const std::int64_t count = bytes / static_cast<std::int64_t>(DtypeBytes(dtype_));
  XXH3_state_t before;
  XXH3_copyState(&before, hash_.get());
  PlacingReader reader(payload, hash_.get());
  absl::Status placed = Copy(header.offset, count, reader);
  if (placed.ok() && reader.crc32c() != header.crc32c) {
    placed = absl::DataLossError(
        absl::StrFormat("%s: chunk at element %d: payload has crc32c %08x, header says %08x",
                        object_, header.offset, reader.crc32c(), header.crc32c));
  }
  if (!placed.ok()) {
    XXH3_copyState(hash_.get(), &before);
    return placed;
  }
  if (target_.base == nullptr) AddToSum(payload);
  received_ += count;
  in_range_ += count;
  if (count > 0 && in_range_ == ranges_[range_].count) {
    ++range_;
    in_range_ = 0;
  }
  return absl::OkStatus();
}

template <typename Visit>
void SliceReceiver::ForEachPlace(std::int64_t first, std::int64_t count,
                                 const Visit& visit) const {
  const auto size = static_cast<std::int64_t>(DtypeBytes(dtype_));
  if (target_.shards.empty()) {
    ForEachRun(box_, target_.shape, first, count,
               [&](std::int64_t at, std::int64_t, std::int64_t n) {
                 visit(target_.base + at * size, n);
               });
    return;
  }
  std::byte* base = target_.base;
  for (const Shard& shard : target_.shards) {
    const ElementRange range = RangeInShard(box_, target_.shape, shard);
    const std::int64_t begin = std::max(range.first, first);
    const std::int64_t end = std::min(range.first + range.count, first + count);
    if (begin < end) {
      ForEachRun(box_, target_.shape, begin, end - begin,
                 [&](std::int64_t at, std::int64_t, std::int64_t n) {
                   visit(base + (at - shard.first) * size, n);
                 });
    }
    base += shard.elements * size;
  }
}

// Elements [first, first + count) of the slice, all expected, to their places.
absl::Status SliceReceiver::Copy(std::int64_t first, std::int64_t count,
                                 PlacingReader& reader) const {
  const std::size_t size = DtypeBytes(dtype_);
  if (target_.base == nullptr) {
    reader.Skip(static_cast<std::size_t>(count) * size);
    return absl::OkStatus();
  }
  if (target_.device == nullptr) {
    ForEachPlace(first, count, [&](std::byte* to, std::int64_t n) {
      reader.Read(to, static_cast<std::size_t>(n) * size);
    });
    return absl::OkStatus();
  }
  std::vector<std::byte> bytes;
  kernels::Error error;
  ForEachPlace(first, count, [&](std::byte* to, std::int64_t n) {
    bytes.resize(static_cast<std::size_t>(n) * size);
    reader.Read(bytes.data(), bytes.size());
    if (!error) error = target_.device->Write(to, bytes.data(), bytes.size());
  });
  if (!error) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat("%s: %s", object_, error.message()));
}

// Of a slice that is only digested: what it would be known by if it had been moved.
void SliceReceiver::AddToSum(std::span<const std::string_view> payload) {
  std::string bytes;
  for (const std::string_view piece : payload) bytes += piece;
  const std::size_t size = DtypeBytes(dtype_);
  sum_ += kernels::SumOf(bytes.data(), bytes.size() / size, static_cast<std::uint32_t>(size),
                         static_cast<std::uint64_t>(received_));
}

absl::StatusOr<MovableLock> SliceReceiver::BeginMoves(
    const ChunkHeader& header, const std::byte* from, std::int64_t bytes, std::uint32_t sum,
    std::vector<kernels::MoveJob>& moves) {
  const std::size_t size = DtypeBytes(dtype_);
  MovableLock lock(mutex_);
  mutex_.AssertHeld();
  if (!revoked_.ok()) return revoked_;
  if (header.dtype != dtype_) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: expected elements of %s, got %s", object_, std::string(kernels::DtypeName(dtype_)),
        std::string(kernels::DtypeName(header.dtype))));
  }
  if (bytes != elements_ * static_cast<std::int64_t>(size) || header.offset != Next() ||
      received_ != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: expected all of its %d bytes from element %d on in one region, got %d from %d on",
        object_, elements_ * static_cast<std::int64_t>(size), Next(), bytes, header.offset));
  }
  kernels::MoveJob job{.src = from,
                       .elements = static_cast<std::size_t>(elements_),
                       .element_bytes = static_cast<std::uint32_t>(size),
                       .sum = sum};
  if (target_.base == nullptr) {
    moves.push_back(job);
    return lock;
  }
  for (const ElementRange& range : ranges_) {
    ForEachPlace(range.first, range.count, [&](std::byte* to, std::int64_t n) {
      job.dst = to;
      job.elements = static_cast<std::size_t>(n);
      moves.push_back(job);
      job.src = static_cast<const std::byte*>(job.src) + static_cast<std::size_t>(n) * size;
      job.first += static_cast<std::uint64_t>(n);
    });
  }
  return lock;
}

void SliceReceiver::EndMoves(std::uint64_t sum) {
  mutex_.AssertHeld();  // by BeginMoves's lock
  moved_ = true;
  sum_ = sum;
  received_ = elements_;
  range_ = ranges_.size();
}

void SliceReceiver::Revoke(const absl::Status& why) {
  MutexLock lock(mutex_);
  if (!revoked_.ok()) return;
  revoked_ = absl::Status(why.code(), absl::StrFormat("%s: %s", object_, why.message()));
}

bool SliceReceiver::complete() const {
  MutexLock lock(mutex_);
  return received_ == elements_;
}

std::int64_t SliceReceiver::received() const {
  MutexLock lock(mutex_);
  return received_;
}

absl::Status SliceReceiver::CheckComplete() const {
  const std::int64_t got = received();
  if (got == elements_) return absl::OkStatus();
  const std::int64_t size = static_cast<std::int64_t>(DtypeBytes(dtype_));
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: expected %d bytes, got %d", object_, elements_ * size, got * size));
}

std::uint64_t SliceReceiver::MovedDigest() const {
  const std::uint64_t values[3] = {static_cast<std::uint64_t>(dtype_),
                                   static_cast<std::uint64_t>(elements_), sum_};
  return XXH3_64bits(values, sizeof(values));
}

std::uint64_t SliceReceiver::digest() const {
  MutexLock lock(mutex_);
  return moved_ ? MovedDigest() : XXH3_64bits_digest(hash_.get());
}

std::optional<std::uint64_t> SliceReceiver::other_digest() const {
  MutexLock lock(mutex_);
  if (moved_ || target_.base != nullptr) return std::nullopt;
  return MovedDigest();
}

}  // namespace muond
