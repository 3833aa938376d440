// Memory that a daemon shares with one trainer, as both see it: how it is made and mapped, its
// fences, and how it passes from one process to the other.
//
// The daemon makes it (a sealed memfd: nobody can shrink it under the other's feet) and hands it
// over once, through a unix socket of its own beside gRPC's. Whoever shows the handle that
// OpenArena returned gets the descriptor. The connection then stands for the arena: when the kernel
// closes it, because the trainer let go or died, the daemon forgets the arena.
//
// A fence is a slot of 64 bits that one side sets to the number of what it has done and the other
// side reads. A trainer may wait for a slot; a daemon never waits for what a trainer can write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace muond {

// A file descriptor that is closed at the end.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.Release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release();

 private:
  int fd_ = -1;
};

// One mapping. Thread-safe as far as its contents are.
class ArenaMemory {
 public:
  // New memory of `bytes` bytes, zeroed and committed, its size sealed. The caller bounds the size:
  // the kernel takes pages until there are none. RESOURCE_EXHAUSTED when it can't be made.
  static absl::StatusOr<ArenaMemory> Create(std::int64_t bytes);
  // Maps what was handed over. INVALID_ARGUMENT unless it is sealed memory of that size.
  static absl::StatusOr<ArenaMemory> Map(Descriptor descriptor, std::int64_t bytes);
  ArenaMemory(ArenaMemory&& other) noexcept;
  ArenaMemory& operator=(ArenaMemory&&) = delete;
  ~ArenaMemory();

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  // Of the memory; not valid once it was dropped.
  int descriptor() const { return descriptor_.get(); }
  // The mapping stays.
  void DropDescriptor() { descriptor_ = Descriptor(); }

  // Slots, at multiples of 8 inside the memory. What was written before Set is there for a reader
  // whose Get returns the value.
  std::uint64_t Get(std::int64_t slot) const;
  // Wakes whoever waits.
  void Set(std::int64_t slot, std::uint64_t value) const;
  // Returns when the slot may differ from `seen`, at the latest after `timeout`.
  void WaitWhile(std::int64_t slot, std::uint64_t seen, absl::Duration timeout) const;
  // Lets waiters look again.
  void Wake(std::int64_t slot) const;

 private:
  ArenaMemory(Descriptor descriptor, std::byte* data, std::int64_t bytes)
      : descriptor_(std::move(descriptor)), data_(data), bytes_(bytes) {}
  Descriptor descriptor_;
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// ---- Handing over -----------------------------------------------------------------------------

inline constexpr std::size_t kArenaHandleBytes = 16;
// What a trainer sends first: these 8 bytes, then the handle, in one packet.
inline constexpr char kArenaGreeting[] = "muondA1\n";
inline constexpr std::size_t kArenaGreetingBytes = 8 + kArenaHandleBytes;

// The trainer's side: connects to the socket, shows the handle, receives the memory. The connection
// must be kept for as long as the arena is used. Errors name the cause: no such socket, refused by
// the daemon (its words), no answer in time.
struct ReceivedArena {
  Descriptor connection;
  Descriptor memory;
};
absl::StatusOr<ReceivedArena> ReceiveArena(const std::string& socket, const std::string& handle,
                                           absl::Duration timeout);
// Whether the other side of such a connection has closed it.
bool ArenaHungUp(int connection);

// The daemon's side: hands the memory over, or the reason why not (`memory` -1).
absl::Status SendArena(int connection, int memory, const std::string& refusal);

// The process namespace that this process is in; empty where it can't be read.
std::string PidNamespace();
// Identity of this host's running kernel; empty where it can't be read.
std::string BootId();

}  // namespace muond
