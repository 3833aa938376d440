// The Hopper kernel behind gemm.h: persistent blocks of one producer warp, which keeps a ring of
// shared memory stages filled by the copy engine, and two consumer warpgroups, each of which
// multiplies 64 rows of the tile. In a cluster of two, the blocks work on neighbouring rows of the
// same columns and each loads half of B for both.
#include <algorithm>
#include <string>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_sm90_ptx.cuh"
#include "kernels/cuda/gemm_tile_writer.cuh"

namespace muond::kernels::cuda {
namespace {

using namespace sm90;  // NOLINT: instruction wrappers

// The ring has as many stages as fit: four of 256 or 192 columns, six of 128, eight of 64.
constexpr std::uint32_t kMaxStages = 8;
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kConsumerWarps = 8;
constexpr std::uint32_t kBoxBytes = kBoxSide * kBoxSide * 2;
constexpr std::uint32_t kABytes = 2 * kBoxBytes;
constexpr std::uint32_t kRingBytes = 4 * (kABytes + 4 * kBoxBytes);
constexpr std::uint32_t kOutBytes = 2 * kGroupOutBytes;
// With the first stage of a tile travels what the consumers must know about it.
struct Order {
  GemmTile tile;
  GemmOp op;
};
constexpr std::uint32_t kBarrierBytes = kMaxStages * 2 * 8;
constexpr std::uint32_t kSharedBytes =
    kRingBytes + kMaxStages * sizeof(Order) + kOutBytes + kBarrierBytes;
// A box must start at a multiple of the swizzle's period.
constexpr std::uint32_t kSharedAlignment = 1024;

struct Shared {
  std::uint32_t stage_count;
  std::uint32_t stage_bytes;
  std::uint32_t stages;
  std::uint32_t out;
  const Order* orders;  // one for each stage
  std::uint32_t full;   // barriers of the stages: the copies have landed
  std::uint32_t empty;  // barriers of the stages: all consumers are done
};

// A position in the ring of stages. A fresh barrier counts as having completed parity 1.
struct Ring {
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void Advance(const Shared& shared) {
    if (++stage == shared.stage_count) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ GemmTile LoadTile(const GemmTile* tile) {
  union {
    int4 raw[2];
    GemmTile tile;
  } value;
  value.raw[0] = __ldg(reinterpret_cast<const int4*>(tile));
  value.raw[1] = __ldg(reinterpret_cast<const int4*>(tile) + 1);
  return value.tile;
}

// -- Producer

struct Work {
  GemmTile tile;
  const CUtensorMap* a;
  const CUtensorMap* b;
};

__device__ __forceinline__ Work LoadWork(const GemmLaunch& launch, int i) {
  Work work;
  work.tile = LoadTile(launch.tiles + i);
  work.a = launch.ops[work.tile.op].a.map;
  work.b = launch.ops[work.tile.op].b.map;
  return work;
}

template <int kCluster>
__device__ __forceinline__ void ProduceTile(const Shared& shared, const GemmLaunch& launch, int i,
                                            const Work& work, std::uint32_t rank, Ring* ring) {
  const GemmTile& tile = work.tile;
  const bool a_outer = tile.layout == GemmLayout::kTN;
  const bool b_outer = tile.layout != GemmLayout::kNT;
  const int boxes = tile.width / kBoxSide;
  const int row = tile.row + static_cast<int>(rank) * kTileRows;
  for (int step = 0; step < tile.steps; ++step) {
    const std::uint32_t full = shared.full + ring->stage * 8;
    const std::uint32_t to = shared.stages + ring->stage * shared.stage_bytes;
    const int k = step * kBoxSide;
    BarrierWait(shared.empty + ring->stage * 8, ring->parity ^ 1);
    BarrierExpect(full, kABytes + boxes * kBoxBytes + (step == 0 ? sizeof(Order) : 0));
    if (step == 0) {
      const std::uint32_t order = SharedAddress(shared.orders + ring->stage);
      LoadBytes(order, launch.tiles + i, sizeof(GemmTile), full);
      LoadBytes(order + sizeof(GemmTile), launch.ops + tile.op, sizeof(GemmOp), full);
    }
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      const int outer = row + box * kBoxSide;
      LoadBox(to + box * kBoxBytes, work.a, a_outer ? outer : k, a_outer ? k : outer, full);
    }
    for (int box = static_cast<int>(rank); box < boxes; box += kCluster) {
      const int outer = tile.column + box * kBoxSide;
      const int x = b_outer ? outer : k;
      const int y = b_outer ? k : outer;
      if constexpr (kCluster == 1) {
        LoadBox(to + kABytes + box * kBoxBytes, work.b, x, y, full);
      } else {
        LoadBoxMulticast(to + kABytes + box * kBoxBytes, work.b, x, y, full, 3);
      }
    }
    ring->Advance(shared);
  }
}

template <int kCluster>
__device__ __forceinline__ void Produce(const Shared& shared, const GemmLaunch& launch, int begin,
                                        int end, std::uint32_t rank) {
  Ring ring;
  Work work = LoadWork(launch, begin);
  AcquireMap(work.a);
  AcquireMap(work.b);
  for (int i = begin; i < end; ++i) {
    // What comes next is fetched while the ring is full of this tile.
    const Work next = LoadWork(launch, min(i + 1, end - 1));
    ProduceTile<kCluster>(shared, launch, i, work, rank, &ring);
    if (next.a != work.a) AcquireMap(next.a);
    if (next.b != work.b) AcquireMap(next.b);
    work = next;
  }
}

// -- Consumers

template <int kCluster>
__device__ __forceinline__ void Release(const Shared& shared, std::uint32_t stage) {
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t barrier = shared.empty + stage * 8;
  if constexpr (kCluster == 1) {
    if (lane == 0) BarrierArrive(barrier);
  } else {
    if (lane < kCluster) BarrierArriveCluster(barrier, lane);
  }
}

// Asks for the products of one stage; kFirst: d is overwritten.
template <int kWidth, bool kAOuter, bool kBOuter, bool kFirst>
__device__ __forceinline__ void MultiplyStage(float (&d)[128], const Shared& shared, int group,
                                              const Ring& ring) {
  const std::uint32_t from = shared.stages + ring.stage * shared.stage_bytes;
  const std::uint64_t a = OperandDescriptor<kAOuter>(from + group * kBoxBytes);
  const std::uint64_t b = OperandDescriptor<kBOuter>(from + kABytes);
  BarrierWait(shared.full + ring.stage * 8, ring.parity);
  ProductFence();
  Product<kWidth, kAOuter, kBOuter, !kFirst>(d, a, b);
#pragma unroll
  for (int k = 1; k < 4; ++k) {
    Product<kWidth, kAOuter, kBOuter, true>(d, a + k * kDescriptorStep<kAOuter>,
                                            b + k * kDescriptorStep<kBOuter>);
  }
  ProductCommit();
}

template <int kCluster, int kWidth, bool kAOuter, bool kBOuter>
__device__ __forceinline__ void MultiplyTile(float (&d)[128], const Shared& shared, int group,
                                             int steps, Ring* ring) {
  MultiplyStage<kWidth, kAOuter, kBOuter, true>(d, shared, group, *ring);
  std::uint32_t previous = ring->stage;
  ring->Advance(shared);
// (Unrolled otherwise, the compiler serialises the products of clusters: C7511 in its output.)
#pragma unroll 2
  for (int step = 1; step < steps; ++step) {
    MultiplyStage<kWidth, kAOuter, kBOuter, false>(d, shared, group, *ring);
    // The products of the stage before are done: it may be filled again.
    ProductWait<1>();
    Release<kCluster>(shared, previous);
    previous = ring->stage;
    ring->Advance(shared);
  }
  ProductWait<0>();
  Release<kCluster>(shared, previous);
}

template <int kCluster, int kWidth>
__device__ __forceinline__ void MultiplyTile(float (&d)[128], const Shared& shared, int group,
                                             GemmLayout layout, int steps, Ring* ring) {
  if (layout == GemmLayout::kNT) {
    MultiplyTile<kCluster, kWidth, false, false>(d, shared, group, steps, ring);
  } else if (layout == GemmLayout::kNN) {
    MultiplyTile<kCluster, kWidth, false, true>(d, shared, group, steps, ring);
  } else {
    MultiplyTile<kCluster, kWidth, true, true>(d, shared, group, steps, ring);
  }
}

template <int kCluster>
__device__ __forceinline__ void Consume(const Shared& shared, int tiles, std::uint32_t rank,
                                        int group) {
  Ring ring;
  const TileWriter writer(shared.out + group * kGroupOutBytes, 1 + group);
  for (int i = 0; i < tiles; ++i) {
    BarrierWait(shared.full + ring.stage * 8, ring.parity);
    const Order& order = shared.orders[ring.stage];
    // Read now: once the first stage is released the next order may come.
    const int row = order.tile.row + static_cast<int>(rank) * kTileRows + group * kBoxSide;
    const int column = order.tile.column, width = order.tile.width;
    const Finish finish(order.op);
    float d[128];
    if (width == 256) {
      MultiplyTile<kCluster, 256>(d, shared, group, order.tile.layout, order.tile.steps, &ring);
    } else if (kCluster == 1 && width == 192) {
      // (Not in clusters: one branch more and the compiler serialises the products, C7511.)
      MultiplyTile<kCluster, 192>(d, shared, group, order.tile.layout, order.tile.steps, &ring);
    } else if (kCluster == 1 && width == 64) {
      MultiplyTile<kCluster, 64>(d, shared, group, order.tile.layout, order.tile.steps, &ring);
    } else {
      MultiplyTile<kCluster, 128>(d, shared, group, order.tile.layout, order.tile.steps, &ring);
    }
    writer.Finish(d, finish, row, column, width / kBoxSide);
  }
}

template <int kCluster>
__global__ void __launch_bounds__(kThreads, 1) GemmKernel(const GemmLaunch launch) {
  extern __shared__ std::uint8_t memory[];
  const std::uint32_t base =
      (SharedAddress(memory) + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  Shared shared;
  shared.stages = base;
  shared.stage_bytes = kABytes + launch.width / kBoxSide * kBoxBytes;
  shared.stage_count = min(kMaxStages, kRingBytes / shared.stage_bytes);
  shared.out = base + kRingBytes;
  const std::uint32_t orders = shared.out + kOutBytes;
  shared.orders = reinterpret_cast<const Order*>(memory + (orders - SharedAddress(memory)));
  shared.full = orders + kMaxStages * sizeof(Order);
  shared.empty = shared.full + kMaxStages * 8;
  // Through lane 0, so that the compiler knows that a warp agrees about it.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int group = warp / 4;
  const std::uint32_t rank = kCluster == 1 ? 0 : ClusterRank();
  if (threadIdx.x == 0) {
    for (std::uint32_t i = 0; i < kMaxStages; ++i) {
      BarrierInit(shared.full + i * 8, 1);
      BarrierInit(shared.empty + i * 8, kConsumerWarps * kCluster);
    }
    FenceBarrierInit();
  }
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    ClusterSync();
  }
  AllowNextKernel();
  WaitForPreviousKernel();
  const int index = static_cast<int>(blockIdx.x) / kCluster;
  const int begin = __ldg(launch.begin + index);
  const int end = __ldg(launch.begin + index + 1);
  // One group of consumers lags behind the other by a few stages from here on: while one writes its
  // half of a tile, the other has the tensor cores for itself.
  if (group == 1) __nanosleep(1200);
  // A block must not end while its neighbour may still write to it: hence ClusterSync at the end of
  // both branches.
  if (group == 2) {
    LowerRegisters<56>();
    if (warp == kConsumerWarps && begin < end && ElectLane()) {
      Produce<kCluster>(shared, launch, begin, end, rank);
    }
    __syncwarp();
    if constexpr (kCluster != 1) ClusterSync();
  } else {
    RaiseRegisters<224>();
    Consume<kCluster>(shared, end - begin, rank, group);
    if constexpr (kCluster != 1) ClusterSync();
  }
}

Error CudaError(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return {};
  return Error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace

Error PrepareGemmSm90() {
  constexpr int kBytes = kSharedBytes + kSharedAlignment;
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (auto e = CudaError("gemm kernel", cudaFuncSetAttribute(GemmKernel<1>, attribute, kBytes))) {
    return e;
  }
  return CudaError("gemm kernel", cudaFuncSetAttribute(GemmKernel<2>, attribute, kBytes));
}

Error LaunchGemmSm90(const GemmLaunch& launch, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(launch.groups * launch.cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes + kSharedAlignment;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  const auto kernel = launch.cluster == 1 ? GemmKernel<1> : GemmKernel<2>;
  return CudaError("gemm launch", cudaLaunchKernelEx(&config, kernel, launch));
}

}  // namespace muond::kernels::cuda
