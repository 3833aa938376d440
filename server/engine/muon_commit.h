// Muon's half of a commit: momentum, Newton-Schulz, apply, batch by batch in bounded scratch.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "server/engine/engine.h"

namespace muond {

class MuonCommit {
 public:
  MuonCommit(Engine& engine, const CommitRequest& request) : engine_(engine), request_(request) {}

  // Bytes of scratch that Run needs for these states: U and O of one batch, and a packed copy of U
  // where a row split gathers rows.
  static std::size_t ScratchBytes(const std::vector<ParameterState>& states);

  // Applies the step to `states` (indices of Muon states, all reduced). A matrix that can't be
  // orthogonalized stops the run: report.failure says which; its weights are left as they were.
  absl::Status Run(const std::vector<int>& states, CommitReport& report);

 private:
  // One matrix of the batch: which rows of which state it came from.
  struct Part {
    int state;
    const MatrixBlock* block;
    const float* o;
  };
  absl::Status RunBatch(const std::vector<int>& states, CommitReport& report);
  absl::Status UpdateMomentum(ParameterState& state, float* u, CommitReport& report);
  absl::Status ApplyPart(const Part& part, kernels::StateScan& scan);
  absl::Status Orthogonalize(std::vector<kernels::MatrixJob>& jobs, const std::vector<Part>& parts,
                             std::size_t begin, std::size_t end, CommitReport& report);

  Engine& engine_;
  const CommitRequest& request_;
};

// Elements of Muon parameters that share one batch, unless a single one is larger.
inline constexpr std::int64_t kMuonBatchElements = std::int64_t{32} << 20;

}  // namespace muond
