// muond-example-remote: the smallest trainer. Minimizes |W - T|^2 / 2 for a matrix W through the
// daemon at $MUOND_ENDPOINT, and prints the loss as it falls.
#include <cstdio>
#include <string>
#include <vector>

#include "client/cpp/session.h"

using muond::client::Session;
using muond::client::SliceSink;
using muond::client::SliceSource;

namespace {

constexpr int kRows = 8;
constexpr int kCols = 4;
constexpr int kSteps = 20;

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

absl::Status Train(const std::string& name) {
  auto session =
      Session::Open(MakeRun(name), 0, {{"w", {muond::WholeBox({kRows, kCols})}}}, {});
  if (!session.ok()) return session.status();

  std::vector<float> w(kRows * kCols, 0.0F);
  const auto initialized = (*session)->Initialize(
      std::vector<SliceSource>{{.parameter = "w", .data = w.data(), .elements = std::ssize(w)}});
  if (!initialized.ok()) return initialized.status();

  for (int step = 0; step < kSteps; ++step) {
    // The target is 1 on the diagonal and 0 elsewhere; the gradient is the difference.
    double loss = 0;
    std::vector<float> gradient(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) {
      gradient[i] = w[i] - (i / kCols == i % kCols ? 1.0F : 0.0F);
      loss += gradient[i] * gradient[i] / 2;
    }
    if (step % 5 == 0) std::printf("step %d: loss %.4f\n", step, loss);
    muond::StepBegin begin;
    begin.muon["all"] = {.lr = 0.05};
    begin.adamw["all"] = {.lr = 0.05};
    const auto outcome = (*session)->Step(
        begin, std::vector<SliceSource>{
                   {.parameter = "w", .data = gradient.data(), .elements = std::ssize(gradient)}});
    if (!outcome.ok()) return outcome.status();
    absl::Status pulled = (*session)->Pull(
        outcome->version,
        std::vector<SliceSink>{{.parameter = "w", .data = w.data(), .elements = std::ssize(w)}});
    if (!pulled.ok()) return pulled;
  }
  return (*session)->Close().status();
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status = Train(argc > 1 ? argv[1] : "remote-example");
  if (status.ok()) return 0;
  std::fprintf(stderr, "muond-example-remote: %s\n", std::string(status.message()).c_str());
  return 1;
}
