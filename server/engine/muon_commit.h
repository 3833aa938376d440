// Muon's half of a commit: momentum, Newton-Schulz, apply, batch by batch in bounded scratch.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/engine.h"

namespace muond {

class MuonCommit {
 public:
  MuonCommit(Engine& engine, const CommitRequest& request);

  // Bytes of scratch that Run needs for any of these states: U and O of one batch in the iterate
  // dtype, and a packed copy of U where a row split gathers rows.
  static std::size_t ScratchBytes(const std::vector<ShardState>& states,
                                  const kernels::Backend& backend);
  // Bytes that the backend's Newton-Schulz takes meanwhile.
  static std::size_t NewtonSchulzBytes(const std::vector<ShardState>& states,
                                       const kernels::Backend& backend);

  // Applies the step to `states` (indices of Muon states, all reduced). A matrix that can't be
  // orthogonalized stops the run: report.failure says which; its weights are left as they were.
  absl::Status Run(const std::vector<int>& states, CommitReport& report);

 private:
  // One matrix of the batch: which rows of which state it came from.
  struct Part {
    int state;
    const MatrixBlock* block;
  };
  // Of one batch; the lists of a kind run in parallel.
  struct Batch {
    const std::vector<int>& states;
    std::vector<kernels::MomentumJob> momenta;  // one per state
    std::vector<kernels::CopyJob> gathers;
    std::vector<kernels::MatrixJob> matrices;  // one per part
    std::vector<double> o_scales;              // likewise
    std::vector<Part> parts;
    std::vector<double> output_norms = {};  // |O|_F of each part
    // U of the batch, and the distance from a matrix's O to what may be overwritten of U once all
    // is orthogonalized.
    char* u = nullptr;
    std::ptrdiff_t from_o_to_u = 0;
  };
  absl::Status RunBatch(const std::vector<int>& states, CommitReport& report);
  void LayOut(Batch& batch) const;
  kernels::MomentumJob MomentumJobOf(const ShardState& state, char* u) const;
  absl::Status UpdateMomenta(const Batch& batch, CommitReport& report);
  absl::Status OrthogonalizeAll(Batch& batch, CommitReport& report);
  absl::Status Orthogonalize(Batch& batch, const std::vector<std::size_t>& members,
                             CommitReport& report);
  // Of a sampled commit, after OrthogonalizeAll: overwrites U.
  absl::Status MeasureResiduals(const Batch& batch, CommitReport& report);
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
