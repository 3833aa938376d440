// Newton-Schulz on one device: fp16 products with fp32 accumulation, results checked on the device,
// and bad ones redone in fp32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/newton_schulz_batch.h"

namespace muond::kernels::cuda {

// One caller at a time, with the device current. A list of shapes that was seen before costs one
// graph launch and no allocation.
class NewtonSchulz {
 public:
  // `fault` outlives the object and may be null.
  explicit NewtonSchulz(NewtonSchulzFault* fault) : fault_(fault) {}

  // Backend::NewtonSchulz for U and O in fp16. Waits for the stream.
  Error Run(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
            std::span<NewtonSchulzResult> results, cudaStream_t stream);

  // Scratch that a call with these shapes needs, their addresses aligned to 16 bytes.
  std::size_t ScratchBytes(std::span<const MatrixShape> shapes, const NewtonSchulzRule& rule) const;

  // For measurements: replaces the choices made for this device.
  void set_tuning(const NewtonSchulzTuning& tuning);

 private:
  Error ChooseKernels();
  Error FindBatch(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                  cudaStream_t stream, NewtonSchulzBatch** batch);
  Error Judge(const MatrixJob& job, const NewtonSchulzRule& rule, const NormScalars* scalars,
              double stored_sum, cudaStream_t stream, NewtonSchulzResult* result);
  Error Redo(const MatrixJob& job, const NewtonSchulzRule& rule, const NormScalars* scalars,
             double o_scale, cudaStream_t stream);
  // The sum of squares of O as it lies there.
  Error Observe(const MatrixJob& job, cudaStream_t stream, double* sum);

  NewtonSchulzFault* const fault_;
  bool chosen_ = false;
  NewtonSchulzTuning tuning_;
  GrowingBuffer scratch_{MemoryKind::kDevice};
  GrowingBuffer redo_{MemoryKind::kDevice};
  GrowingBuffer observed_{MemoryKind::kDevice};
  GrowingBuffer observed_sum_{MemoryKind::kPinned};
  std::size_t scratch_bytes_ = 0;
  std::list<std::unique_ptr<NewtonSchulzBatch>> batches_;  // the last used one first
};

}  // namespace muond::kernels::cuda
