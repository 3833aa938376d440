#include "server/transport/placing_reader.h"

#include <algorithm>
#include <cstring>

#include "proto/crc32c.h"
#if MUOND_XXHASH_DISPATCH
// The library's plain functions are compiled for the oldest processor: 5 GB/s where this has 80.
#include "xxh_x86dispatch.h"
#else
#include "xxhash.h"
#endif

namespace muond {
namespace {

// A place that takes fewer bytes at once is filled through the block.
constexpr std::size_t kDirectBytes = 2048;

}  // namespace

void UpdateHash(XXH3_state_s* hash, const void* data, std::size_t bytes) {
#if MUOND_XXHASH_DISPATCH
  XXH3_64bits_update_dispatch(hash, data, bytes);
#else
  XXH3_64bits_update(hash, data, bytes);
#endif
}

void PlacingReader::Take(std::byte* to, std::size_t bytes) {
  left_ -= bytes;
  for (std::size_t done = 0; done < bytes;) {
    const std::string_view rest = pieces_[piece_].substr(at_);
    const std::size_t n = std::min(bytes - done, rest.size());
    std::memcpy(to + done, rest.data(), n);
    done += n;
    at_ += n;
    if (at_ < pieces_[piece_].size()) continue;
    ++piece_;
    at_ = 0;
  }
  crc32c_ = Crc32c(to, bytes, crc32c_);
  UpdateHash(hash_, to, bytes);
}

std::span<const std::byte> PlacingReader::FromBlock(std::size_t bytes) {
  if (block_begin_ == block_end_) {
    block_begin_ = 0;
    block_end_ = std::min(kBlockBytes, left_);
    Take(block_.data(), block_end_);
  }
  const std::size_t n = std::min(bytes, block_end_ - block_begin_);
  block_begin_ += n;
  return {block_.data() + block_begin_ - n, n};
}

void PlacingReader::Read(std::byte* to, std::size_t bytes) {
  while (bytes > 0) {
    std::size_t n = std::min(bytes, kBlockBytes);
    if (block_begin_ == block_end_ && bytes >= kDirectBytes) {
      Take(to, n);
    } else {
      const std::span<const std::byte> from = FromBlock(bytes);
      n = from.size();
      std::memcpy(to, from.data(), n);
    }
    to += n;
    bytes -= n;
  }
}

void PlacingReader::Skip(std::size_t bytes) {
  while (bytes > 0) bytes -= FromBlock(bytes).size();
}

}  // namespace muond
