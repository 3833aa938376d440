// One device's memory as data paths use it: blocks that other processes can map, and moves that sum
// what they move.
//
// A move takes a slice, or a row of one, from where a trainer has put it to where a step reads it,
// and adds to a sum that tells two slices apart: the digest of what came this way. With w(g) the
// g-th eight bytes of the slice's elements in the slice's own order, little endian, zeros beyond
// the end, it is
//   sum over g of w(g) * c(g) mod 2^64,   c(g) = mix(g) | 1,
//   mix(g) = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9,   x = (g + 1) * 0x9E3779B97F4A7C15.
// An element adds its bits, shifted to where they lie in their eight bytes, times c: so the sum is
// exact in any order and in any cut, and thousands of threads may take it while they copy, which a
// digest by a chain (XXH3) does not allow; and a factor serves eight bytes, so that memory is what
// bounds a move. c(g) is odd: eight bytes that differ always show, several of them go unseen once
// in 2^64.
//
// Any thread, any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "kernels/backend.h"
#include "kernels/device_loss.h"
#include "kernels/tensor.h"

namespace muond::kernels {

// `elements` elements of element_bytes (2 or 4) each, from `src` to `dst`, which don't overlap;
// `dst` null: they are only summed. `first` is the first one's i, `sum` the index of its sum.
struct MoveJob {
  void* dst = nullptr;
  const void* src = nullptr;
  std::size_t elements = 0;
  std::uint32_t element_bytes = 4;
  std::uint32_t sum = 0;
  std::uint64_t first = 0;
};

// The factor c(g) above.
inline constexpr std::uint64_t SumFactor(std::uint64_t g) {
  const std::uint64_t x = (g + 1) * 0x9E3779B97F4A7C15u;
  return ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u) | 1u;
}
// What elements in host memory add to their sum.
std::uint64_t SumOf(const void* data, std::size_t elements, std::uint32_t element_bytes,
                    std::uint64_t first);

// A block that another process can map.
struct SharedBlock {
  void* data = nullptr;
  std::string handle;  // 64 bytes
};
inline constexpr std::size_t kSharedHandleBytes = 64;
// Blocks are multiples of this: so none shares its pages, and what a handle names begins at the
// block.
inline constexpr std::size_t kSharedBlockBytes = std::size_t{2} << 20;

class DeviceMemory : public Losable {
 public:
  virtual ~DeviceMemory() = default;

  // "GPU-xxxxxxxx-...", by which trainers name it. Empty: host memory.
  virtual std::string_view uuid() const = 0;
  // Zeroed memory of its own allocation. `bytes` is a multiple of kSharedBlockBytes.
  virtual Error AllocateShared(std::size_t bytes, SharedBlock* block) = 0;
  virtual void FreeShared(void* data) = 0;
  // Carries out all moves and adds to the sums, which the caller has set to 0. On return all is
  // there. `dst` and `src` may be any memory that this device reaches; `dst` also host memory that
  // AllocateStaging gave.
  virtual Error MoveAll(std::span<const MoveJob> jobs, std::span<std::uint64_t> sums) = 0;
  // Bytes from the host, any, to this device.
  virtual Error Write(void* dst, const void* host, std::size_t bytes) = 0;
  // And back.
  virtual Error Read(void* host, const void* src, std::size_t bytes) = 0;
  // Whether backends on the other devices of this process reach this memory, too, and it theirs.
  virtual bool shared_with_peers() const { return true; }
  // Whether moves may read the whole of this memory: a pointer that somebody else names is asked
  // for first.
  virtual bool Reaches(const void* data, std::size_t bytes) const = 0;
};

// Host memory under the same interface: what an in-process trainer's pointers are read by, and what
// tests take for a device. Handles are good in this process only; OpenHostBlock finds the memory,
// null where there is none by that handle.
std::unique_ptr<DeviceMemory> MakeHostDeviceMemory(std::string uuid = "");
void* OpenHostBlock(const std::string& handle);

}  // namespace muond::kernels
