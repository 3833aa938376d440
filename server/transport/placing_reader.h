// The one pass over a payload: each byte is read once from where it came, written to its place, and
// summed there while it is in the processor's cache. What its sender changes meanwhile is either in
// both, place and sums, or in neither.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

struct XXH3_state_s;

namespace muond {

// A payload in pieces of any size, one behind the other. One thread.
class PlacingReader {
 public:
  // Pieces and hash must outlive the reader; the hash is updated with every byte that is read.
  PlacingReader(std::span<const std::string_view> pieces, XXH3_state_s* hash)
      : pieces_(pieces), hash_(hash) {
    for (const std::string_view piece : pieces) left_ += piece.size();
  }

  // The next `bytes` bytes, which must be there, to their place.
  void Read(std::byte* to, std::size_t bytes);
  // The next `bytes` bytes are summed and go nowhere.
  void Skip(std::size_t bytes);

  // Of everything, once all of it was read.
  std::uint32_t crc32c() const { return crc32c_; }

 private:
  // Sums are made of blocks that stay in a first-level cache.
  static constexpr std::size_t kBlockBytes = std::size_t{16} << 10;
  void Take(std::byte* to, std::size_t bytes);
  std::span<const std::byte> FromBlock(std::size_t bytes);

  const std::span<const std::string_view> pieces_;
  XXH3_state_s* const hash_;
  std::size_t left_ = 0;           // bytes of the pieces
  std::size_t piece_ = 0, at_ = 0;  // where the next byte is
  std::uint32_t crc32c_ = 0;
  // Bytes on their way to places too small to be summed one by one.
  std::array<std::byte, kBlockBytes> block_;
  std::size_t block_begin_ = 0, block_end_ = 0;
};

// Brings a hash of slices up to date: XXH3 of these bytes, in the widest form that the processor
// has. The state is one of xxhash.h's.
void UpdateHash(XXH3_state_s* hash, const void* data, std::size_t bytes);

}  // namespace muond
