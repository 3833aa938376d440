#include "server/buddy/buddy_fetch.h"

#include <cstring>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "proto/check.h"
#include "proto/crc32c.h"
#include "proto/grpc_deadline.h"
#include "proto/status.h"
#include "proto/steady_time.h"
#include "server/buddy/buddy_sender.h"

namespace muond {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(10);
constexpr absl::Duration kPause = absl::Milliseconds(50);
// How long a buddy may take to come to the version that the others have.
constexpr absl::Duration kIndexWait = absl::Seconds(20);
constexpr std::int64_t kReadBytes = std::int64_t{1} << 20;

v1::Buddy::Stub& BuddyOfThis(Peers& peers) {
  return peers.buddy(BuddyOf(peers.self(), peers.count()));
}

}  // namespace

absl::StatusOr<v1::BuddyIndexReply> AskIndex(Peers& peers, const v1::BuddyIndexRequest& request) {
  const absl::Time deadline = SteadyNow() + kIndexWait;
  for (;;) {
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadlineIn(kCallTimeout));
    v1::BuddyIndexReply index;
    absl::Status status = FromGrpc(BuddyOfThis(peers).Index(&context, request, &index));
    if (status.ok()) return index;
    if (absl::IsAborted(status)) return absl::FailedPreconditionError(status.message());
    if (!absl::IsUnavailable(status) || SteadyNow() > deadline) return status;
    absl::SleepFor(kPause);
  }
}

absl::Status ReadItem(Peers& peers, const v1::PeerRun& introduction, std::int64_t item, char* out,
                      std::int64_t bytes, const std::function<absl::Status()>& stopped) {
  v1::BuddyReadRequest request;
  *request.mutable_peer() = introduction;
  request.set_item(item);
  request.set_bytes(kReadBytes);
  for (std::int64_t at = 0; at < bytes;) {
    MUOND_RETURN_IF_ERROR(stopped());
    request.set_offset(at);
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadlineIn(kCallTimeout));
    v1::BuddyReadReply reply;
    MUOND_RETURN_IF_ERROR(FromGrpc(BuddyOfThis(peers).Read(&context, request, &reply)));
    const std::string& data = reply.data();
    const auto size = static_cast<std::int64_t>(data.size());
    if (size == 0 || size > bytes - at || Crc32c(data.data(), data.size()) != reply.crc32c()) {
      return absl::DataLossError(absl::StrFormat(
          "run \"%s\": buddy: item %d at %d: %d bytes came, or others than were sent",
          introduction.run(), item, at, size));
    }
    std::memcpy(out + at, data.data(), data.size());
    at += size;
  }
  return absl::OkStatus();
}

}  // namespace muond
