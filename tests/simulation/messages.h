// What simulated trainers and daemons say to each other: the calls of the service and of its peers,
// each answered by one Answer. Plain values.
//
// A lineage is a stretch of the run in which state is handed on from step to step. It is named by
// the generation that it began with: 1, then that of each re-initialization.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "server/step/step_machine.h"
#include "tests/simulation/scenario.h"

namespace muond::simulation {

// -- Calls of trainers.
struct BeginCall {
  std::int64_t rank = 0;
  std::int64_t generation = 0;
  StepBegin begin;
};
struct PushCall {
  SliceId id;
  std::int64_t generation = 0;
  std::int64_t step = 0;
  Content content;  // stands for the bytes
};
struct FinishCall {
  std::int64_t rank = 0;
  std::int64_t generation = 0;
  std::int64_t step = 0;
  std::vector<std::string> absent;
};
struct SkipCall {
  std::int64_t rank = 0;
  std::int64_t generation = 0;
  std::int64_t step = 0;
  SkipCause cause = SkipCause::kTrainer;
  double loss_scale = 0;
};
// The trainer has given up waiting for the answer to its call of this number.
struct CancelCall {
  std::uint64_t call = 0;
};
struct JoinCall {};
// Asks for a generation above this one; `reinitialize`: with new state, at this step at least.
struct NewGenerationCall {
  std::int64_t above = 0;
  bool reinitialize = false;
  std::int64_t resume_step = 0;
  bool grow = false;  // with the late parameters
};

// -- Calls of daemons.
struct VotesCall {
  std::vector<CastVote> votes;
  std::int64_t step = 0;  // whose votes are asked for
};
struct PrepareCall {
  std::int64_t generation = 0;
  bool reinitialize = false;
};
struct RaiseCall {
  std::int64_t generation = 0;
  std::vector<CastVote> settled;
  bool reinitialize = false;
  std::int64_t resume_step = 0;
  bool grow = false;
  bool follow = false;  // it grows since another daemon has grown
};

// -- Answers.
struct Position {
  bool usable = false;  // it has state, and has not failed
  bool committing = false;
  bool grown = false;   // it has the late parameters
  std::int64_t lineage = 0;
  std::int64_t generation = 0;
  std::int64_t promised = 0;
  std::int64_t next_step = 0;
  double loss_scale = 1;
};
struct Answer {
  absl::Status status;
  Position position;
  std::optional<StepOutcome> outcome;  // of a Finish or Skip
  std::vector<CastVote> votes;         // of Votes; of Prepare: those promised
};

using Body = std::variant<BeginCall, PushCall, FinishCall, SkipCall, CancelCall, JoinCall,
                          NewGenerationCall, VotesCall, PrepareCall, RaiseCall, Answer>;

struct Message {
  int from = 0;
  int to = 0;
  std::uint64_t call = 0;  // the caller's number; its answer repeats it
  Body body;
};

// One line for the log.
std::string ToString(const Message& message);
std::string ToString(const Vote& vote);

}  // namespace muond::simulation
