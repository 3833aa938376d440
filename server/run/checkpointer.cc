// When checkpoints are saved, and how one is put together.
#include "server/run/checkpointer.h"

#include <unistd.h>

#include <algorithm>
#include <future>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/check.h"
#include "proto/steady_time.h"
#include "server/checkpoint/layout.h"
#include "server/checkpoint/part.h"
#include "server/cluster/ask_checkpoint.h"
#include "server/cluster/hello.h"
#include "server/run/checkpoint_message.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(200);
constexpr absl::Duration kDefaultWait = absl::Seconds(60);
// Of one call to another daemon: a part may be many gigabytes on a slow disk.
constexpr absl::Duration kPartTimeout = absl::Minutes(30);
constexpr int kTries = 5;
// Of a stopped run: between looks at its step, and how long a vote that was cast may be on its way.
constexpr absl::Duration kPoll = absl::Milliseconds(10);
constexpr absl::Duration kVoteTravels = absl::Seconds(1);

absl::Duration WaitOf(std::int64_t wait_ms) {
  return wait_ms > 0 ? absl::Milliseconds(wait_ms) : kDefaultWait;
}

std::vector<checkpoint::ShardView> ViewsOf(const RunSpec& spec, const StateCopies& copies) {
  std::vector<checkpoint::ShardView> views;
  for (const StateCopy& copy : copies) {
    for (const StateCopy::Shard& shard : copy.shards) {
      const ParameterSpec& parameter = spec.parameters[shard.parameter];
      checkpoint::ShardView view{parameter.name, *parameter.shape, shard.first,
                                 shard.elements, shard.t,          {}};
      for (const StateCopy::Tensor& tensor : shard.tensors) {
        view.tensors.push_back({tensor.name, tensor.dtype, tensor.data});
      }
      views.push_back(std::move(view));
    }
  }
  return views;
}

// The first that is not OK, those that tell that the version is past first: they can be mended.
absl::Status Worst(const std::vector<absl::StatusOr<v1::SavePartReply>>& replies) {
  absl::Status worst;
  for (const auto& reply : replies) {
    if (reply.ok()) continue;
    if (worst.ok() || absl::IsFailedPrecondition(reply.status())) worst = reply.status();
  }
  return worst;
}

bool HasVoted(const std::vector<CastVote>& votes, int daemon) {
  return std::any_of(votes.begin(), votes.end(),
                     [daemon](const CastVote& cast) { return cast.daemon == daemon; });
}

// The run is stopped. Until the step that this daemon has voted on is over: the others may apply
// it, and the state before it is then none of theirs. Not for ever: a daemon that was stopped
// before it voted never will.
void AwaitVerdict(Peers& peers, const Run& run, absl::Time deadline) {
  absl::Time withheld = absl::InfiniteFuture();  // since when such a daemon is known
  while (SteadyNow() < deadline && SteadyNow() - withheld < kVoteTravels) {
    const auto votes = run.VotesOf(run.Position().next_step);
    if (!HasVoted(votes, peers.self())) return;
    bool seen = false;
    for (const HelloAnswer& answer :
         AskHello(peers, run.name(), run.PlanName(), absl::Seconds(1))) {
      seen = seen || (answer.status.ok() && answer.position.state == v1::RUN_STATE_DRAINING &&
                      !HasVoted(votes, answer.daemon));
    }
    withheld = seen ? std::min(withheld, SteadyNow()) : absl::InfiniteFuture();
    absl::SleepFor(kPoll);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Open(CheckpointOptions options,
                                                                 std::shared_ptr<Peers> peers) {
  if (options.keep < 1) {
    return absl::InvalidArgumentError("checkpoint-keep: at least one checkpoint must stay");
  }
  const bool step = !options.restore.empty() &&
                    options.restore.find_first_not_of("0123456789") == std::string::npos;
  if (!step && options.restore != "latest" && options.restore != "none") {
    return absl::InvalidArgumentError(absl::StrFormat(
        "restore \"%s\": expected latest, none or a step", options.restore));
  }
  std::unique_ptr<checkpoint::FileSystem> files;
  if (!options.directory.empty()) {
    MUOND_ASSIGN_OR_RETURN(files, checkpoint::OpenFileSystem(options.directory));
  }
  return std::unique_ptr<Checkpointer>(
      new Checkpointer(std::move(options), std::move(peers), std::move(files)));
}

Checkpointer::Checkpointer(CheckpointOptions options, std::shared_ptr<Peers> peers,
                           std::unique_ptr<checkpoint::FileSystem> files)
    : options_(std::move(options)), peers_(std::move(peers)), files_(std::move(files)) {}

Checkpointer::~Checkpointer() { Stop(); }

void Checkpointer::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (clock_.joinable()) clock_.join();
  coordinate_.reset();
  parts_.reset();
}

void Checkpointer::Start(RunTable* runs) {
  runs_ = runs;
  coordinate_ = std::make_unique<Executor>();
  parts_ = std::make_unique<Executor>();
  clock_ = std::thread([this] { Loop(); });
}

void Checkpointer::Wake() {
  {
    MutexLock lock(mutex_);
    awake_ = true;
  }
  wake_.notify_all();
}

void Checkpointer::Loop() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    wake_.wait_for(lock, absl::ToChronoMilliseconds(kTick),
                   [this]() MUOND_REQUIRES(mutex_) { return awake_ || stopping_; });
    awake_ = false;
    if (stopping_ || ticking_) continue;  // one at a time; the next finds what this one missed
    ticking_ = true;
    coordinate_->Post([this] {
      Tick();
      MutexLock lock(mutex_);
      ticking_ = false;
    });
  }
}

Checkpointer::Progress& Checkpointer::ProgressOf(const std::shared_ptr<Run>& run) {
  Progress& progress = progress_[run->name()];
  if (progress.run.lock() != run) {
    progress = {.run = run, .since = SteadyNow(), .retry = absl::InfinitePast()};
    run->metrics().SetCheckpointInterval(options_.every);
  }
  return progress;
}

void Checkpointer::Tick() {
  for (const auto& run : runs_->All()) TickRun(run);
  std::erase_if(progress_, [](const auto& each) { return each.second.run.expired(); });
}

void Checkpointer::TickRun(const std::shared_ptr<Run>& run) {
  Progress& progress = ProgressOf(run);
  const RunPosition position = run->Position();
  if (position.state == RunState::kNeedsRestore || !progress.unfinished.empty()) {
    return AutoRestore(run, progress);
  }
  if (!has_directory() || !coordinates() || position.state != RunState::kRunning) return;
  if (const std::int64_t version = run->periodic_version(); version > progress.periodic) {
    progress.periodic = version;
    (void)SaveNow(run, version, kDefaultWait);  // it was logged and counted
    return;
  }
  const bool due = options_.every > absl::ZeroDuration() &&
                   SteadyNow() - progress.since >= options_.every;
  if (!due) return;
  progress.since = SteadyNow();
  if (position.next_step > 0) (void)SaveNow(run, std::nullopt, kDefaultWait);
}

// ---- Saving -----------------------------------------------------------------------------------

void Checkpointer::Save(std::shared_ptr<Run> run, const v1::SaveRequest& request, SaveDone done) {
  coordinate_->Post([this, run = std::move(run), request, done = std::move(done)] {
    const absl::Duration wait = WaitOf(request.wait_ms());
    done(coordinates() ? SaveNow(run, std::nullopt, wait)
                       : PassOn(*peers_, request, SteadyNow() + wait + kPartTimeout));
  });
}

// `exact`: the version that all daemons have copied already, if they were in time. Else the present
// one; where daemons are past it, one that all have still before them.
absl::StatusOr<v1::SaveReply> Checkpointer::SaveNow(const std::shared_ptr<Run>& run,
                                                    std::optional<std::int64_t> exact,
                                                    absl::Duration wait) {
  Progress& progress = ProgressOf(run);
  const absl::Time deadline = SteadyNow() + wait;
  absl::StatusOr<v1::SaveReply> saved = absl::UnknownError("not tried");
  std::int64_t ahead = 0;
  for (int i = 0; i < kTries; ++i) {
    const RunPosition position = run->Position();
    const std::int64_t step = exact.value_or(position.next_step + ahead);
    if (progress.version == step && progress.generation == position.generation) {
      v1::SaveReply known = progress.saved;
      known.set_known(true);
      return known;
    }
    // A version that is yet to come may never: then the present one will do.
    const absl::Duration patience = ahead > 0 ? absl::Seconds(2) : wait;
    saved = SaveVersion(run, step, std::min(patience, deadline - SteadyNow()));
    if (saved.ok()) break;
    exact.reset();
    const bool past = absl::IsFailedPrecondition(saved.status());
    if (!past && !absl::IsDeadlineExceeded(saved.status())) break;
    if (SteadyNow() >= deadline || run->Position().state == RunState::kNeedsRestore) break;
    // Further each time: on a busy machine small steps pass faster than daemons agree on one.
    ahead = past ? std::max<std::int64_t>(2, 2 * ahead) : 0;
  }
  if (!saved.ok()) {
    run->metrics().OnCheckpoint(RunMetrics::CheckpointResult::kSaveFailed);
    spdlog::error("run \"{}\": checkpoint failed: {}", run->name(),
                  std::string(saved.status().message()));
    return saved;
  }
  progress.version = saved->step();
  progress.generation = run->Position().generation;
  progress.since = SteadyNow();
  progress.saved = *saved;
  return saved;
}

absl::StatusOr<v1::SaveReply> Checkpointer::SaveVersion(const std::shared_ptr<Run>& run,
                                                        std::int64_t step, absl::Duration wait) {
  const absl::Time start = SteadyNow();
  checkpoint::Store store(*files_, run->name());
  // Of this process and this save: nothing else writes there.
  const std::string id =
      absl::StrFormat("%x-%x-%x", getpid(), absl::ToUnixNanos(absl::Now()), ++saves_);
  MUOND_ASSIGN_OR_RETURN(const std::string saving, store.Begin(step, id));
  auto manifest = CollectParts(run, step, saving, wait);
  if (!manifest.ok()) {
    store.Abandon(saving);
    return manifest.status();
  }
  const std::int64_t bytes = manifest->Bytes();
  auto name = store.Publish(saving, *std::move(manifest));
  if (!name.ok()) {
    store.Abandon(saving);
    return name.status();
  }
  const absl::Duration elapsed = SteadyNow() - start;
  run->metrics().OnCheckpointSaved(step, bytes, elapsed, absl::Now());
  spdlog::info("run \"{}\": saved {}: {} bytes in {}", run->name(), *name, bytes,
               absl::FormatDuration(elapsed));
  if (const auto removed = store.Prune(options_.keep); !removed.ok()) {
    spdlog::warn("run \"{}\": old checkpoints stay: {}", run->name(),
                 std::string(removed.status().message()));
  }
  v1::SaveReply reply;
  reply.set_name(*name);
  reply.set_step(step);
  reply.set_bytes(bytes);
  reply.set_seconds(absl::ToDoubleSeconds(elapsed));
  return reply;
}

absl::StatusOr<checkpoint::Manifest> Checkpointer::CollectParts(const std::shared_ptr<Run>& run,
                                                                std::int64_t step,
                                                                const std::string& saving,
                                                                absl::Duration wait) {
  v1::SavePartRequest request;
  *request.mutable_peer() = peers_->Introduction(run->name(), run->PlanName());
  request.set_step(step);
  request.set_directory(saving);
  request.set_wait_ms(std::max<std::int64_t>(absl::ToInt64Milliseconds(wait), 1));
  checkpoint::Control control;
  // As it is now: parameters may be added while the parts are written.
  const Registry& registry = run->registry();
  const auto replies = AskParts(*peers_, request, SteadyNow() + wait + kPartTimeout,
                                [&] { return WriteOwn(*run, request, &control); });
  MUOND_RETURN_IF_ERROR(Worst(replies));
  std::vector<checkpoint::Part> parts;
  double held = 0;
  for (const auto& reply : replies) {
    // One version is one state only within a generation: a restore may have come in between.
    if (reply->generation() != control.generation) {
      return absl::AbortedError(absl::StrFormat(
          "run \"%s\": the generation was raised while version %d was saved", run->name(), step));
    }
    held = std::max(held, reply->copy_seconds());
    MUOND_ASSIGN_OR_RETURN(checkpoint::Part part, PartFromProto(*reply));
    parts.push_back(std::move(part));
  }
  spdlog::debug("run \"{}\": version {} was copied in {:.6f} s", run->name(), step, held);
  auto layout = checkpoint::LayoutOf(registry.spec(), registry.routing());
  const std::string fingerprint = checkpoint::Fingerprint(layout);
  MUOND_ASSIGN_OR_RETURN(checkpoint::Manifest manifest,
                         checkpoint::Assemble(std::move(layout), parts));
  manifest.run = run->name();
  manifest.control = std::move(control);
  manifest.fingerprint = fingerprint;
  manifest.saved_at = absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone());
  manifest.writer = options_.writer;
  manifest.daemons = peers_->count();
  return manifest;
}

absl::StatusOr<v1::SavePartReply> Checkpointer::WriteOwn(Run& run,
                                                         const v1::SavePartRequest& request,
                                                         checkpoint::Control* control) {
  MUOND_ASSIGN_OR_RETURN(
      const auto image,
      run.TakeImage(request.step(), SteadyNow() + WaitOf(request.wait_ms())));
  const auto part =
      checkpoint::WritePart(*files_, {run.name(), request.directory()}, peers_->self(),
                            ViewsOf(run.spec(), *image->copies));
  if (control != nullptr) *control = image->control;
  v1::SavePartReply reply;
  reply.set_generation(image->control.generation);
  reply.set_copy_seconds(image->copy_seconds);
  run.GiveBack(image);
  MUOND_RETURN_IF_ERROR(part.status());
  PartToProto(*part, &reply);
  return reply;
}

void Checkpointer::SavePart(
    std::shared_ptr<Run> run, const v1::SavePartRequest& request,
    std::function<void(const absl::StatusOr<v1::SavePartReply>&)> done) {
  parts_->Post([this, run = std::move(run), request, done = std::move(done)] {
    done(WriteOwn(*run, request, nullptr));
  });
}

void Checkpointer::SaveAll(absl::Duration patience) {
  if (!has_directory()) return;
  for (const auto& run : runs_->All()) {
    if (peers_->count() > 1) AwaitVerdict(*peers_, *run, SteadyNow() + patience);
    const RunPosition position = run->Position();
    if (position.next_step == 0 || position.state == RunState::kNeedsRestore ||
        position.state == RunState::kFailed) {
      continue;
    }
    v1::SaveRequest request;
    request.set_run(run->name());
    request.set_wait_ms(std::max<std::int64_t>(absl::ToInt64Milliseconds(patience), 1));
    std::promise<absl::Status> saved;
    Save(run, request, [&](const absl::StatusOr<v1::SaveReply>& reply) {
      saved.set_value(reply.status());
    });
    if (const absl::Status status = saved.get_future().get(); !status.ok()) {
      spdlog::warn("run \"{}\": ends without a checkpoint of its last step: {}", run->name(),
                   std::string(status.message()));
    }
  }
}

}  // namespace muond
