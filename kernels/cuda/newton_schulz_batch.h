// A list of matrices prepared for Newton-Schulz once and replayed every step: tables of products in
// device memory and one CUDA graph that runs them.
//
// Shapes, coefficients and method are fixed; where the matrices lie may change from run to run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_plan.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/newton_schulz_passes.h"
#include "kernels/cuda/newton_schulz_program.h"

namespace muond::kernels::cuda {

// Choices that change speed only.
struct NewtonSchulzTuning {
  GemmMachine machine;
  // Matrices are taken in groups that share launches: large enough to fill the device many times
  // over, small enough for scratch memory and the L2 cache.
  double group_tiles = 1200;  // 128 x 256 tiles of a group's m x m products
  std::size_t group_bytes = std::size_t{2} << 30;
};

class NewtonSchulzBatch {
 public:
  // No job is empty, and there is at least one step.
  NewtonSchulzBatch(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                    const NewtonSchulzTuning& tuning);
  ~NewtonSchulzBatch();
  NewtonSchulzBatch(const NewtonSchulzBatch&) = delete;
  NewtonSchulzBatch& operator=(const NewtonSchulzBatch&) = delete;

  // Whether these jobs are the ones prepared for, whatever their addresses.
  bool Fits(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule) const;

  // Bytes of `scratch` that Prepare and Enqueue need.
  std::size_t scratch_bytes() const { return scratch_bytes_; }

  // Builds tables and graph; `scratch` stays where it is as long as the batch lives.
  Error Prepare(std::span<const MatrixJob> jobs, std::byte* scratch, cudaStream_t stream);

  // Enqueues everything. Afterwards, once the stream is done, the sums below are there.
  Error Enqueue(std::span<const MatrixJob> jobs, double norm_floor, cudaStream_t stream);

  // Sums of squares of U as stored and of O; NaN or infinite when an element is.
  double input_sum(std::size_t i) const { return host_.get<double>()[i]; }
  double output_sum(std::size_t i) const { return host_.get<double>()[jobs_.size() + i]; }
  // O is this times what lies there.
  double output_scale(std::size_t i) const;
  const NormScalars* scalars(std::size_t i) const { return scalars_ + i; }

  // Scratch of one matrix, without its share of anything else.
  static std::size_t MatrixScratchBytes(std::int64_t rows, std::int64_t cols,
                                        NewtonSchulzMethod form);

 private:
  static constexpr std::size_t kMapsPerJob = 8;  // U, O, spare and up to five squares

  struct Job {
    std::int64_t rows = 0, cols = 0;
    std::int64_t ld = 0;  // cols, padded: row stride of everything but U and O where they lie well
    bool copy_u = false;  // U or O lies where the copy engine cannot go: it is copied
    bool copy_o = false;
    NewtonSchulzMethod form = NewtonSchulzMethod::kStandard;
    std::size_t group = 0;
    std::size_t scratch = 0;  // offsets into scratch: spare and squares, shared between groups
    std::size_t copies = 0;   // padded U, then padded O
    const void* u = nullptr;  // where the tables say that it is
    void* o = nullptr;
    double* partials = nullptr;
    float* sums = nullptr;
    std::uint32_t* done = nullptr;
  };

  void Group(const NewtonSchulzTuning& tuning);
  ProgramBuffers Buffers(std::size_t i) const;
  Error ReserveState(cudaStream_t stream);
  Error EncodeMaps(cudaStream_t stream);
  std::vector<std::vector<GemmOp>> BuildOps() const;  // by launch
  Error BuildTables(cudaStream_t stream);
  Error UploadAddresses(cudaStream_t stream);
  Error Capture();
  Error EnqueueKernels(cudaStream_t stream) const;
  Error CopyPadded(bool input, cudaStream_t stream) const;

  const std::vector<NewtonSchulzStep> steps_;
  const NewtonSchulzMethod method_;
  const GemmMachine machine_;
  const double growth_;  // of small singular values
  std::vector<Job> jobs_;
  std::size_t groups_ = 0;
  std::size_t scratch_bytes_ = 0;
  std::byte* scratch_ = nullptr;

  GrowingBuffer state_{MemoryKind::kDevice};   // maps, scalars, sums
  GrowingBuffer tables_{MemoryKind::kDevice};  // products, tiles, norms
  GrowingBuffer host_{MemoryKind::kPinned};    // input sums, output sums, floors
  CUtensorMap* maps_ = nullptr;
  NormScalars* scalars_ = nullptr;

  std::vector<GemmLaunch> launches_;
  GemmOp* ops_ = nullptr;
  NormJob* norm_jobs_ = nullptr;
  SumJob* sum_jobs_ = nullptr;
  NormPiece* norm_pieces_ = nullptr;
  int norm_piece_count_ = 0;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace muond::kernels::cuda
