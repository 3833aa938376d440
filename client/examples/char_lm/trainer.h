// One training run through a daemon: gradients in fp16 go there, parameters in fp16 come back; the
// optimizer's state, its master weights and the loss scale live in the service.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/session.h"
#include "client/examples/char_lm/model.h"
#include "client/examples/char_lm/text/corpus.h"

namespace muond::char_lm {

// What Muon trains with here is the service's routing: hidden matrices by Muon, embedding, lm_head
// and biases by AdamW. AdamW alone is asked for by the group's algorithm.
enum class Optimizer { kMuon, kAdamW };
const char* OptimizerName(Optimizer optimizer);  // "muon", "adamw": keys of summary.json

// The same for every run of one comparison.
struct TrainSettings {
  ModelShape shape;  // vocabulary: the corpus's
  std::int64_t batch = 1024;
  std::uint64_t seed = 1;
  std::int64_t validation_examples = 16384;  // evenly spaced over the held-out text
  double initial_loss_scale = 65536;
  std::int64_t loss_scale_window = 200;      // good steps before the scale doubles
};

// What differs between them.
struct TrainJob {
  std::string run;
  Optimizer optimizer = Optimizer::kMuon;
  // Peak learning rates. Muon's updates are scaled to AdamW's RMS, so that both are of one size.
  double muon_lr = 0;  // not used by AdamW alone
  double adamw_lr = 0;
  std::int64_t steps = 0;             // consumed steps, the skipped ones included
  std::int64_t validation_every = 0;  // and at the start and the end
  bool keep_open = false;             // leave the run to be looked at
};

struct LossPoint {
  std::int64_t step = 0;       // steps consumed
  double train = 0;            // mean over the batches since the last point; at step 0 the first's
  double validation = 0;       // nats a character
};

struct TrainResult {
  v1::RoutingReport routing;
  v1::RunStatus status;        // of the daemon, after the last step
  std::string tensor_digest;   // likewise
  std::string control_digest;
  std::vector<double> loss_scale;    // that each step's gradients were made with
  std::vector<LossPoint> curve;
  std::vector<std::string> unmoved;  // parameters whose master weights are the initial ones
  double steps_per_second = 0;       // without validation
  double final_loss() const { return curve.back().validation; }
};

using OnStep = std::function<void(std::int64_t step, double train_loss, double loss_scale)>;

// Errors are the session's.
absl::StatusOr<TrainResult> Train(const Corpus& corpus, const TrainSettings& settings,
                                  const TrainJob& job, const client::SessionOptions& options,
                                  const OnStep& on_step);

// The smallest power of two, `from` or larger, at which the first step's gradients overflow; found
// by forward and backward passes here, without the daemon.
double FindOverflowingScale(const Corpus& corpus, const TrainSettings& settings, double from);

// The learning rate at step `done` of `steps`: up over the first 20, then down along a cosine to a
// tenth. `done` counts applied steps: a skipped one does not move the schedule.
double LearningRate(double peak, std::int64_t done, std::int64_t steps);

}  // namespace muond::char_lm
