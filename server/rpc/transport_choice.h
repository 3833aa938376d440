// Which data path a trainer gets, and why: the one place where the daemon decides so.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "muond/v1/optimizer.pb.h"
#include "server/metrics/daemon_metrics.h"

namespace muond {

struct TransportChoice {
  TransportPath path = TransportPath::kGrpc;
  std::string reason;  // in words
  // Set where an arena would have been better.
  std::optional<TransportFallback> fallback;
};

// What the daemon knows beside the request.
struct TransportFacts {
  std::string peer;          // of the call, as gRPC names it: "unix:", "ipv4:..."; else one process
  std::string boot_id;       // of this host; empty: unknown
  std::string arena_socket;  // empty: it has none
  std::string why_no_arenas;
};

// Best first: same process, same host, gRPC; or the path that the trainer insists on.
// INVALID_ARGUMENT for a path that does not exist, FAILED_PRECONDITION with the reason for one that
// can't be had.
absl::StatusOr<TransportChoice> ChooseTransport(const TransportFacts& facts,
                                                const v1::RegisterRequest& request);

// Whether a call came through a channel inside this process: it has no address then.
bool IsInProcess(const std::string& peer);

// "grpc", "arena", "inprocess".
std::string TransportName(TransportPath path);

}  // namespace muond
