#include "server/rpc/transport_choice.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"

namespace muond {
namespace {

// Why a path can't be had; nothing when it can.
struct Obstacle {
  std::string why;
  std::optional<TransportFallback> counted;
  bool senseless = false;  // no daemon could give it
};

// One path, in the order in which they are preferred.
struct Candidate {
  TransportPath path;
  const char* reason;  // to take it
  std::optional<Obstacle> obstacle;
};

bool Knows(const v1::RegisterRequest& request, const char* path) {
  const auto& known = request.transports();
  return std::find(known.begin(), known.end(), path) != known.end();
}

bool SameHost(const TransportFacts& facts, const v1::RegisterRequest& request) {
  return !facts.boot_id.empty() && request.boot_id() == facts.boot_id;
}

const kernels::DeviceMemory* Find(const TransportFacts& facts, const std::string& gpu) {
  const auto found = std::find_if(facts.gpus.begin(), facts.gpus.end(),
                                  [&](const auto* g) { return g->uuid() == gpu; });
  return found == facts.gpus.end() ? nullptr : *found;
}

// What keeps a trainer's GPU and the daemon's apart.
std::optional<Obstacle> OtherGpu(const TransportFacts& facts, const v1::RegisterRequest& request) {
  if (facts.gpus.empty()) return Obstacle{"the daemon computes on no GPU", std::nullopt};
  const kernels::DeviceMemory* const gpu = Find(facts, request.gpu());
  if (gpu == nullptr) {
    return Obstacle{absl::StrFormat("the trainer's GPU \"%s\" is none of the daemon's",
                                    request.gpu()),
                    TransportFallback::kOtherGpu};
  }
  if (facts.gpus.size() > 1 && !gpu->shared_with_peers()) {
    return Obstacle{"the daemon's GPUs can't reach each other's memory",
                    TransportFallback::kOtherGpu};
  }
  return std::nullopt;
}

std::optional<Obstacle> ObstacleToPointer(const TransportFacts& facts,
                                          const v1::RegisterRequest& request) {
  if (!IsInProcess(facts.peer)) {
    return Obstacle{"trainer and daemon are different processes", std::nullopt, true};
  }
  if (!Knows(request, "pointer")) return Obstacle{"the trainer does not know it", std::nullopt};
  if (!request.gpu().empty()) return OtherGpu(facts, request);
  if (facts.host_backend) return std::nullopt;
  return Obstacle{"the trainer's buffers are in host memory, the daemon's on a GPU", std::nullopt};
}

std::optional<Obstacle> ObstacleToIpc(const TransportFacts& facts,
                                      const v1::RegisterRequest& request) {
  if (request.gpu().empty()) return Obstacle{"the trainer names no GPU", std::nullopt};
  if (!Knows(request, "cuda-ipc")) return Obstacle{"the trainer does not know it", std::nullopt};
  if (IsInProcess(facts.peer)) {
    return Obstacle{"a process can't open its own memory handles: pointers serve there",
                    std::nullopt, true};
  }
  if (!SameHost(facts, request)) {
    return Obstacle{"trainer and daemon are on different hosts", std::nullopt};
  }
  if (auto other = OtherGpu(facts, request)) return other;
  if (facts.arena_socket.empty()) {
    return Obstacle{"same GPU, but " + facts.why_no_arenas, TransportFallback::kNoSocket};
  }
  const std::string& theirs = request.pid_namespace();
  if (!facts.pid_namespace.empty() && !theirs.empty() && theirs != facts.pid_namespace) {
    return Obstacle{
        absl::StrFormat("trainer and daemon are in different process namespaces (%s and %s), where "
                        "GPU memory can't be shared",
                        theirs, facts.pid_namespace),
        TransportFallback::kNamespace};
  }
  return std::nullopt;
}

std::optional<Obstacle> ObstacleToNccl(const TransportFacts& facts,
                                       const v1::RegisterRequest& request) {
  if (request.gpu().empty()) return Obstacle{"the trainer names no GPU", std::nullopt};
  if (!Knows(request, "nccl")) return Obstacle{"the trainer does not know it", std::nullopt};
  if (facts.gpus.empty()) return Obstacle{"the daemon computes on no GPU", std::nullopt};
  // Also of a daemon with several: NCCL is not for a GPU that it computes on.
  const bool own = Find(facts, request.gpu()) != nullptr;
  const absl::Status status =
      own || facts.pairs == nullptr
          ? absl::InvalidArgumentError(
                "trainer and daemon are on one GPU, where NCCL refuses two ranks: cuda-ipc serves "
                "there")
          : facts.pairs->Check({static_cast<int>(request.nccl_version()), request.gpu()});
  if (status.ok()) return std::nullopt;
  return Obstacle{std::string(status.message()),
                  own ? std::nullopt : std::optional(TransportFallback::kVersion),
                  absl::IsInvalidArgument(status)};
}

std::optional<Obstacle> ObstacleToArena(const TransportFacts& facts,
                                        const v1::RegisterRequest& request) {
  if (!Knows(request, "arena")) {
    std::optional<TransportFallback> counted;
    if (absl::StartsWith(facts.peer, "unix:")) counted = TransportFallback::kNotOffered;
    return Obstacle{"the trainer knows no other path", counted};
  }
  if (!SameHost(facts, request)) {
    return Obstacle{"trainer and daemon are on different hosts", std::nullopt};
  }
  if (facts.arena_socket.empty()) {
    return Obstacle{"same host, but " + facts.why_no_arenas, TransportFallback::kNoSocket};
  }
  return std::nullopt;
}

std::vector<Candidate> CandidatesFor(const TransportFacts& facts,
                                     const v1::RegisterRequest& request) {
  std::vector<Candidate> all = {
      {TransportPath::kPointer, "trainer and daemon are one process",
       ObstacleToPointer(facts, request)},
      {TransportPath::kCudaIpc, "trainer and daemon are on one GPU", ObstacleToIpc(facts, request)},
      {TransportPath::kNccl, "trainer and daemon have a GPU each", ObstacleToNccl(facts, request)},
      {TransportPath::kArena, "trainer and daemon are on one host",
       ObstacleToArena(facts, request)},
      {TransportPath::kGrpc, "the trainer asked for it", std::nullopt}};
  return all;
}

}  // namespace

absl::StatusOr<TransportChoice> ChooseTransport(const TransportFacts& facts,
                                                const v1::RegisterRequest& request) {
  const std::string& wanted = request.transport();
  const std::vector<Candidate> candidates = CandidatesFor(facts, request);
  TransportChoice choice;
  for (const Candidate& candidate : candidates) {
    choice.offers.emplace_back(TransportName(candidate.path),
                               candidate.obstacle ? candidate.obstacle->why : "");
  }
  if (!wanted.empty()) {
    const auto found = std::find_if(candidates.begin(), candidates.end(), [&](const auto& c) {
      return TransportName(c.path) == wanted;
    });
    if (found == candidates.end()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "run \"%s\": transport \"%s\": expected \"grpc\", \"arena\", \"cuda-ipc\", \"nccl\", "
          "\"pointer\" or nothing",
          request.run().name(), wanted));
    }
    if (found->obstacle) {
      const bool senseless = found->obstacle->senseless;
      return absl::Status(senseless ? absl::StatusCode::kInvalidArgument
                                    : absl::StatusCode::kFailedPrecondition,
                          absl::StrFormat("run \"%s\": transport \"%s\": %s", request.run().name(),
                                          wanted, found->obstacle->why));
    }
    choice.path = found->path;
    choice.reason = "the trainer asked for it";
    return choice;
  }
  // Of a trainer with a GPU, what kept it from the fastest path; else from an arena.
  const Candidate* best = &candidates[request.gpu().empty() ? 3 : 1];
  for (const Candidate& candidate : candidates) {
    const bool grpc = candidate.path == TransportPath::kGrpc;
    const bool arena = candidate.path == TransportPath::kArena;
    if (candidate.obstacle) continue;
    if ((grpc || arena) && IsInProcess(facts.peer)) {
      choice.path = TransportPath::kInProcess;
      choice.reason = candidates[0].reason;
      return choice;
    }
    choice.path = candidate.path;
    choice.reason = grpc ? candidates[3].obstacle->why : candidate.reason;
    if ((grpc || arena) && best->obstacle) {
      choice.fallback = best->obstacle->counted;
      choice.instead_of = best->path;
      if (best->path == TransportPath::kCudaIpc) {
        choice.reason += "; cuda-ipc: " + best->obstacle->why;
      }
    }
    return choice;
  }
  return choice;
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
    case TransportPath::kPointer:
      return "pointer";
    case TransportPath::kCudaIpc:
      return "cuda-ipc";
    case TransportPath::kNccl:
      return "nccl";
  }
  return "";
}

}  // namespace muond
