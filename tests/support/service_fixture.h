// What tests of the whole service share: a service in this process, runs of any number of ranks
// over any cut of their tensors, and steps given as whole logical gradients.
//
//   auto service = StartService();
//   TestRun run(*service, SpecOf({Matrix("w", 2, 2)}), {.initial = {{"w", {1, 0, 0, 1}}}});
//   StepOutcome outcome = run.Step({{"w", {3, 0, 0, 4}}});
//   EXPECT_THAT(run.Weights().at("w"), ...);
//
// Everything is fp32 and row-major on this side; what crosses the wire has the parameter's dtype.
// What must not fail ends the process with the reason (each test is a process of its own under
// ctest).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/admin.h"
#include "client/cpp/session.h"
#include "muond/v1/optimizer.pb.h"
#include "proto/check.h"
#include "proto/values.h"
#include "server/daemon/embedded.h"

namespace muond::cluster {

// One logical tensor, row-major; tensors by parameter name.
using Floats = std::vector<float>;
using Tensors = std::map<std::string, Floats>;

// The value, or the end of the process with the status.
template <typename T>
T Must(absl::StatusOr<T> result) {
  MUOND_CHECK(result.ok(), result.status().ToString());
  return *std::move(result);
}
inline void Must(const absl::Status& status) { MUOND_CHECK(status.ok(), status.ToString()); }

// Asks every few milliseconds until it is so; after a minute ends the process with `what`.
void Eventually(const std::string& what, const std::function<bool()>& is_so);

// ---- Services and specs -----------------------------------------------------------------------

// One backend thread: the machine runs many tests at once. Where MUOND_TEST_DEVICES says so, on
// that many devices that are like real ones (device_like_backend.h).
std::unique_ptr<Service> StartService(ServiceOptions options = {.threads = 1});

// A hidden matrix of group "muon".
ParameterSpec Matrix(const std::string& name, std::int64_t rows, std::int64_t cols);
// A norm's vector of group "adamw".
ParameterSpec Vector(const std::string& name, std::int64_t elements);

// A run "run" with the groups that its parameters name: "muon" (lr 0.1, weight decay 0.1, beta
// 0.95, Nesterov) and "adamw" (lr 0.1, weight decay 0.01, betas 0.9 and 0.999).
RunSpec SpecOf(std::vector<ParameterSpec> parameters, std::int64_t world_size = 1);
// The group of that name, to be changed.
GroupSpec& GroupOf(RunSpec& spec, const std::string& name);

// Reproducible values in [-1, 1); other seeds give other values.
Floats Noise(std::int64_t elements, std::uint64_t seed);
// Noise for every parameter of the run.
Tensors NoiseFor(const RunSpec& spec, std::uint64_t seed);

// ---- Cutting tensors into the slices of ranks -------------------------------------------------

struct Cut {
  enum Kind : std::uint8_t {
    kWhole,  // parameter i lies on rank i modulo the world
    kFlat,   // ranges of the flattened tensor
    kRows,   // along the first dimension
    kCols,   // along the last dimension
  };
  Kind kind = kWhole;
  int pieces = 1;  // slices per rank; piece j lies on rank j modulo the world
};

// What `rank` holds. Replicated parameters are whole on every rank; names without data have no
// slices.
RankSlices CutOf(const RunSpec& spec, Cut cut, std::int64_t rank);

// The elements of a box of the tensor times `scale`, in `dtype`, as they go over the wire.
std::string BoxBytes(const Box& box, const Dims& shape, const Floats& tensor, Dtype dtype,
                     double scale = 1.0);

// ---- A run and all its ranks ------------------------------------------------------------------

struct TestRunOptions {
  Cut cut;
  Tensors initial;  // parameters that are missing get NoiseFor(spec, 1)
  bool resume = false;  // from a checkpoint: no initial values, the restore is waited for
  std::int64_t chunk_bytes = std::int64_t{1} << 20;
  absl::Duration call_timeout = absl::Seconds(30);
  absl::Duration step_timeout = absl::Seconds(60);
  absl::Duration recovery_timeout = absl::Seconds(300);
};

// A step in logical tensors. A parameter without a gradient is named absent by that rank.
struct StepInput {
  std::vector<std::vector<Tensors>> gradients;           // [rank][micro-batch]; one rank: all alike
  StepBegin begin{.loss_scale = 0, .micro_batches = 0};  // zeros are filled in
  std::optional<Dtype> dtype;                            // missing: each parameter's
  bool scaled = false;                                   // the gradients are scaled already
};

class TestRun {
 public:
  // Opens every rank and pushes the initial values.
  TestRun(Service& service, RunSpec spec, TestRunOptions options = {})
      : TestRun(service.channel(), std::move(spec), std::move(options)) {}
  // Through any daemon of a cluster.
  TestRun(const std::shared_ptr<grpc::Channel>& channel, RunSpec spec, TestRunOptions options = {});

  // All ranks take the step at once, each on its own thread; their outcomes are the same (checked).
  // Gradients are given unscaled and sent times the loss scale.
  StepOutcome Step(const Tensors& gradients);
  StepOutcome Step(const StepInput& input);
  // What each rank was answered.
  std::vector<absl::StatusOr<StepOutcome>> TryStep(const StepInput& input);
  // One rank alone; waits for the others.
  absl::StatusOr<StepOutcome> StepRank(std::int64_t rank, const StepInput& input);

  // All ranks go on from these values, whatever state the daemons have or have lost.
  void Reinitialize(const Tensors& values);

  // All ranks add these parameters at once, cut as the others, and then their values (those that
  // are missing get NoiseFor(spec, 1)); or what each was told.
  void Add(const ParameterAddition& addition, const Tensors& initial = {});
  std::vector<absl::Status> TryAdd(const ParameterAddition& addition);

  // Whole tensors at the present version, put together from what all ranks pull: in the parameters'
  // dtype, or the fp32 master weights.
  Tensors Pulled() { return PullAll(false); }
  Tensors Weights() { return PullAll(true); }

  std::string TensorDigest() { return Digest().tensor_digest(); }
  v1::DigestReply Digest(bool per_parameter = false);
  v1::RunStatus Status();
  v1::ParameterState Describe(const std::string& parameter);

  client::Session& session(std::int64_t rank = 0) { return *sessions_.at(rank); }
  const RunSpec& spec() const { return spec_; }
  const RankSlices& slices(std::int64_t rank) const { return slices_.at(rank); }
  const ParameterSpec& parameter(const std::string& name) const;
  client::Admin& admin() { return admin_; }

 private:
  // True when the run then has all values. `anew`: by Session::Reinitialize. Parameters from `from`
  // on.
  bool InitializeRank(std::int64_t rank, const Tensors& values, bool anew, std::size_t from = 0);
  Tensors PullAll(bool master);

  RunSpec spec_;
  const Cut cut_;
  std::vector<RankSlices> slices_;
  std::vector<std::unique_ptr<client::Session>> sessions_;
  client::Admin admin_;
};

}  // namespace muond::cluster
