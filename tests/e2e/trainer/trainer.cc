#include "tests/e2e/trainer/trainer.h"

#include <iostream>
#include <utility>

#include "absl/time/clock.h"
#include "proto/check.h"

namespace muond::test_trainer {

using client::SliceSink;
using client::SliceSource;

Trainer::Trainer(TrainerOptions options) : options_(std::move(options)) {}
Trainer::~Trainer() = default;

int Trainer::Run() {
  auto run = MakeRun(options_.model);
  if (!run.ok()) {
    std::cerr << run.status() << "\n";
    return 2;
  }
  run_ = *std::move(run);
  options_.session.on_interruption = [this](const client::Interruption& interruption) {
    Tell({{"event", "interruption"}, {"text", client::Describe(interruption)}});
  };
  slices_ = MakeSlices(run_, options_.model, options_.rank);
  absl::Status status = Join();
  if (status.ok()) status = Train();
  while (!status.ok()) {
    const std::string word = Ask("failed");
    if (word == "quit") return 1;
    status = Recover(word);
    if (status.ok()) status = Train();
  }
  if (options_.free) TellTimes();
  Tell({{"event", "done"}, {"step", session_->next_step()}});
  return 0;
}

absl::Status Trainer::Join() {
  // One call to the first contact, then one to all others at once.
  return Timed("open", 2 * options_.session.call_timeout, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(session_, client::Session::Open(run_, options_.rank, BoxesOf(slices_),
                                                           options_.session));
    return absl::OkStatus();
  });
}

// From wherever the run stands.
absl::Status Trainer::Train() {
  if (session_->state() == v1::RUN_STATE_NEEDS_RESTORE) {
    return absl::FailedPreconditionError("the run needs a restore");
  }
  const bool opening = session_->state() == v1::RUN_STATE_OPENING;
  if (session_->next_step() == 0 || opening) {
    // Later than at the start it is because all ranks send what they have.
    if (session_->next_step() == 0) slices_ = MakeSlices(run_, options_.model, options_.rank);
    MUOND_RETURN_IF_ERROR(Timed("initialize", options_.session.bulk_timeout, [&] {
      return session_->Initialize(Sources(false)).status();
    }));
  }
  if (session_->next_step() > 0 && version_ != session_->next_step()) {
    MUOND_RETURN_IF_ERROR(Pull());
  }
  while (session_->next_step() < options_.steps) MUOND_RETURN_IF_ERROR(TakeStep());
  return absl::OkStatus();
}

absl::Status Trainer::TakeStep() {
  step_ = session_->next_step();
  if (Ask("begin") == "quit") return absl::CancelledError("told to quit");
  StepBegin begin;
  begin.step = step_;
  begin.loss_scale = session_->loss_scale();
  // The learning rate falls, so that a step taken with another one's shows.
  for (const GroupSpec& group : run_.groups) {
    const bool adamw = group.algorithm == Algorithm::kAdamW;
    Hyperparameters values = adamw ? group.adamw : group.muon;
    values.lr /= 1.0 + 0.01 * static_cast<double>(step_);
    (adamw ? begin.adamw : begin.muon)[group.name] = values;
  }
  MakeGradients(run_, options_.model, options_.rank, step_, begin.loss_scale, slices_);
  const absl::Time start = absl::Now();
  MUOND_RETURN_IF_ERROR(options_.whole_steps ? StepWhole(begin) : StepInPieces(begin));
  if (options_.free && step_ >= options_.warmup) {
    times_["step"].push_back(absl::ToDoubleSeconds(absl::Now() - start));
  }
  Ask("pull");
  return Pull();
}

absl::Status Trainer::StepWhole(const StepBegin& begin) {
  const client::SessionOptions& session = options_.session;
  // What an interruption may last, and the try that it ends with.
  return Timed("step",
               session.recovery_timeout + session.call_timeout + session.bulk_timeout +
                   session.step_timeout,
               [&]() -> absl::Status {
                 MUOND_ASSIGN_OR_RETURN(const StepOutcome outcome,
                                        session_->Step(begin, Sources(true)));
                 TellOutcome(outcome);
                 return absl::OkStatus();
               });
}

absl::Status Trainer::StepInPieces(const StepBegin& begin) {
  const client::SessionOptions& session = options_.session;
  MUOND_RETURN_IF_ERROR(
      Timed("begin", session.call_timeout, [&] { return session_->Begin(begin); }));
  Ask("push");
  MUOND_RETURN_IF_ERROR(
      Timed("push", session.bulk_timeout, [&] { return session_->Push(Sources(true)); }));
  Ask("finish");
  return Timed("finish", session.step_timeout, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const StepOutcome outcome, session_->Finish());
    TellOutcome(outcome);
    return absl::OkStatus();
  });
}

absl::Status Trainer::Pull() {
  std::vector<SliceSink> sinks;
  std::vector<std::vector<float>> values;
  for (const Slice& slice : slices_) {
    values.emplace_back(slice.values.size());
    sinks.push_back({.parameter = slice.parameter,
                     .slice = slice.index,
                     .data = values.back().data(),
                     .elements = std::ssize(values.back())});
  }
  const std::int64_t version = session_->next_step();
  MUOND_RETURN_IF_ERROR(Timed("pull",
                              options_.session.recovery_timeout + options_.session.bulk_timeout,
                              [&] { return session_->Pull(version, sinks); }));
  for (std::size_t i = 0; i < slices_.size(); ++i) slices_[i].values = std::move(values[i]);
  version_ = version;
  return absl::OkStatus();
}

absl::Status Trainer::Recover(const std::string& word) {
  if (session_ == nullptr) return Join();
  const absl::Duration limit = 2 * options_.session.call_timeout;
  if (word == "raise") {
    return Timed("raise", limit + options_.session.call_timeout,
                 [&] { return session_->RaiseGeneration("told to"); });
  }
  if (word == "reinitialize") {
    return Timed("reinitialize",
                 2 * limit + options_.session.call_timeout + options_.session.bulk_timeout, [&] {
                   return session_->Reinitialize(Sources(false), "told to").status();
                 });
  }
  return Timed("rejoin", limit, [&] { return session_->Rejoin(); });
}

absl::Status Trainer::Timed(const char* call, absl::Duration limit,
                            const std::function<absl::Status()>& body) {
  const absl::Time start = absl::Now();
  absl::Status status = body();
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  if (options_.free && step_ >= options_.warmup) times_[call].push_back(seconds);
  if (!options_.free || !status.ok()) {
    Tell({{"event", "call"},
          {"call", call},
          {"step", step_},
          {"code", absl::StatusCodeToString(status.code())},
          {"message", std::string(status.message())},
          {"seconds", seconds},
          {"limit", absl::ToDoubleSeconds(limit)}});
  }
  return status;
}

std::string Trainer::Ask(const char* phase) {
  if (options_.free && std::string(phase) != "failed") return "go";
  nlohmann::json event = {{"event", "at"}, {"phase", phase}, {"step", step_}};
  if (session_ != nullptr) {
    event["generation"] = session_->generation();
    event["next_step"] = session_->next_step();
    event["needs_restore"] = session_->state() == v1::RUN_STATE_NEEDS_RESTORE;
  }
  Tell(event);
  std::string word;
  if (!std::getline(std::cin, word)) return "quit";
  return word;
}

void Trainer::Tell(const nlohmann::json& event) { std::cout << event.dump() << std::endl; }

void Trainer::TellOutcome(const StepOutcome& outcome) {
  if (options_.free) return;
  Tell({{"event", "outcome"},
        {"step", outcome.step},
        {"applied", outcome.applied},
        {"grad_norm", outcome.grad_norm},
        {"clip_coefficient", outcome.clip_coefficient},
        {"next_loss_scale", outcome.next_loss_scale}});
}

void Trainer::TellTimes() { Tell({{"event", "times"}, {"seconds", times_}}); }

std::vector<SliceSource> Trainer::Sources(bool gradients) const {
  std::vector<SliceSource> sources;
  for (const Slice& slice : slices_) {
    const std::vector<float>& values = gradients ? slice.gradient : slice.values;
    sources.push_back({.parameter = slice.parameter,
                       .slice = slice.index,
                       .data = values.data(),
                       .elements = std::ssize(values)});
  }
  return sources;
}

}  // namespace muond::test_trainer
