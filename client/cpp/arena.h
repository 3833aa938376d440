// A trainer's end of an arena: memory that one daemon shares with it (proto/arena_memory.h), and
// what lies where in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/arena_memory.h"

namespace muond::client {

// What an arena is asked for with.
struct ArenaRequest {
  v1::RunId id;
  std::int64_t rank = 0;
  std::int64_t window_bytes = 0;
  std::int64_t windows = 0;  // in each direction
  // Path to try before the one that the daemon names: it may be mounted elsewhere here. May be
  // empty.
  std::string socket;
};

// The memory of an arena that was opened: by `own`, a path where the socket may be mounted here, if
// it is not empty, else by the path that the daemon names.
absl::StatusOr<ReceivedArena> FetchArena(const std::string& own, const v1::OpenArenaReply& opened,
                                         absl::Duration timeout);

// One thread at a time. Streams keep the link for as long as they use its memory.
class ArenaLink {
 public:
  // One window, and the sequence number of its last use.
  struct Window {
    v1::ArenaWindow place;
    std::int64_t index = 0;
    std::int64_t sequence = 0;
  };

  // Opens an arena and fetches its memory. Errors: the daemon's, with what it said; those of
  // ReceiveArena; INTERNAL when the daemon's table makes no sense. What was opened and could not be
  // fetched is closed again by the caller's CloseArena, with `handle`.
  static absl::StatusOr<std::shared_ptr<ArenaLink>> Attach(v1::Optimizer::Stub& stub,
                                                           const ArenaRequest& request,
                                                           absl::Time deadline,
                                                           std::string* handle);

  const std::string& handle() const { return handle_; }
  const ArenaMemory& memory() const { return memory_; }
  std::vector<Window>& outgoing() { return outgoing_; }
  // Of that index in the daemon's table; null when it is none from the daemon.
  const v1::ArenaWindow* Incoming(std::int64_t index) const;
  std::int64_t window_bytes() const { return outgoing_[0].place.bytes(); }
  // The daemon is gone or has let go of the arena.
  bool lost() const { return ArenaHungUp(connection_.get()); }

 private:
  ArenaLink(std::string handle, Descriptor connection, ArenaMemory memory)
      : handle_(std::move(handle)),
        connection_(std::move(connection)),
        memory_(std::move(memory)) {}
  const std::string handle_;
  const Descriptor connection_;
  const ArenaMemory memory_;
  std::vector<Window> outgoing_;
  std::vector<Window> incoming_;
};

}  // namespace muond::client
