// Batches of elementwise jobs, from the backend's terms to the device's tables and back: builds the
// tables, launches, waits, hands the statistics to whoever asked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/memory.h"

namespace muond::kernels::cuda {

// The batched methods of Backend. One caller at a time, with the right current device. Every
// method waits for its results; errors are those of the device or of its memory.
class ElementwiseRunner {
 public:
  explicit ElementwiseRunner(cudaStream_t stream) : stream_(stream) {}

  cudaError_t Copy(std::span<const CopyJob> jobs);
  cudaError_t Round(std::span<const RoundJob> jobs);
  cudaError_t Scan(std::span<const GradientView> gradients, std::span<GradientScan> results);
  cudaError_t ScanState(std::span<const StateView> tensors, std::span<StateScan> results);
  cudaError_t Momentum(std::span<const MomentumJob> jobs, std::span<StateScan> states);
  cudaError_t Apply(std::span<const ApplyJob> jobs, std::span<StateScan> states);
  cudaError_t AdamW(std::span<const AdamWJob> jobs, std::span<AdamWScan> scans);

 private:
  // Builds the table of make(jobs[i]) and sends it to the device.
  template <typename Out, typename In, typename Make>
  cudaError_t Upload(std::span<const In> jobs, const Make& make, JobTable<Out>& table);
  // Launches and waits; then statistics()[j * planes + s] is there.
  template <typename Out, typename Launch>
  cudaError_t Run(const JobTable<Out>& table, std::uint32_t planes, bool chunk_sums,
                  const Launch& launch);
  const TensorStats* statistics() const { return results_.get<TensorStats>(); }

  cudaStream_t stream_;
  GrowingBuffer host_table_{MemoryKind::kPinned};
  GrowingBuffer device_table_{MemoryKind::kDevice};
  GrowingBuffer chunk_stats_{MemoryKind::kDevice};
  GrowingBuffer results_{MemoryKind::kPinned};     // TensorStats per job and plane
  GrowingBuffer chunk_sums_{MemoryKind::kPinned};  // double per chunk; see Combine
};

}  // namespace muond::kernels::cuda
