// How the work of a pass is cut: which thread block has which part of which tensor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/quads.cuh"

namespace muond::kernels::cuda {

// What the calling thread has: the quads `first`, `first` + `stride`, ... of a region.
struct Part {
  std::uint32_t job;
  std::size_t begin;       // first element of the region
  std::uint32_t elements;  // of the region
  std::uint32_t first;
  std::uint32_t stride;
};

// kStriped chunks of a tensor make a region (fewer at its end); its thread blocks take turns, a
// quad per thread each time. kStriped = 1: a chunk is a region of its own.
template <std::uint32_t kChunk, std::uint32_t kStriped>
__device__ inline Part PartOf(const std::uint32_t* first_chunk, std::uint32_t job,
                              std::size_t elements) {
  const std::uint32_t begin = __ldg(first_chunk + job);
  const std::uint32_t chunk = blockIdx.x - begin;
  const std::uint32_t region = chunk / kStriped;
  // A constant where it can be one: addresses are cheaper then.
  const std::uint32_t neighbours =
      kStriped == 1 ? 1 : min(kStriped, __ldg(first_chunk + job + 1) - begin - region * kStriped);
  constexpr std::size_t kRegion = std::size_t{kChunk} * kStriped;
  Part part;
  part.job = job;
  part.begin = region * kRegion;
  part.elements = static_cast<std::uint32_t>(min(elements - part.begin, kRegion));
  part.first = chunk % kStriped * kThreads + threadIdx.x;
  part.stride = neighbours * kThreads;
  return part;
}

// The job of the calling thread block: the last one that begins at or before it. Jobs without
// chunks are never the last.
template <typename Job>
__device__ inline std::uint32_t FindJob(const JobTable<Job>& table) {
  std::uint32_t low = 0;
  std::uint32_t high = table.count;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    if (__ldg(table.first_chunk + middle) <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <typename Job>
__device__ inline Part FindPart(const JobTable<Job>& table) {
  const std::uint32_t job = FindJob(table);
  return PartOf<kChunkElements, kStripedChunks>(table.first_chunk, job, table.jobs[job].elements);
}

// The calling thread's quads and elements of its region, in ascending order; whether a quad is read
// at once or, not aligned or not whole, in elements, it is the same thread that sees it.
// quads.template operator()<k>(q) takes the k quads q, q + stride, ...; element(e) one element.
template <int kUnroll, typename Quads, typename Element>
__device__ inline void ForEachOfThread(const Part& part, bool aligned, Quads&& quads,
                                       Element&& element) {
  const std::uint32_t whole = part.elements / 4;
  std::uint32_t q = part.first;
  if (aligned) {
    for (; q + (kUnroll - 1) * part.stride < whole; q += kUnroll * part.stride) {
      quads.template operator()<kUnroll>(q);
    }
    for (; q < whole; q += part.stride) quads.template operator()<1>(q);
  }
  for (; 4 * q < part.elements; q += part.stride) {
    const std::uint32_t end = min(4 * q + 4, part.elements);
    for (std::uint32_t e = 4 * q; e < end; ++e) element(e);
  }
}

}  // namespace muond::kernels::cuda
