// Which checkpoint a run goes back to, and how all daemons do it together.
#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "proto/check.h"
#include "proto/steady_time.h"
#include "server/checkpoint/layout.h"
#include "server/checkpoint/part.h"
#include "server/cluster/ask_checkpoint.h"
#include "server/cluster/hello.h"
#include "server/run/checkpointer.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

constexpr absl::Duration kRestoreWait = absl::Seconds(60);
constexpr absl::Duration kStageTimeout = absl::Minutes(30);
// Between automatic tries: while daemons come back, and when something else is wrong.
constexpr absl::Duration kSoon = absl::Milliseconds(200);
constexpr absl::Duration kLater = absl::Seconds(5);

// Whether another checkpoint may do where this one did not.
bool Damaged(const absl::Status& status) {
  return absl::IsDataLoss(status) || absl::IsNotFound(status) ||
         absl::IsInvalidArgument(status) || absl::IsUnimplemented(status);
}

std::vector<checkpoint::ShardSink> SinksOf(const RunSpec& spec, const StateCopies& copies) {
  std::vector<checkpoint::ShardSink> sinks;
  for (const StateCopy& copy : copies) {
    for (const StateCopy::Shard& shard : copy.shards) {
      checkpoint::ShardSink sink{
          spec.parameters[shard.parameter].name, shard.first, shard.elements, {}};
      for (const StateCopy::Tensor& tensor : shard.tensors) {
        sink.tensors.push_back({tensor.name, tensor.dtype, tensor.data});
      }
      sinks.push_back(std::move(sink));
    }
  }
  return sinks;
}

}  // namespace

void Checkpointer::OnMade(Run& run) {
  if (options_.restore == "none" || !has_directory()) return;
  const auto candidates = Candidates(run, "");
  if (!candidates.ok()) {
    if (!absl::IsNotFound(candidates.status())) {
      spdlog::error("run \"{}\": {}", run.name(), std::string(candidates.status().message()));
    }
    return;
  }
  run.ExpectRestore(*checkpoint::StepOfName(candidates->front()));
}

// Names to try, in this order. NOT_FOUND when there is none.
absl::StatusOr<std::vector<std::string>> Checkpointer::Candidates(const Run& run,
                                                                  const std::string& name) {
  if (!has_directory()) {
    return absl::NotFoundError(absl::StrFormat(
        "run \"%s\": restore: there is no directory for checkpoints", run.name()));
  }
  if (!name.empty()) {
    if (!checkpoint::StepOfName(name)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("restore \"%s\": expected a name as ckpt-1200", name));
    }
    return std::vector<std::string>{name};
  }
  std::int64_t step = -1;
  const bool exact = absl::SimpleAtoi(options_.restore, &step);
  MUOND_ASSIGN_OR_RETURN(const auto listed, checkpoint::Store(*files_, run.name()).List());
  std::vector<std::string> names;
  for (const checkpoint::Listed& one : listed) {
    if (exact && checkpoint::StepOfName(one.name) != step) continue;
    if (one.status.ok()) names.push_back(one.name);
  }
  if (!names.empty()) return names;
  return absl::NotFoundError(absl::StrFormat(
      "run \"%s\": restore: there is no complete checkpoint%s", run.name(),
      exact ? absl::StrFormat(" of step %d", step) : ""));
}

// The run has lost its state, here or elsewhere.
void Checkpointer::AutoRestore(const std::shared_ptr<Run>& run, Progress& progress) {
  if (SteadyNow() < progress.retry) return;
  if (options_.restore == "none" && !run->has_buddy()) return;
  v1::RestoreRequest request;
  request.set_run(run->name());
  request.set_name(progress.unfinished);
  request.set_if_generation(run->Position().generation);
  const auto restored = coordinates()
                            ? RestoreNow(run, request)
                            : PassOn(*peers_, request, SteadyNow() + kRestoreWait + kStageTimeout);
  if (restored.ok()) {
    progress.complaint.clear();
    return;
  }
  const bool waits = absl::IsUnavailable(restored.status());
  progress.retry = SteadyNow() + (waits ? kSoon : kLater);
  const std::string complaint(restored.status().message());
  if (complaint == progress.complaint) return;
  progress.complaint = complaint;
  if (waits) {
    spdlog::info("run \"{}\": restore waits: {}", run->name(), complaint);
  } else {
    spdlog::error("run \"{}\": restore failed: {}", run->name(), complaint);
  }
}

void Checkpointer::Restore(std::shared_ptr<Run> run, const v1::RestoreRequest& request,
                           RestoreDone done) {
  coordinate_->Post([this, run = std::move(run), request, done = std::move(done)] {
    done(coordinates() ? RestoreNow(run, request)
                       : PassOn(*peers_, request, SteadyNow() + kRestoreWait + kStageTimeout));
  });
}

absl::StatusOr<v1::RestoreReply> Checkpointer::RestoreNow(const std::shared_ptr<Run>& run,
                                                          const v1::RestoreRequest& request) {
  const absl::Time deadline = SteadyNow() + (request.wait_ms() > 0
                                                 ? absl::Milliseconds(request.wait_ms())
                                                 : kRestoreWait);
  if (request.if_generation() > 0 && ProgressOf(run).unfinished.empty() &&
      !AnyNeedsRestore(*run)) {
    return absl::UnavailableError(
        absl::StrFormat("run \"%s\": restore: no daemon needs it any more", run->name()));
  }
  if (request.if_generation() > 0 && run->has_buddy() && ProgressOf(run).unfinished.empty()) {
    absl::Status recovered = RecoverFromBuddies(run, deadline);
    if (recovered.ok()) return ReplyOf(*run, "");
    if (absl::IsUnavailable(recovered) || options_.restore == "none") return recovered;
  }
  MUOND_ASSIGN_OR_RETURN(const auto names, Candidates(*run, request.name()));
  absl::Status status;
  for (const std::string& name : names) {
    status = RestoreFrom(run, name, request.allow_relayout(), deadline);
    if (status.ok()) {
      run->metrics().OnCheckpoint(RunMetrics::CheckpointResult::kRestored);
      Progress& progress = ProgressOf(run);
      progress.version = progress.periodic = -1;  // what was saved is of another life
      progress.unfinished.clear();
      return ReplyOf(*run, name);
    }
    if (absl::IsUnavailable(status)) return status;  // nothing is wrong but the time
    run->metrics().OnCheckpoint(RunMetrics::CheckpointResult::kRestoreFailed);
    if (!Damaged(status)) return status;
    spdlog::error("run \"{}\": {} CANNOT BE RESTORED: {}; {}", run->name(), name,
                  std::string(status.message()),
                  name == names.back() ? "there is no other" : "trying the one before");
  }
  return status;
}

v1::RestoreReply Checkpointer::ReplyOf(const Run& run, const std::string& name) const {
  const RunPosition position = run.Position();
  v1::RestoreReply reply;
  reply.set_name(name);
  reply.mutable_position()->set_generation(position.generation);
  reply.mutable_position()->set_next_step(position.next_step);
  return reply;
}

absl::Status Checkpointer::RecoverFromBuddies(const std::shared_ptr<Run>& run,
                                              absl::Time deadline) {
  const absl::Time start = SteadyNow();
  absl::Status recovered = run->RecoverOnAll(deadline);
  if (absl::IsNotFound(recovered)) {
    // On a daemon that has come back nobody has registered the run yet.
    recovered = absl::UnavailableError(recovered.message());
  }
  if (recovered.ok()) {
    run->metrics().OnBuddyRecovery(true);
    ProgressOf(run).periodic = -1;
    spdlog::warn("run \"{}\": brought back from buddies in {}: no step is lost, the next is {}",
                 run->name(), absl::FormatDuration(SteadyNow() - start),
                 run->Position().next_step);
  } else if (!absl::IsUnavailable(recovered)) {
    run->metrics().OnBuddyRecovery(false);
    spdlog::error("run \"{}\": CANNOT BE BROUGHT BACK FROM BUDDIES: {}; trying checkpoints, steps "
                  "since the newest are lost",
                  run->name(), std::string(recovered.message()));
  }
  return recovered;
}

// Every daemon has its part in memory, read and checked, before any changes a byte of its state.
absl::Status Checkpointer::RestoreFrom(const std::shared_ptr<Run>& run, const std::string& name,
                                       bool allow_relayout, absl::Time deadline) {
  v1::StageRequest request;
  *request.mutable_peer() = peers_->Introduction(run->name(), run->PlanName());
  request.set_name(name);
  request.set_allow_relayout(allow_relayout);
  std::int64_t step = 0;
  const auto statuses =
      AskStage(*peers_, request, SteadyNow() + kStageTimeout, [&]() -> absl::Status {
        MUOND_ASSIGN_OR_RETURN(step, StageOwn(*run, name, allow_relayout));
        return absl::OkStatus();
      });
  // What is damaged stays so: it is told before what may pass.
  absl::Status worst;
  for (const absl::Status& status : statuses) {
    if (!status.ok() && (worst.ok() || Damaged(status))) worst = status;
  }
  if (!worst.ok()) {
    run->Stage("", nullptr, {});
    return worst;
  }
  // Reading it may have taken longer than whoever asked wanted to wait.
  absl::Status restored =
      run->RestoreOnAll(name, step, std::max(deadline, SteadyNow() + kRestoreWait));
  if (restored.ok()) return restored;
  // Some may have changed over: it is tried again until all have, whoever asked for it.
  ProgressOf(run).unfinished = name;
  return absl::UnavailableError(absl::StrFormat("restore from \"%s\": not on all daemons yet: %s",
                                                name, restored.message()));
}

// Here, or on a daemon that has just come back.
bool Checkpointer::AnyNeedsRestore(const Run& run) {
  if (run.Position().state == RunState::kNeedsRestore) return true;
  if (peers_->count() == 1) return false;
  const auto answers = AskHello(*peers_, run.name(), run.PlanName(), absl::Seconds(1));
  return std::any_of(answers.begin(), answers.end(), [](const HelloAnswer& answer) {
    return answer.status.ok() && answer.position.state == v1::RUN_STATE_NEEDS_RESTORE;
  });
}

absl::StatusOr<std::int64_t> Checkpointer::StageOwn(Run& run, const std::string& name,
                                                    bool allow_relayout) {
  checkpoint::Store store(*files_, run.name());
  const auto named = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrFormat("run \"%s\": restore from \"%s\": %s",
                                                       run.name(), name, status.message()));
  };
  const auto manifest = store.ReadManifest(name);
  if (!manifest.ok()) return named(manifest.status());
  const absl::Status alike = checkpoint::CheckLayout(
      *manifest, checkpoint::LayoutOf(run.spec(), run.routing()), allow_relayout);
  if (!alike.ok()) return named(alike);
  const std::shared_ptr<StateCopies> copies = run.MakeStateCopies();
  const absl::Status read = checkpoint::ReadShards(*files_, store.PathOf(name), *manifest,
                                                   SinksOf(run.spec(), *copies));
  if (!read.ok()) return named(read);
  std::map<std::string, std::int64_t> t;
  for (const checkpoint::Parameter& parameter : manifest->parameters) {
    t[parameter.name] = parameter.t;
  }
  for (StateCopy& copy : *copies) {
    for (StateCopy::Shard& shard : copy.shards) {
      shard.t = t.at(run.spec().parameters[shard.parameter].name);
    }
  }
  run.Stage(name, copies, manifest->control);
  return manifest->control.step;
}

void Checkpointer::Stage(std::shared_ptr<Run> run, const v1::StageRequest& request,
                         std::function<void(const absl::StatusOr<v1::StageReply>&)> done) {
  parts_->Post([this, run = std::move(run), request, done = std::move(done)] {
    const auto step = StageOwn(*run, request.name(), request.allow_relayout());
    if (!step.ok()) return done(step.status());
    v1::StageReply reply;
    reply.set_step(*step);
    done(reply);
  });
}

}  // namespace muond
