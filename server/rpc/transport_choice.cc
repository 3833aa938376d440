#include "server/rpc/transport_choice.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"

namespace muond {
namespace {

// Why there can be no arena; nothing when there can.
struct Obstacle {
  std::string why;
  std::optional<TransportFallback> counted;
};

std::optional<Obstacle> ObstacleToArena(const TransportFacts& facts,
                                        const v1::RegisterRequest& request) {
  const auto& known = request.transports();
  if (std::find(known.begin(), known.end(), "arena") == known.end()) {
    std::optional<TransportFallback> counted;
    if (absl::StartsWith(facts.peer, "unix:")) counted = TransportFallback::kNotOffered;
    return Obstacle{"the trainer knows no other path", counted};
  }
  if (facts.boot_id.empty() || request.boot_id() != facts.boot_id) {
    return Obstacle{"trainer and daemon are on different hosts", std::nullopt};
  }
  if (facts.arena_socket.empty()) {
    return Obstacle{"same host, but " + facts.why_no_arenas, TransportFallback::kNoSocket};
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<TransportChoice> ChooseTransport(const TransportFacts& facts,
                                                const v1::RegisterRequest& request) {
  const std::string& wanted = request.transport();
  if (wanted == "grpc") {
    return TransportChoice{TransportPath::kGrpc, "the trainer asked for it", std::nullopt};
  }
  if (wanted.empty() && IsInProcess(facts.peer)) {
    return TransportChoice{TransportPath::kInProcess, "trainer and daemon are one process",
                           std::nullopt};
  }
  if (!wanted.empty() && wanted != "arena") {
    return absl::InvalidArgumentError(
        absl::StrFormat("run \"%s\": transport \"%s\": expected \"grpc\", \"arena\" or nothing",
                        request.run().name(), wanted));
  }
  const std::optional<Obstacle> obstacle = ObstacleToArena(facts, request);
  if (!obstacle) {
    return TransportChoice{TransportPath::kArena,
                           wanted.empty() ? "trainer and daemon are on one host"
                                          : "the trainer asked for it",
                           std::nullopt};
  }
  if (wanted == "arena") {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": transport \"arena\": %s", request.run().name(), obstacle->why));
  }
  return TransportChoice{TransportPath::kGrpc, obstacle->why, obstacle->counted};
}

bool IsInProcess(const std::string& peer) {
  return !absl::StartsWith(peer, "unix:") && !absl::StartsWith(peer, "ipv4:") &&
         !absl::StartsWith(peer, "ipv6:");
}

std::string TransportName(TransportPath path) {
  switch (path) {
    case TransportPath::kGrpc:
      return "grpc";
    case TransportPath::kArena:
      return "arena";
    case TransportPath::kInProcess:
      return "inprocess";
  }
  return "";
}

}  // namespace muond
