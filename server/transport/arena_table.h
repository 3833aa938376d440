// The arenas of a daemon: who has which, how many there may be, and which of them a trainer has
// come for.
//
// An arena is opened for a rank by OpenArena, attached once by whoever shows its handle to the
// socket (arena_socket.h), and closed when that connection ends, when the rank opens another or
// leaves its run, or when nobody came for it in time. A closed arena's memory stays until the last
// stream that uses it has ended.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/mutex.h"
#include "server/transport/arena.h"

namespace muond {

struct ArenaLimits {
  std::int64_t bytes_max = std::int64_t{1} << 30;  // of all arenas together
  std::int64_t count_max = 256;
  absl::Duration attach_within = absl::Seconds(5);   // of being opened
};

class ArenaTable {
 public:
  // `changed` hears of every change: how many arenas are attached, and the bytes of all.
  // `gpu_changed` of those in GPUs' memory, which `changed` does not count.
  using Observer = std::function<void(std::int64_t attached, std::int64_t bytes)>;
  explicit ArenaTable(const ArenaLimits& limits, Observer changed = nullptr,
                      Observer gpu_changed = nullptr);

  // Replaces the owner's former arena. Errors: those of LayOutArena and LayOutGpuArena;
  // RESOURCE_EXHAUSTED when the limits are reached or a GPU has no memory left.
  absl::StatusOr<std::shared_ptr<Arena>> Open(const ArenaOwner& owner, const ArenaSize& size,
                                              absl::Time now);
  // FAILED_PRECONDITION when there is no such arena (it was let go of), or it is another owner's.
  absl::StatusOr<std::shared_ptr<Arena>> Find(const std::string& handle,
                                              const ArenaOwner& owner) const;
  void Close(const ArenaOwner& owner);
  // Only if the owner's arena has this handle.
  void CloseHandle(const std::string& handle, const ArenaOwner& owner);

  // The trainer has come for it. PERMISSION_DENIED for a handle that is none, or was used already.
  absl::StatusOr<std::shared_ptr<Arena>> Attach(const std::string& handle);
  // Its connection has ended.
  void Detach(const std::shared_ptr<Arena>& arena);
  // Closes what nobody came for.
  void Sweep(absl::Time now);

  std::int64_t attached() const;
  std::int64_t bytes() const;  // of all that still have a user
  std::int64_t gpu_bytes() const;  // likewise, of GPUs' memory

 private:
  struct Entry {
    std::shared_ptr<Arena> arena;
    absl::Time attach_until;
    bool attached = false;
  };
  struct Books;  // outlives the table, for arenas that streams still use
  void Erase(std::map<ArenaOwner, Entry>::iterator entry) MUOND_REQUIRES(mutex_);
  Entry* Lookup(const std::string& handle) MUOND_REQUIRES(mutex_);
  absl::StatusOr<std::shared_ptr<Arena>> Make(const ArenaOwner& owner, const ArenaSize& size);
  void Tell() const;

  const ArenaLimits limits_;
  const std::shared_ptr<Books> books_;
  mutable Mutex mutex_;
  std::map<ArenaOwner, Entry> entries_ MUOND_GUARDED_BY(mutex_);
};

}  // namespace muond
