// How long a trainer waits after its last push, with Newton-Schulz after the verdict and before it:
// blocks of GPT-2 124M, whose gradients arrive one after the other as in a backward pass. In one
// process, one rank. Prints a line for each setting; digests must be equal.
//
//   overlap_benchmark [BLOCKS [STEPS [BACKWARD_SECONDS...]]]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

RunSpec SpecOfBlocks(int blocks) {
  std::vector<ParameterSpec> parameters;
  for (int i = 0; i < blocks; ++i) {
    const std::string block = "h." + std::to_string(i) + ".";
    parameters.push_back(Matrix(block + "attn.qkv", 2304, 768));
    parameters.push_back(Matrix(block + "attn.proj", 768, 768));
    parameters.push_back(Matrix(block + "mlp.fc", 3072, 768));
    parameters.push_back(Matrix(block + "mlp.proj", 768, 3072));
  }
  return SpecOf(std::move(parameters));
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Timing {
  double push = 0, exposed = 0;  // seconds, medians
  std::string digest;
};

Timing Measure(int blocks, int steps, double backward, bool overlap) {
  auto service = StartService({.threads = 0, .overlap = overlap});
  TestRun run(*service, SpecOfBlocks(blocks));
  client::Session& session = run.session();
  Timing timing;
  std::vector<double> pushes, exposed;
  for (int step = 0; step < steps + 1; ++step) {
    const Tensors gradients = NoiseFor(run.spec(), 100 + step);
    Must(session.Begin({.step = step, .loss_scale = 1}));
    const absl::Time start = absl::Now();
    const auto& parameters = run.spec().parameters;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      // The last layer's gradients come first, each when its part of the backward pass is over.
      const Floats& values = gradients.at(parameters[parameters.size() - 1 - i].name);
      const double at = backward * static_cast<double>(i + 1) / parameters.size();
      absl::SleepFor(start + absl::Seconds(at) - absl::Now());
      const client::SliceSource source{.parameter = parameters[parameters.size() - 1 - i].name,
                                       .data = values.data(),
                                       .elements = std::ssize(values)};
      Must(session.Push({&source, 1}));
    }
    const absl::Time pushed = absl::Now();
    MUOND_CHECK(Must(session.Finish()).applied, "every step is applied");
    if (step == 0) continue;  // memory is touched for the first time
    pushes.push_back(absl::ToDoubleSeconds(pushed - start));
    exposed.push_back(absl::ToDoubleSeconds(absl::Now() - pushed));
  }
  return {Median(pushes), Median(exposed), run.TensorDigest()};
}

int Main(int argc, char** argv) {
  const int blocks = argc > 1 ? std::atoi(argv[1]) : 2;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 5;
  std::vector<double> backwards;
  for (int i = 3; i < argc; ++i) backwards.push_back(std::atof(argv[i]));
  if (backwards.empty()) backwards = {0, 1};
  std::printf("%d blocks of GPT-2 124M, %d steps, medians in seconds\n", blocks, steps);
  std::printf("%9s %8s %8s %18s\n", "backward", "overlap", "pushes", "after last push");
  bool same = true;
  for (const double backward : backwards) {
    std::string digest;
    for (const bool overlap : {false, true}) {
      const Timing timing = Measure(blocks, steps, backward, overlap);
      std::printf("%9.2f %8s %8.3f %18.3f\n", backward, overlap ? "on" : "off", timing.push,
                  timing.exposed);
      std::fflush(stdout);
      same = same && (digest.empty() || digest == timing.digest);
      digest = timing.digest;
    }
  }
  std::printf("digests are %s\n", same ? "equal" : "DIFFERENT");
  return same ? 0 : 1;
}

}  // namespace
}  // namespace muond::cluster

int main(int argc, char** argv) { return muond::cluster::Main(argc, argv); }
