// muond-test-trainer: one rank of a run for the end-to-end tests (trainer.h says what it prints).
#include <string>

#include "CLI/CLI.hpp"
#include "absl/time/time.h"
#include "tests/e2e/trainer/trainer.h"

namespace muond::test_trainer {
namespace {

int Main(int argc, char** argv) {
  TrainerOptions options;
  double call_seconds = 30, step_seconds = 60, bulk_seconds = 60, recovery_seconds = -1;
  CLI::App app("one rank of a run, for the end-to-end tests", "muond-test-trainer");
  app.add_option("--endpoint", options.session.endpoint, "any daemon of the run")->required();
  app.add_option("--run", options.model.run, "name of the run");
  app.add_option("--model", options.model.kind, "mixed, one, or square:N,SIZE");
  app.add_option("--rank", options.rank, "of this trainer");
  app.add_option("--world", options.model.world_size, "how many ranks");
  app.add_option("--seed", options.model.seed, "of values, gradients and overflows");
  app.add_option("--skip-every", options.model.skip_every, "of n steps one overflows; 0: none");
  app.add_option("--steps", options.steps, "how many to take");
  app.add_option("--chunk-bytes", options.session.chunk_bytes, "payload of one message");
  app.add_option("--call-timeout", call_seconds, "seconds for a control call");
  app.add_option("--step-timeout", step_seconds, "seconds for Finish");
  app.add_option("--bulk-timeout", bulk_seconds, "seconds for a stream");
  app.add_option("--recovery-timeout", recovery_seconds,
                 "seconds that an interruption may last; without --whole-steps none by default");
  app.add_flag("--whole-steps", options.whole_steps, "Session::Step instead of its pieces");
  app.add_flag("--free", options.free, "wait for nobody, tell times at the end");
  app.add_option("--warmup", options.warmup, "steps that are not in the times");
  CLI11_PARSE(app, argc, argv);
  options.session.call_timeout = absl::Seconds(call_seconds);
  options.session.step_timeout = absl::Seconds(step_seconds);
  options.session.bulk_timeout = absl::Seconds(bulk_seconds);
  if (recovery_seconds < 0) recovery_seconds = options.whole_steps ? 60 : 0;
  options.session.recovery_timeout = absl::Seconds(recovery_seconds);
  return Trainer(options).Run();
}

}  // namespace
}  // namespace muond::test_trainer

int main(int argc, char** argv) { return muond::test_trainer::Main(argc, argv); }
