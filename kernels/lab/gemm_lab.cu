// Measurements of the product kernels alone: correctness of every layout, width and cluster size
// against a plain kernel, and TFLOP/s. Never linked into a product.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_plan.h"
#include "kernels/lab/check.h"

namespace {

using namespace muond::kernels::cuda;

__device__ float Random(std::uint64_t index, std::uint64_t seed) {
  std::uint64_t x = index * 0x9E3779B97F4A7C15ull + seed;
  x ^= x >> 31;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 29;
  x *= 0x94D049BB133111EBull;
  x ^= x >> 32;
  const float u = (static_cast<float>(x & 0xFFFFFF) + 0.5f) / 16777216.0f;
  const float v = static_cast<float>((x >> 24) & 0xFFFFFF) / 16777216.0f;
  return sqrtf(-2 * logf(u)) * cospif(2 * v);
}

// symmetric: value of (min, max).
__global__ void Fill(__half* data, int rows, int cols, int ld, std::uint64_t seed, bool symmetric) {
  for (std::int64_t i = blockIdx.x * 256ll + threadIdx.x; i < 1ll * rows * ld;
       i += 256ll * gridDim.x) {
    std::int64_t r = i / ld, c = i % ld;
    if (c >= cols) {
      data[i] = __float2half(NAN);  // padding that must never be used
      continue;
    }
    if (symmetric && r > c) {
      const std::int64_t t = r;
      r = c;
      c = t;
    }
    data[i] = __float2half(Random(r * ld + c, seed));
  }
}

__global__ void Reference(GemmOp op, const __half* a, const __half* b, int lda, int ldb, int k,
                          const __half* d, int ldd, double* worst, double* norm) {
  const int j = blockIdx.x * 16 + threadIdx.x, i = blockIdx.y * 16 + threadIdx.y;
  if (i >= op.rows || j >= op.cols) return;
  double sum = 0;
  for (int q = 0; q < k; ++q) {
    const float x =
        __half2float(op.layout == GemmLayout::kTN ? a[1ll * q * lda + i] : a[1ll * i * lda + q]);
    const float y =
        __half2float(op.layout == GemmLayout::kNT ? b[1ll * j * ldb + q] : b[1ll * q * ldb + j]);
    sum += double{x} * y;
  }
  const double s = op.scale ? *op.scale : 1.0;
  sum *= op.alpha;
  if (op.c) sum += op.beta * __half2float(op.c[1ll * i * op.ldc + j]);
  sum = s * sum + (i == j ? op.diagonal : 0);
  const double got = __half2float(d[1ll * i * ldd + j]);
  double error = fabs(got - sum) / (1 + fabs(sum));
  if (!(error < 1e30)) error = 1e30;
  atomicAdd(norm, sum * sum);
  atomicMax(reinterpret_cast<unsigned long long*>(worst), __double_as_longlong(error));
}

struct Matrix {
  int rows, cols, ld;
  __half* data = nullptr;
  CUtensorMap* map = nullptr;
  Matrix(int r, int c) : rows(r), cols(c), ld((c + 7) / 8 * 8) {
    CHECK(cudaMalloc(&data, 2ll * rows * ld));
    CHECK(cudaMalloc(&map, sizeof(CUtensorMap)));
    CUtensorMap host;
    CheckError(EncodeMatrixMap(&host, data, rows, cols, ld));
    CHECK(cudaMemcpy(map, &host, sizeof host, cudaMemcpyHostToDevice));
  }
  ~Matrix() {
    cudaFree(data);
    cudaFree(map);
  }
  void Random(std::uint64_t seed, bool symmetric) {
    Fill<<<1024, 256>>>(data, rows, cols, ld, seed, symmetric);
    CHECK(cudaGetLastError());
  }
  GemmOperand operand() const { return {map, data, ld}; }
};

template <typename T>
T* Upload(const std::vector<T>& values) {
  T* memory;
  CHECK(cudaMalloc(&memory, std::max<std::size_t>(1, values.size()) * sizeof(T)));
  CHECK(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}

bool portable = false;  // the other kernel
bool quick = false;     // few cases, timing only

// Runs `ops` and returns the median milliseconds of `repeats` launches (0: run once).
double Run(const std::vector<GemmOp>& ops, const GemmMachine& machine, int repeats,
           GemmPlan* used = nullptr) {
  GemmPlan plan = PlanGemm(ops, 0, machine);
  GemmLaunch launch{Upload(plan.tiles), Upload(plan.begin), Upload(ops),
                    plan.groups,        plan.cluster,       plan.width};
  const auto enqueue = [&] {
    CheckError(portable ? LaunchGemmPortable(launch, nullptr) : LaunchGemmSm90(launch, nullptr));
  };
  enqueue();
  CHECK(cudaDeviceSynchronize());
  std::vector<float> times;
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  for (int i = 0; i < repeats; ++i) {
    CHECK(cudaEventRecord(start));
    for (int r = 0; r < 10; ++r) enqueue();
    CHECK(cudaEventRecord(stop));
    CHECK(cudaEventSynchronize(stop));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    times.push_back(ms / 10);
  }
  CHECK(cudaFree(const_cast<GemmTile*>(launch.tiles)));
  CHECK(cudaFree(const_cast<std::int32_t*>(launch.begin)));
  CHECK(cudaFree(const_cast<GemmOp*>(launch.ops)));
  if (used) *used = std::move(plan);
  std::sort(times.begin(), times.end());
  return times.empty() ? 0 : times[times.size() / 2];
}

struct Case {
  int rows, cols, k;
  GemmLayout layout;
  bool symmetric, with_c;
};

int failures = 0;

void Test(const Case& t, GemmMachine machine, int blocks) {
  machine.blocks = blocks;
  const bool tn = t.layout == GemmLayout::kTN, nt = t.layout == GemmLayout::kNT;
  Matrix a(tn ? t.k : t.rows, tn ? t.rows : t.k);
  Matrix b(nt ? t.cols : t.k, nt ? t.k : t.cols);
  Matrix c(t.rows, t.cols), d(t.rows, t.cols);
  a.Random(1, false);
  b.Random(2, false);
  c.Random(3, t.symmetric);
  const float half = 0.5f;
  float* scale;
  CHECK(cudaMalloc(&scale, 4));
  CHECK(cudaMemcpy(scale, &half, 4, cudaMemcpyHostToDevice));
  GemmOp op;
  op.a = a.operand();
  op.b = t.symmetric ? a.operand() : b.operand();
  op.d = d.operand();
  op.rows = t.rows;
  op.cols = t.cols;
  op.k = t.k;
  op.layout = t.layout;
  op.symmetric = t.symmetric;
  op.alpha = 0.75f;
  op.scale = scale;
  if (t.with_c) {
    op.c = c.data;
    op.ldc = c.ld;
    op.beta = -1.5f;
    op.diagonal = 3;
  }
  float* sums = nullptr;
  const std::size_t count = SumsOf(t.rows, t.cols);
  CHECK(cudaMalloc(&sums, 4 * count));
  CHECK(cudaMemset(sums, 0xFF, 4 * count));
  if (!t.symmetric && !t.with_c) op.sums = sums;
  CHECK(cudaMemset(d.data, 0xFF, 2ll * d.rows * d.ld));
  GemmPlan plan;
  Run({op}, machine, 0, &plan);
  double* stats;
  CHECK(cudaMalloc(&stats, 16));
  CHECK(cudaMemset(stats, 0, 16));
  Reference<<<dim3((t.cols + 15) / 16, (t.rows + 15) / 16), dim3(16, 16)>>>(
      op, a.data, t.symmetric ? a.data : b.data, a.ld, t.symmetric ? a.ld : b.ld, t.k, d.data, d.ld,
      stats, stats + 1);
  double host[2];
  CHECK(cudaMemcpy(host, stats, 16, cudaMemcpyDeviceToHost));
  std::vector<float> partial(count);
  CHECK(cudaMemcpy(partial.data(), sums, 4 * count, cudaMemcpyDeviceToHost));
  double total = 0;
  for (const float v : partial) total += v;
  const double sum_error = op.sums == nullptr ? 0 : std::fabs(total / host[1] - 1);
  const bool bad = !(host[0] < 2e-3) || !(sum_error < 1e-3);
  failures += bad;
  if (bad) {
    std::printf(
        "%s %5d x %5d x %5d layout %d sym %d c %d width %d cluster %d blocks %3d tiles %zu: "
        "error %.1e sums %.1e\n",
        bad ? "BAD" : "ok ", t.rows, t.cols, t.k, static_cast<int>(t.layout), t.symmetric, t.with_c,
        plan.width, plan.cluster, blocks, plan.tiles.size(), host[0], sum_error);
  }
  std::fflush(stdout);
  for (void* p : {static_cast<void*>(stats), static_cast<void*>(sums), static_cast<void*>(scale)}) {
    cudaFree(p);
  }
}

void TimeCase(const char* name, int batch, const Case& t, GemmMachine machine) {
  const bool tn = t.layout == GemmLayout::kTN, nt = t.layout == GemmLayout::kNT;
  std::vector<Matrix*> all;
  std::vector<GemmOp> ops;
  for (int i = 0; i < batch; ++i) {
    Matrix* a = new Matrix(tn ? t.k : t.rows, tn ? t.rows : t.k);
    Matrix* b = t.symmetric ? a : new Matrix(nt ? t.cols : t.k, nt ? t.k : t.cols);
    Matrix* d = new Matrix(t.rows, t.cols);
    a->Random(i + 10, t.with_c);
    if (b != a) b->Random(i + 1000, false);
    GemmOp op;
    op.a = a->operand();
    op.b = b->operand();
    op.d = d->operand();
    op.rows = t.rows;
    op.cols = t.cols;
    op.k = t.k;
    op.layout = t.layout;
    op.symmetric = t.symmetric;
    op.alpha = 0.01f;
    if (t.with_c) {
      op.c = a->data;
      op.ldc = a->ld;
      op.beta = -1.5f;
      op.diagonal = 3;
    }
    ops.push_back(op);
    all.push_back(a);
    if (b != a) all.push_back(b);
    all.push_back(d);
  }
  double flops = 2.0 * batch * t.rows * t.cols * t.k;
  std::printf("%-26s", name);
  for (const int cluster : {2, 1}) {
    for (const int width : {256, 192, 128}) {
      if (portable && (cluster != 1 || width != 128)) continue;
      if (quick && width != 256) continue;
      if (cluster == 2 && width == 192) continue;
      machine.only_cluster = cluster;
      machine.only_width = width;
      GemmPlan plan;
      const double ms = Run(ops, machine, 7, &plan);
      std::printf(" | %.1fus %4.0fT %.0f%%", ms * 1e3, flops / ms / 1e9,
                  plan.cycles / (ms * 1e-3 * 1.755e9) * 100);
    }
  }
  std::printf("\n");
  std::fflush(stdout);
  for (Matrix* m : all) delete m;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  portable = mode == "portable";
  quick = mode == "quick";
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  if (!portable) CheckError(PrepareGemmSm90());
  GemmMachine machine;
  machine.blocks = properties.multiProcessorCount;
  machine.hopper = !portable;
  constexpr auto kNT = GemmLayout::kNT, kNN = GemmLayout::kNN, kTN = GemmLayout::kTN;
  const Case cases[] = {
      {128, 256, 64, kNT, false, false},   {128, 256, 256, kNN, false, false},
      {128, 256, 256, kTN, false, false},  {512, 512, 512, kNT, true, true},
      {512, 512, 384, kTN, true, false},   {1, 3, 1, kNT, false, true},
      {129, 127, 65, kNN, false, true},    {1000, 1416, 328, kNN, false, false},
      {1000, 1416, 328, kNT, false, true}, {1000, 1000, 777, kNT, true, true},
      {1408, 1408, 640, kTN, true, false}, {129, 129, 129, kNT, true, true},
      {3, 3, 200, kTN, true, false},       {2048, 512, 2048, kNT, false, false},
  };
  if (quick) {
    TimeCase("NN 4096^3", 1, {4096, 4096, 4096, kNN, false, false}, machine);
    TimeCase("NT sym 4096^3", 1, {4096, 4096, 4096, kNT, true, false}, machine);
    TimeCase("TN sym 4096 k 11008", 1, {4096, 4096, 11008, kTN, true, false}, machine);
    TimeCase("NT sym 4096 k 11008", 1, {4096, 4096, 11008, kNT, true, false}, machine);
    TimeCase("16 NN 2048^3", 16, {2048, 2048, 2048, kNN, false, false}, machine);
    TimeCase("16 NT sym 2048^3", 16, {2048, 2048, 2048, kNT, true, false}, machine);
    TimeCase("64 NT sym 768", 64, {768, 768, 768, kNT, true, false}, machine);
    TimeCase("64 NN 768 3072", 64, {768, 3072, 768, kNN, false, false}, machine);
    return 0;
  }
  for (const Case& t : cases) {
    for (const int cluster : {1, 2}) {
      for (const int width : {256, 192, 128}) {
        if (portable && (cluster != 1 || width != 128)) continue;
        if (cluster == 2 && width == 192) continue;
        machine.only_cluster = cluster;
        machine.only_width = width;
        Test(t, machine, properties.multiProcessorCount);
        Test(t, machine, 2);
      }
    }
  }
  std::printf("failures: %d\n", failures);
  if (failures > 30) return 1;
  machine.blocks = properties.multiProcessorCount;
  std::printf(
      "columns: cluster 2 width 256, 192, 128 | cluster 1 width 256, 192, 128; us, TFLOP/s "
      "of the full product, estimate / time\n");
  TimeCase("NN 4096^3", 1, {4096, 4096, 4096, kNN, false, false}, machine);
  TimeCase("NT 4096^3", 1, {4096, 4096, 4096, kNT, false, false}, machine);
  TimeCase("NT sym 4096^3", 1, {4096, 4096, 4096, kNT, true, false}, machine);
  TimeCase("NT sym C 4096^3", 1, {4096, 4096, 4096, kNT, true, true}, machine);
  TimeCase("TN sym 4096 k 11008", 1, {4096, 4096, 11008, kTN, true, false}, machine);
  TimeCase("NN 4096 11008", 1, {4096, 11008, 4096, kNN, false, false}, machine);
  TimeCase("NN 2048^3", 1, {2048, 2048, 2048, kNN, false, false}, machine);
  TimeCase("NT sym 2048^3", 1, {2048, 2048, 2048, kNT, true, false}, machine);
  TimeCase("16 NN 2048^3", 16, {2048, 2048, 2048, kNN, false, false}, machine);
  TimeCase("16 NT sym 2048^3", 16, {2048, 2048, 2048, kNT, true, false}, machine);
  TimeCase("16 NT sym C 2048^3", 16, {2048, 2048, 2048, kNT, true, true}, machine);
  TimeCase("NN 1024^3", 1, {1024, 1024, 1024, kNN, false, false}, machine);
  TimeCase("NT sym 1024^3", 1, {1024, 1024, 1024, kNT, true, false}, machine);
  TimeCase("64 NN 1024^3", 64, {1024, 1024, 1024, kNN, false, false}, machine);
  TimeCase("64 NT sym 1024^3", 64, {1024, 1024, 1024, kNT, true, false}, machine);
  TimeCase("64 NN 768 3072", 64, {768, 3072, 768, kNN, false, false}, machine);
  TimeCase("64 NT sym 768 k 3072", 64, {768, 768, 3072, kNT, true, false}, machine);
  TimeCase("64 NT sym 768", 64, {768, 768, 768, kNT, true, false}, machine);
  TimeCase("32 NT sym 1408 k 2048", 32, {1408, 1408, 2048, kNT, true, false}, machine);
  TimeCase("8 NN 2048 8192", 8, {2048, 8192, 2048, kNN, false, false}, machine);
  return failures != 0;
}
