// Muon's half of a commit: momentum, Newton-Schulz, apply, batch by batch in bounded scratch; and
// Newton-Schulz ahead of the commit, which then only needs the rest.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/engine.h"

namespace muond {

class MuonCommit {
 public:
  MuonCommit(Engine& engine, const CommitRequest& request);

  // Bytes of scratch that Run needs for any of these states: U of one batch in the iterate dtype, O
  // of it unless O has a place of its own, and a packed copy of U where a row split gathers rows.
  static std::size_t ScratchBytes(std::span<const ShardState> states,
                                  const kernels::Backend& backend, bool overlap);
  // Bytes that the backend's Newton-Schulz takes meanwhile.
  static std::size_t NewtonSchulzBytes(const std::vector<ShardState>& states, bool overlap,
                                       const kernels::Backend& backend);
  // Bytes of O of all their matrices.
  static std::size_t ResultBytes(std::span<const ShardState> states,
                                 const kernels::Backend& backend);
  // How much is orthogonalized early at a time, unless a single state is larger: what comes in
  // meanwhile waits for the end of it.
  static std::int64_t EarlyElements(const kernels::Backend& backend);
  // With less than this the work waits for more, unless no more will come: few matrices take a
  // device as long as many.
  static std::int64_t EarlyLeast(const kernels::Backend& backend);

  // Applies the step to `states` (indices of Muon states, all reduced). A matrix that can't be
  // orthogonalized stops the run: report.failure says which; its weights are left as they were.
  absl::Status Run(const std::vector<int>& states, CommitReport& report);

  // Writes O of `states`, one batch, to its place, and what Newton-Schulz found; M is only read.
  absl::Status OrthogonalizeEarly(const std::vector<int>& states);

 private:
  // One matrix of the batch: which rows of which state it came from.
  struct Part {
    int state;
    const MatrixBlock* block;
    void* spare;  // as large as O, in what may be overwritten of U once all is orthogonalized
  };
  // Of one batch; the lists of a kind run in parallel.
  struct Batch {
    const std::vector<int>& states;
    std::vector<kernels::MomentumJob> momenta;  // one per state
    std::vector<kernels::CopyJob> gathers;
    std::vector<kernels::MatrixJob> matrices;  // one per part
    std::vector<Part> parts;
    std::vector<kernels::NewtonSchulzResult> results;  // likewise
  };
  absl::Status RunBatch(const std::vector<int>& states, CommitReport& report);
  bool Ready(const ShardState& state) const;
  void LayOut(Batch& batch, bool write_m) const;
  kernels::MomentumJob MomentumJobOf(const ShardState& state, char* u) const;
  // `report`: of a commit, which writes M; null: nothing but U is written.
  absl::Status UpdateMomenta(const Batch& batch, CommitReport* report);
  absl::Status OrthogonalizeAll(Batch& batch);
  absl::Status Orthogonalize(Batch& batch, const std::vector<std::size_t>& members);
  void Count(const Batch& batch, CommitReport& report) const;
  // Of a sampled commit, after OrthogonalizeAll: overwrites U.
  void MeasureResiduals(const Batch& batch, CommitReport& report);
  void NoteUpdate(const ShardState& state, double update_squares, CommitReport& report);
  absl::Status ApplyAll(const Batch& batch, CommitReport& report);

  Engine& engine_;
  const CommitRequest& request_;
  const std::size_t element_bytes_;  // of the iterate dtype
};

// Elements of Muon parameters that share one batch, unless a single one is larger. A device wants
// more at a time to be busy, and needs half the bytes for each.
inline constexpr std::int64_t kMuonBatchElements = std::int64_t{32} << 20;
inline constexpr std::int64_t kMuonDeviceBatchElements = std::int64_t{256} << 20;

}  // namespace muond
