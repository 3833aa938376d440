// Which data path a trainer gets, and why: the one place where the daemon decides so.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device_memory.h"
#include "muond/v1/optimizer.pb.h"
#include "server/metrics/daemon_metrics.h"
#include "server/transport/pair_table.h"

namespace muond {

struct TransportChoice {
  TransportPath path = TransportPath::kGrpc;
  std::string reason;  // in words
  // Set where a faster path could be had, and which.
  std::optional<TransportFallback> fallback;
  TransportPath instead_of = TransportPath::kArena;
  // Every path, best first, and what stands in its way; nothing: it can be had.
  std::vector<std::pair<std::string, std::string>> offers;
};

// What the daemon knows beside the request.
struct TransportFacts {
  std::string peer;          // of the call, as gRPC names it: "unix:", "ipv4:..."; else one process
  std::string boot_id;       // of this host; empty: unknown
  std::string arena_socket;  // empty: it has none
  std::string why_no_arenas;
  std::string pid_namespace;                 // of this process; empty: unknown
  std::vector<kernels::DeviceMemory*> gpus;  // of the daemon
  bool host_backend = true;                  // state is in host memory
  const PairTable* pairs = nullptr;          // null: it makes none
};

// Best first: a pointer in one process, memory of one GPU, NCCL between two, memory of one host,
// gRPC; or the path that the trainer insists on. INVALID_ARGUMENT for a path that does not exist,
// or that no daemon could give this trainer (NCCL on one GPU), FAILED_PRECONDITION with the reason
// for one that can't be had here.
absl::StatusOr<TransportChoice> ChooseTransport(const TransportFacts& facts,
                                                const v1::RegisterRequest& request);

// Whether a call came through a channel inside this process: it has no address then.
bool IsInProcess(const std::string& peer);

// "grpc", "arena", "inprocess", "pointer", "cuda-ipc", "nccl".
std::string TransportName(TransportPath path);

}  // namespace muond
