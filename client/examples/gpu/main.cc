// muond-example-gpu: a trainer whose gradients and parameters never leave its GPU. Minimizes
// |W - T|^2 / 2 for a matrix W through the daemon at $MUOND_ENDPOINT, which should compute on the
// same GPU, and prints the loss as it falls.
//
//   muond --backend cuda --listen unix:///tmp/muond.sock &
//   MUOND_ENDPOINT=unix:///tmp/muond.sock muond-example-gpu
//
// Where memory is shared with the daemon (path "cuda-ipc"), the gradient is made in it and the
// parameters are read from it: nothing is copied. By any other path the same calls move the bytes.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>
#include <vector>

#include "client/cpp/session.h"
#include "client/examples/gpu/target.h"

using muond::client::GpuPlace;
using muond::client::Session;
using muond::client::SliceSink;
using muond::client::SliceSource;

namespace {

constexpr int kRows = 512;
constexpr int kCols = 256;
constexpr int kElements = kRows * kCols;
constexpr int kSteps = 40;
constexpr int kGpu = 0;

absl::Status FromCuda(cudaError_t error) {
  return error == cudaSuccess ? absl::OkStatus() : absl::InternalError(cudaGetErrorString(error));
}

// One hidden matrix of one rank: Muon's.
muond::RunSpec MakeRun(const std::string& name) {
  muond::ParameterSpec w;
  w.name = "w";
  w.shape = muond::Dims{kRows, kCols};
  w.role = muond::Role::kHidden;
  w.group = "all";
  muond::RunSpec run;
  run.name = name;
  run.parameters = {w};
  run.groups.emplace_back().name = "all";
  return run;
}

// The device memory and the stream of one trainer.
struct Buffers {
  float *w = nullptr, *gradient = nullptr, *loss = nullptr;  // w, gradient: used by other paths
  cudaStream_t stream = nullptr;

  absl::Status Make() {
    for (float** memory : {&w, &gradient}) {
      const cudaError_t error =
          cudaMalloc(reinterpret_cast<void**>(memory), kElements * sizeof(float));
      if (error != cudaSuccess) return FromCuda(error);
      cudaMemset(*memory, 0, kElements * sizeof(float));
    }
    const cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&loss), sizeof(float));
    if (error != cudaSuccess) return FromCuda(error);
    return FromCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  ~Buffers() {
    cudaFree(w);
    cudaFree(gradient);
    cudaFree(loss);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
};

// The loss before the step.
absl::StatusOr<float> TakeStep(Session& session, Buffers& buffers, const float* w, float* gradient,
                               float* pulled) {
  float loss = 0;
  cudaMemsetAsync(buffers.loss, 0, sizeof(float), buffers.stream);
  cudaError_t error = QueueGradient(w, gradient, kRows, kCols, buffers.loss, buffers.stream);
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(&loss, buffers.loss, sizeof(float), cudaMemcpyDeviceToHost,
                            buffers.stream);
  }
  if (error != cudaSuccess) return FromCuda(error);

  // The session waits for the stream itself, and has what it brings there before it returns.
  const GpuPlace place{.device = kGpu, .stream = buffers.stream};
  const std::vector<SliceSource> gradients = {
      {.parameter = "w", .data = gradient, .elements = kElements, .place = place}};
  const std::vector<SliceSink> parameters = {
      {.parameter = "w", .data = pulled, .elements = kElements, .place = place}};
  muond::StepBegin begin;
  begin.muon["all"] = {.lr = 0.05};
  begin.adamw["all"] = {.lr = 0.05};
  const auto outcome = session.StepAndPull(begin, gradients, parameters);
  if (!outcome.ok()) return outcome.status();
  return loss;
}

absl::Status Train(const std::string& name) {
  Buffers buffers;
  if (absl::Status made = buffers.Make(); !made.ok()) return made;
  muond::client::SessionOptions options;
  options.gpu = kGpu;
  auto session =
      Session::Open(MakeRun(name), 0, {{"w", {muond::WholeBox({kRows, kCols})}}}, options);
  if (!session.ok()) return session.status();
  const auto path = (*session)->transports().front();
  std::printf("path %s: %s\n", path.name.c_str(), path.reason.c_str());

  const auto initialized = (*session)->Initialize(
      std::vector<SliceSource>{{.parameter = "w",
                                .data = buffers.w,
                                .elements = kElements,
                                .place = {.device = kGpu, .stream = buffers.stream}}});
  if (!initialized.ok()) return initialized.status();

  // Views of the shared memory, where there is any.
  float* pulled = buffers.w;
  if (auto place = (*session)->ParameterPlace("w", 0); place.ok()) {
    pulled = static_cast<float*>(*place);
  }
  const float* w = buffers.w;  // the initial values; after a step, what was pulled
  for (int step = 0; step < kSteps; ++step) {
    float* gradient = buffers.gradient;
    if (auto place = (*session)->GradientPlace("w", 0, step % 2); place.ok()) {
      gradient = static_cast<float*>(*place);
    }
    const auto loss = TakeStep(**session, buffers, w, gradient, pulled);
    if (!loss.ok()) return loss.status();
    if (step % 10 == 0) std::printf("step %d: loss %.4f\n", step, *loss);
    w = pulled;
  }
  return (*session)->Close().status();
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status = Train(argc > 1 ? argv[1] : "gpu-example");
  if (status.ok()) return 0;
  std::fprintf(stderr, "muond-example-gpu: %s\n", std::string(status.message()).c_str());
  return 1;
}
