// Who owns what: the plan of a run over daemons and their devices. A pure function of the run's
// specification, its routing and the list of daemons, so that every daemon and every trainer
// computes the same plan and need only compare its hash. docs/planning.md has the rules in prose.
//
//   - A matrix is whole on one owner, where Newton-Schulz runs on it. Matrices go, costliest first,
//     to the owner with the least Newton-Schulz work so far (LPT), within the memory limit.
//   - The matrices of an expert stack or of a row split are placed one by one where each is
//     contiguous and a multiple of kBlockElements; equal ones of a parameter are dealt out in runs,
//     so that an owner has few shards. Otherwise the parameter has one owner.
//   - AdamW parameters then level the bytes that the owners hold and move: small ones whole, large
//     ones cut on borders of kBlockElements.
//   - What was added to the open run (RunSpec::additions) is placed after everything before it, by
//     the same rules: an addition moves nothing, and costs some evenness.
//
// Plain values and pure functions: no thread rule.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/shard.h"
#include "proto/values.h"
#include "server/registry/routing.h"

namespace muond {

// The smallest piece that an AdamW parameter is cut into, in elements (1 MiB of fp32); one of less
// than two such pieces stays whole. Only a memory limit that can't be met otherwise goes below.
inline constexpr std::int64_t kShardElementsMin =
    4 * static_cast<std::int64_t>(kernels::kBlockElements);

// Most owners of a run: devices of all its daemons together.
inline constexpr std::int64_t kOwnersMax = std::int64_t{1} << 16;

struct PlanOptions {
  std::vector<int> devices_per_daemon = {1};  // one entry for each daemon, each at least 1
  std::int64_t memory_max_bytes = 0;          // of one owner: state, staging, scratch; 0: no limit
  bool overlap = false;            // Newton-Schulz before the verdict: its results wait in scratch
  std::int64_t iterate_bytes = 4;  // of one element in Newton-Schulz: 4 on the CPU, 2 on a GPU
  // Memory is a GPU's own: gradients lie there in fp32, and Newton-Schulz takes more at a time.
  bool device_memory = false;
};

// Owners are numbered daemon by daemon: all devices of daemon 0, then those of daemon 1, ...
struct PlanOwner {
  int daemon = 0;
  int device = 0;
  friend bool operator==(const PlanOwner&, const PlanOwner&) = default;
};

// What one owner has to do in a step, and to hold for it.
struct OwnerLoad {
  PlanOwner place;
  double flops = 0;             // of Newton-Schulz, standard form, all its iterations
  std::int64_t parameters = 0;  // states of which it holds anything
  std::int64_t matrices = 0;
  std::int64_t elements = 0;
  std::int64_t matrix_elements = 0;  // of these, Muon's
  std::int64_t state_bytes = 0;      // weights and momentum, or weights and two moments
  std::int64_t staging_bytes = 0;  // one copy of the gradients, each in its dtype; fp32 on a GPU
  std::int64_t scratch_bytes = 0;  // estimate, see docs/planning.md
  std::int64_t bytes_in = 0;       // gradients of a step; a replicated one comes from every rank
  std::int64_t bytes_out = 0;      // parameters of a version, once, each in its dtype
  std::int64_t MemoryBytes() const { return state_bytes + staging_bytes + scratch_bytes; }
};

// Whether cutting matrices, which no daemon does, would make steps shorter.
struct SplitAdvice {
  bool helps = false;
  std::string reason;     // with numbers: "48 matrices of 8192 x 2048, ..."
  std::int64_t rows = 0;  // of the costliest matrix; 0 where there is none
  std::int64_t cols = 0;
  std::int64_t count = 0;  // matrices of that cost
  double matrix_flops = 0;
  double gain = 0;              // part of the largest load that perfect levelling would take away
  std::int64_t gram_bytes = 0;  // moved per owner and step to split one: 2 Gram all-reduces
};

struct Plan {
  std::vector<Shard> shards;      // sorted by (parameter, first); each state covered exactly
  std::vector<OwnerLoad> owners;  // daemon-major
  // XXH3-128, 32 hex digits, over the daemons, their devices and every shard.
  std::string hash;
  double total_flops = 0;    // of all owners; its mean is total / owners
  double largest_flops = 0;  // of the owner with most
  double largest_matrix_flops = 0;
  // No assignment of whole matrices has a smaller largest load (SingleOwnershipFloor).
  double floor_flops = 0;
  double imbalance_over_floor = 1;  // largest / floor; 1 without matrices
  SplitAdvice split;

  double MeanFlops() const { return total_flops / static_cast<double>(owners.size()); }
  // The shards of one state in the order of their elements; empty for a tied name.
  std::span<const Shard> ShardsOf(int parameter) const;
};

// Plans the run. `routing` is RouteParameters(run). Errors:
//   INVALID_ARGUMENT    no daemon, a daemon without devices, unknown Newton-Schulz coefficients
//   RESOURCE_EXHAUSTED  too many owners or bytes to count; or the memory limit can't be met: names
//                       the first parameter that finds no owner, its bytes, and what is left
// O((n + owners) log n) for n matrices and parameters where no memory limit binds.
absl::StatusOr<Plan> MakePlan(const RunSpec& run, const Routing& routing,
                              const PlanOptions& options);

// The matrices of a Muon parameter that lie in one of its shards, with row ranges counted from the
// shard's first element. A shard holds whole matrices only.
std::vector<MatrixBlock> MatricesIn(const RoutedParameter& routed, const Shard& shard);

}  // namespace muond
