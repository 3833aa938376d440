// CRC-32C (Castagnoli, reflected, initial and final complement: RFC 3720) of bytes on the wire.
#pragma once

#include <cstddef>
#include <cstdint>

namespace muond {

// The CRC of `bytes` bytes that follow data whose CRC is `previous`; 0 for none.
// Crc32c("123456789", 9) == 0xe3069283.
std::uint32_t Crc32c(const void* data, std::size_t bytes, std::uint32_t previous = 0);

}  // namespace muond
