#include "proto/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>

namespace muond {

std::uint32_t Crc32c(const void* data, std::size_t bytes, std::uint32_t previous) {
  // ISA-L has the bare polynomial division: both complements are the caller's. It counts in int and
  // takes a pointer to mutable bytes that it only reads.
  constexpr std::size_t kPieceBytes = std::size_t{1} << 30;
  auto* at = const_cast<unsigned char*>(static_cast<const unsigned char*>(data));
  unsigned int crc = ~previous;
  while (bytes > 0) {
    const std::size_t piece = std::min(bytes, kPieceBytes);
    crc = crc32_iscsi(at, static_cast<int>(piece), crc);
    at += piece;
    bytes -= piece;
  }
  return ~crc;
}

}  // namespace muond
