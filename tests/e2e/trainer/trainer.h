// One rank that trains, step by step, and says what it does: a line of JSON for each call, with its
// status, its time and the time that it had, and a line before each phase of a step, after which it
// waits for a word (unless it runs free).
//
//   {"event": "at", "phase": "push", "step": 3}          <- waits for a line
//   {"event": "call", "call": "push", "step": 3, "code": "OK", "seconds": 0.01, "limit": 30, ...}
//   {"event": "outcome", "step": 3, "applied": true, ...}
//   {"event": "interruption", "text": "run \"run\": rank 0: step 3 was interrupted, ..."}
//
// Phases: begin, push, finish, pull. After a call that failed the phase is "failed", and the word
// says what now: "again" (rejoin and go on from where the run stands), "raise" (the generation),
// "reinitialize" (from this rank's values) or "quit".
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/session.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/trainer/model.h"

namespace muond::test_trainer {

struct TrainerOptions {
  ModelOptions model;
  client::SessionOptions session;
  std::int64_t rank = 0;
  std::int64_t steps = 1;
  bool whole_steps = false;  // Session::Step instead of its pieces; phases begin and pull
  bool free = false;         // waits for no word, and tells only times, at the end
  std::int64_t warmup = 0;   // of the steps: not in the times
};

class Trainer {
 public:
  explicit Trainer(TrainerOptions options);
  ~Trainer();
  // Until all steps are taken, or it is told to quit. The exit code.
  int Run();

 private:
  absl::Status Join();
  absl::Status Train();
  absl::Status TakeStep();
  absl::Status StepWhole(const StepBegin& begin);
  absl::Status StepInPieces(const StepBegin& begin);
  absl::Status Pull();
  absl::Status Recover(const std::string& word);
  // Does the call and tells of it. `limit`: what it may take.
  absl::Status Timed(const char* call, absl::Duration limit,
                     const std::function<absl::Status()>& body);
  // Waits for a word; "quit" when nobody is there any more.
  std::string Ask(const char* phase);
  void Tell(const nlohmann::json& event);
  void TellOutcome(const StepOutcome& outcome);
  void TellTimes();
  std::vector<client::SliceSource> Sources(bool gradients) const;

  TrainerOptions options_;
  RunSpec run_;
  std::vector<Slice> slices_;
  std::unique_ptr<client::Session> session_;
  std::int64_t step_ = 0;     // that is being taken
  std::int64_t version_ = -1;  // of the values; -1: those to start with
  std::map<std::string, std::vector<double>> times_;
};

}  // namespace muond::test_trainer
