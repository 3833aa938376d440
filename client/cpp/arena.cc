#include "client/cpp/arena.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cpp/retry.h"
#include "proto/check.h"
#include "proto/steady_time.h"

namespace muond::client {
namespace {

bool Inside(std::int64_t offset, std::int64_t bytes, std::int64_t total) {
  return offset >= 0 && bytes >= 0 && bytes <= total && offset <= total - bytes;
}

bool MakesSense(const v1::ArenaWindow& window, std::int64_t total) {
  return window.bytes() > 0 && Inside(window.offset(), window.bytes(), total) &&
         Inside(window.filled(), 8, total) && window.filled() % 8 == 0 &&
         Inside(window.drained(), 8, total) && window.drained() % 8 == 0;
}

}  // namespace

absl::StatusOr<ReceivedArena> FetchArena(const std::string& own, const v1::OpenArenaReply& opened,
                                         absl::Duration timeout) {
  const absl::Time deadline = SteadyNow() + timeout;
  if (!own.empty() && own != opened.socket()) {
    auto received = ReceiveArena(own, opened.handle(), timeout);
    // A daemon that answered has said all: the handle is used up.
    if (received.ok() || absl::IsPermissionDenied(received.status())) return received;
  }
  return ReceiveArena(opened.socket(), opened.handle(), deadline - SteadyNow());
}

absl::StatusOr<std::shared_ptr<ArenaLink>> ArenaLink::Attach(v1::Optimizer::Stub& stub,
                                                             const ArenaRequest& request,
                                                             absl::Time deadline,
                                                             std::string* handle) {
  v1::OpenArenaRequest open;
  *open.mutable_id() = request.id;
  open.set_rank(request.rank);
  open.set_window_bytes(request.window_bytes);
  open.set_windows(request.windows);
  v1::OpenArenaReply opened;
  const CallResult result =
      CallOnce(stub, &v1::Optimizer::Stub::OpenArena, open, &opened, deadline);
  MUOND_RETURN_IF_ERROR(result.status);
  *handle = opened.handle();
  MUOND_ASSIGN_OR_RETURN(ReceivedArena received,
                         FetchArena(request.socket, opened, deadline - SteadyNow()));
  MUOND_ASSIGN_OR_RETURN(ArenaMemory memory,
                         ArenaMemory::Map(std::move(received.memory), opened.bytes()));
  // The mapping is all that is needed.
  memory.DropDescriptor();
  std::shared_ptr<ArenaLink> link(
      new ArenaLink(opened.handle(), std::move(received.connection), std::move(memory)));
  for (std::int64_t i = 0; i < opened.windows_size(); ++i) {
    const v1::ArenaWindow& window = opened.windows(static_cast<int>(i));
    if (!MakesSense(window, opened.bytes())) {
      return absl::InternalError(
          absl::StrFormat("run \"%s\": arena: window %d is not inside the arena's %d bytes",
                          request.id.run(), i, opened.bytes()));
    }
    (window.to_daemon() ? link->outgoing_ : link->incoming_).push_back({window, i, 0});
  }
  if (link->outgoing_.empty() || link->incoming_.empty()) {
    return absl::InternalError(
        absl::StrFormat("run \"%s\": arena: it has no windows", request.id.run()));
  }
  return link;
}

const v1::ArenaWindow* ArenaLink::Incoming(std::int64_t index) const {
  for (const Window& window : incoming_) {
    if (window.index == index) return &window.place;
  }
  return nullptr;
}

}  // namespace muond::client
