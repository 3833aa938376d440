// Muon's half of a commit: momentum, Newton-Schulz, apply, batch by batch in bounded scratch; and
// Newton-Schulz ahead of the commit, which then only needs the rest.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/engine.h"

namespace muond {

class MuonCommit {
 public:
  MuonCommit(Engine& engine, const CommitRequest& request);

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

}  // namespace muond
