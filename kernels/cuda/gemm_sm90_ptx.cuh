// The Hopper instructions that gemm_sm90.cu is made of, one function each: mbarrier, bulk tensor
// copy (TMA), warpgroup products (wgmma), stmatrix. PTX ISA 8.0, target sm_90a.
//
// Shared memory is addressed by its 32-bit window address. Parities follow the PTX convention: a
// wait for parity p returns once the phase of that parity has completed.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace muond::kernels::cuda::sm90 {

__device__ __forceinline__ std::uint32_t SharedAddress(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// -- mbarrier

__device__ __forceinline__ void BarrierInit(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival that also announces `bytes` of copies.
__device__ __forceinline__ void BarrierExpect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void BarrierArrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier of the same offset in block `rank` of the cluster. Orders nothing but the
// copy engine and the products: a wider scope would throw the L1 cache away at every step.
__device__ __forceinline__ void BarrierArriveCluster(std::uint32_t barrier, std::uint32_t rank) {
  asm volatile(
      "{\n\t"
      ".reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void BarrierWait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "LAB_WAIT:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra LAB_WAIT;\n\t"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A barrier among `threads` threads of the block; id 0 is __syncthreads.
__device__ __forceinline__ void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__device__ __forceinline__ std::uint32_t ClusterRank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// True in one lane of a warp all of whose lanes are here. The compiler then knows that one thread
// goes on, and keeps what the copy engine needs in uniform registers.
__device__ __forceinline__ bool ElectLane() {
  std::uint32_t elected;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "elect.sync _|p, 0xffffffff;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// -- Bulk tensor copies. x: element in the row, y: row.

__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Maps are written by copies from the host; a map at this address may have been another one before.
__device__ __forceinline__ void AcquireMap(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

__device__ __forceinline__ void LoadBox(std::uint32_t to, const CUtensorMap* map, int x, int y,
                                        std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// `bytes` contiguous bytes; everything is a multiple of 16.
__device__ __forceinline__ void LoadBytes(std::uint32_t to, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// To the same offset in every block of the cluster that `blocks` has a bit for.
__device__ __forceinline__ void LoadBoxMulticast(std::uint32_t to, const CUtensorMap* map, int x,
                                                 int y, std::uint32_t barrier,
                                                 std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
      : "memory");
}

// -- Dependent launch: this kernel may have started before the one in front of it was done.

__device__ __forceinline__ void WaitForPreviousKernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void AllowNextKernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// -- Registers

template <int kCount>
__device__ __forceinline__ void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void LowerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// -- stmatrix and ldmatrix: four 8 x 8 matrices of 16-bit values. Lane 8 q + i gives the address of
// row i of matrix q (of column i, transposed). And plain accesses of 16 bytes.

__device__ __forceinline__ void StoreMatrices(std::uint32_t to, const std::uint32_t* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void StoreMatricesTransposed(std::uint32_t to, const std::uint32_t* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The reverse of StoreMatrices.
__device__ __forceinline__ void LoadMatrices(std::uint32_t* r, std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void StoreShared(std::uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint4 LoadShared(std::uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// To global memory, which the compiler cannot tell from the address.
__device__ __forceinline__ void StoreGlobal(void* to, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// -- wgmma

__device__ __forceinline__ void ProductFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void ProductCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void ProductWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The descriptor of an operand that lies in shared memory as boxes of 64 rows of 64 16-bit values,
// 128-byte swizzle, box after box. Box rows are rows of the operand and its columns k ("k inner"),
// or box rows are k and columns are rows of the operand ("k outer").
template <bool kOuter>
__device__ __forceinline__ std::uint64_t OperandDescriptor(std::uint32_t address) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{1024 >> 4} << 32;
  constexpr std::uint64_t kNextBox = std::uint64_t{kOuter ? 8192 >> 4 : 1} << 16;
  return kSwizzle128 | kEightRows | kNextBox | ((address & 0x3FFFF) >> 4);
}

// What 16 further values of k add to a descriptor.
template <bool kOuter>
inline constexpr std::uint64_t kDescriptorStep = (kOuter ? 16 * 128 : 16 * 2) >> 4;

#define MUOND_F8(mode, i)                                                                     \
  mode(d[i]), mode(d[i + 1]), mode(d[i + 2]), mode(d[i + 3]), mode(d[i + 4]), mode(d[i + 5]), \
      mode(d[i + 6]), mode(d[i + 7])
#define MUOND_F32(mode, i) \
  MUOND_F8(mode, i), MUOND_F8(mode, i + 8), MUOND_F8(mode, i + 16), MUOND_F8(mode, i + 24)
#define MUOND_R32_0                                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MUOND_R32_1                                                                            \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MUOND_R32_2                                                                            \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MUOND_R32_3                                                                            \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
  "%126, %127"
#define MUOND_WGMMA(n, regs, a, b, add, ta, tb)                                          \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" regs "}, " a ", " b ", " add \
  ", 1, 1, " ta ", " tb ";\n"
#define MUOND_WGMMA_256(mode)                                                                      \
  asm volatile(MUOND_WGMMA("256", MUOND_R32_0 ", " MUOND_R32_1 ", " MUOND_R32_2 ", " MUOND_R32_3,  \
                           "%128", "%129", "%130", "%131", "%132")                                 \
               : MUOND_F32(mode, 0), MUOND_F32(mode, 32), MUOND_F32(mode, 64), MUOND_F32(mode, 96) \
               : "l"(a), "l"(b), "n"(int{kAdd}), "n"(int{kAOuter}), "n"(int{kBOuter}))
#define MUOND_WGMMA_192(mode)                                                                  \
  asm volatile(MUOND_WGMMA("192", MUOND_R32_0 ", " MUOND_R32_1 ", " MUOND_R32_2, "%96", "%97", \
                           "%98", "%99", "%100")                                               \
               : MUOND_F32(mode, 0), MUOND_F32(mode, 32), MUOND_F32(mode, 64)                  \
               : "l"(a), "l"(b), "n"(int{kAdd}), "n"(int{kAOuter}), "n"(int{kBOuter}))
#define MUOND_WGMMA_128(mode)                                                                      \
  asm volatile(MUOND_WGMMA("128", MUOND_R32_0 ", " MUOND_R32_1, "%64", "%65", "%66", "%67", "%68") \
               : MUOND_F32(mode, 0), MUOND_F32(mode, 32)                                           \
               : "l"(a), "l"(b), "n"(int{kAdd}), "n"(int{kAOuter}), "n"(int{kBOuter}))

#define MUOND_WGMMA_64(mode)                                                     \
  asm volatile(MUOND_WGMMA("64", MUOND_R32_0, "%32", "%33", "%34", "%35", "%36") \
               : MUOND_F32(mode, 0)                                              \
               : "l"(a), "l"(b), "n"(int{kAdd}), "n"(int{kAOuter}), "n"(int{kBOuter}))

// d (+)= A B for 64 x kWidth x 16; without kAdd, d is overwritten. Thread t of the warpgroup holds,
// of row 16 (t / 32) + (t % 32) / 4 + 8 h and column 8 j + 2 (t % 4) + c, the value
// d[4 j + 2 h + c].
template <int kWidth, bool kAOuter, bool kBOuter, bool kAdd>
__device__ __forceinline__ void Product(float (&d)[128], std::uint64_t a, std::uint64_t b) {
  static_assert(kWidth == 64 || kWidth == 128 || kWidth == 192 || kWidth == 256);
  if constexpr (kWidth == 256 && kAdd) {
    MUOND_WGMMA_256("+f");
  } else if constexpr (kWidth == 256) {
    MUOND_WGMMA_256("=f");
  } else if constexpr (kWidth == 192 && kAdd) {
    MUOND_WGMMA_192("+f");
  } else if constexpr (kWidth == 192) {
    MUOND_WGMMA_192("=f");
  } else if constexpr (kWidth == 128 && kAdd) {
    MUOND_WGMMA_128("+f");
  } else if constexpr (kWidth == 128) {
    MUOND_WGMMA_128("=f");
  } else if constexpr (kAdd) {
    MUOND_WGMMA_64("+f");
  } else {
    MUOND_WGMMA_64("=f");
  }
}

#undef MUOND_WGMMA_64
#undef MUOND_WGMMA_128
#undef MUOND_WGMMA_192
#undef MUOND_WGMMA_256
#undef MUOND_WGMMA
#undef MUOND_R32_3
#undef MUOND_R32_2
#undef MUOND_R32_1
#undef MUOND_R32_0
#undef MUOND_F32
#undef MUOND_F8

}  // namespace muond::kernels::cuda::sm90
