// Which parameters a run has, how they are routed, who owns what, and which rank holds which
// slices. Pure values; the run owns the one instance.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/values.h"
#include "server/registry/cover.h"
#include "server/registry/plan.h"
#include "server/registry/routing.h"

namespace muond {

// What a daemon is willing to take; every limit has a flag.
struct RegistryLimits {
  std::int64_t parameters_max = 1'000'000;                // --max-parameters
  std::int64_t tensor_bytes_max = std::int64_t{2} << 30;  // --max-tensor-bytes, of a tensor in fp32
  std::int64_t run_bytes_max = 0;                         // --max-run-bytes, 0: no limit
  std::int64_t world_size_max = 65'536;                   // --max-world-size
  std::int64_t slices_per_rank_max = 4'000'000;           // --max-slices-per-rank
};

// Which of a run's daemons this one is.
struct Placement {
  PlanOptions plan;
  int daemon = 0;
};

class Registry {
 public:
  // Validates and routes the whole run (see RouteParameters), checks limits (RESOURCE_EXHAUSTED
  // with the flag that raises them). An empty model is INVALID_ARGUMENT.
  //
  // A run's bytes are the state that this daemon owns (master weights and momentum, or master
  // weights and two moments, in fp32, each tie once) and one staged gradient of it for each name in
  // its dtype.
  static absl::StatusOr<Registry> Create(RunSpec spec, const RegistryLimits& limits,
                                         const Placement& placement = {});

  const RunSpec& spec() const { return spec_; }
  const Routing& routing() const { return routing_; }
  const Plan& plan() const { return plan_; }
  // What this daemon owns of a parameter (of a tied name: of its tie): ascending, none adjacent
  // unless they lie on different devices; empty when it owns nothing. `owner` is the device.
  const std::vector<Shard>& ShardsHere(int parameter) const {
    return here_[routing_.parameters[parameter].state];
  }
  // Elements in them.
  std::int64_t ElementsHere(int parameter) const;
  // Bytes of optimizer state; the same and one staged copy of the gradients.
  std::int64_t state_bytes() const { return state_bytes_; }
  std::int64_t run_bytes() const { return run_bytes_; }
  // Index of a parameter by name, -1 when unknown.
  int Find(const std::string& name) const;

  // The run with more parameters, none of its ranks joined yet. Ranks of this one join it with
  // JoinAdded. Errors as Create, and INVALID_ARGUMENT for a name tied to a parameter that was there
  // before; FAILED_PRECONDITION when Muon would be inactive in what is added.
  absl::StatusOr<Registry> WithAdded(const std::vector<GroupSpec>& groups,
                                     const std::vector<ParameterSpec>& parameters,
                                     const RegistryLimits& limits,
                                     const Placement& placement) const;

  // A rank joins with what it holds. Identical repeat with the same session: OK, `rejoined` true.
  // A trainer that has restarted may name only the first `known` parameters, those before an
  // addition, and their slices.
  // Errors, all leaving the registry as it was:
  //   INVALID_ARGUMENT  rank out of range, a box outside its tensor, slices of one rank overlap,
  //                     slices of a sliced parameter overlap another rank's (interval named), a
  //                     replicated parameter's slices that don't tile the tensor, a declared shape
  //                     that disagrees with the slices' elements (placeholder hint), slices of a
  //                     name tied as the same tensor; once all ranks are in: gaps (interval named)
  //   NOT_FOUND         slices of an unknown parameter
  //   ALREADY_EXISTS    the rank is held by another session, or came with other slices before
  struct JoinResult {
    bool rejoined = false;
    std::vector<std::int64_t> missing_ranks;
  };
  absl::StatusOr<JoinResult> Join(std::int64_t rank, const std::string& session,
                                  const RankSlices& slices, std::size_t known = SIZE_MAX);
  // A rank of `before` joins as it did there, with slices of the added parameters.
  absl::StatusOr<JoinResult> JoinAdded(const Registry& before, std::int64_t rank,
                                       const RankSlices& added);
  // OK iff parameters [first, first + n) are one addition, these, and the rank holds these slices
  // of them: INVALID_ARGUMENT that names the first difference.
  absl::Status CheckAdded(std::int64_t rank, std::size_t first,
                          const std::vector<ParameterSpec>& parameters,
                          const RankSlices& slices) const;

  // OK iff another rank's (or a restarted one's) spec is the same, or this one before one of its
  // additions; else INVALID_ARGUMENT that names the first field that differs and both values. How
  // many additions it took to come there is this registry's to know.
  absl::Status CheckSameSpec(const RunSpec& other) const;

  // True once every rank of the run has joined.
  bool complete() const { return static_cast<std::int64_t>(ranks_.size()) == spec_.world_size; }
  std::vector<std::int64_t> missing_ranks() const;
  std::vector<std::int64_t> joined_ranks() const;

  // The boxes of one parameter on one rank, in registration order; empty when it has none, and for
  // parameters without elements, of which there is nothing to push.
  const std::vector<Box>& SlicesOf(int parameter, std::int64_t rank) const;

 private:
  using SlicesByIndex = std::map<int, std::vector<Box>>;
  struct Rank {
    std::string session;
    SlicesByIndex slices;
  };

  absl::Status CheckAddition(std::size_t first) const;
  void KeepShards(const Placement& placement);
  void CountBytes();
  absl::StatusOr<SlicesByIndex> CheckSlices(std::int64_t rank, const RankSlices& slices) const;
  absl::Status CheckBoxes(int parameter, std::int64_t rank, const std::vector<Box>& boxes) const;
  absl::Status CheckAgainstOthers(int parameter, std::int64_t rank,
                                  const std::vector<Box>& boxes) const;
  absl::Status CheckComplete(std::int64_t rank, const SlicesByIndex& mine) const;

  RunSpec spec_;
  Routing routing_;
  Plan plan_;
  std::vector<std::vector<Shard>> here_;  // by state
  std::int64_t state_bytes_ = 0;
  std::int64_t run_bytes_ = 0;
  std::int64_t slices_per_rank_max_ = 0;
  std::unordered_map<std::string, int> index_;
  std::map<std::int64_t, Rank> ranks_;
  // By parameter: the boxes of all ranks that have joined, and their elements (replicas add up).
  std::vector<std::vector<OwnedBox>> held_;
  std::vector<std::int64_t> held_elements_;
};

}  // namespace muond
