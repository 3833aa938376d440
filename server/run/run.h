// One run on this daemon: the order of things, and the only lock.
//
// gRPC's threads call in; every call takes the run's mutex for a short, pure piece of work
// (registry, step machine), hands what must be computed to the executor in that order, and returns
// or is answered later by a callback. The executor's thread is the only one that touches optimizer
// state and comes back through the same mutex. Callbacks run without the lock.
//
// All methods are thread-safe. Statuses are those of docs/protocol.md's table; their messages name
// the run's own objects only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/values.h"
#include "server/buddy/buddy_sender.h"
#include "server/buddy/held_state.h"
#include "server/cluster/hello.h"
#include "server/cluster/raise_generation.h"
#include "server/cluster/timer.h"
#include "server/cluster/vote_exchange.h"
#include "server/engine/engines.h"
#include "server/run/generation_file.h"
#include "server/run/initial_values.h"
#include "server/run/pending_addition.h"
#include "server/run/registries.h"
#include "server/run/run_context.h"
#include "server/run/run_fields.h"
#include "server/run/run_slices.h"
#include "server/run/slice_table.h"
#include "server/run/snapshot.h"
#include "server/run/staged_state.h"
#include "server/run/staging.h"
#include "server/run/state_image.h"
#include "server/step/step_machine.h"

namespace muond {

using StatusCallback = std::function<void(const absl::Status&)>;

class Run : public std::enable_shared_from_this<Run>, private RunFields {
 public:
  // Routes and allocates everything. Errors: those of Registry::Create and Engine::Create.
  static absl::StatusOr<std::shared_ptr<Run>> Create(RunSpec spec, const RunContext& context);
  ~Run();

  // -- Joining
  struct JoinReply {
    bool rejoined = false;
    std::vector<std::int64_t> missing_ranks;
  };
  absl::StatusOr<JoinReply> Join(const RunSpec& spec, std::int64_t rank, const std::string& session,
                                 const RankSlices& slices);
  // Of now; what is read of it stays good (Registries). Its ranks are the run's business.
  const Registry& registry() const { return registries_.newest(); }
  const Routing& routing() const { return registry().routing(); }
  const RunSpec& spec() const { return registry().spec(); }
  const std::string& name() const { return spec().name; }
  // Null when there is no such parameter.
  const ParameterSpec* FindParameter(const std::string& name) const {
    const int index = registry().Find(name);
    return index < 0 ? nullptr : &spec().parameters[index];
  }

  // -- Initial values
  absl::StatusOr<OpenSlice> OpenInitial(const SliceAddress& address, std::int64_t generation,
                                        Dtype dtype);
  // The stream sent the slice whole; `done` hears of it once it is in the state.
  void CloseInitial(const OpenSlice& slice, ArrivalCallback done);
  struct InitialProgress {
    bool complete = false;
    std::vector<std::string> missing;
  };
  InitialProgress initial_progress() const;

  // -- Adding parameters
  // The rank wants these added behind the first `first`; `done` hears once all ranks have asked for
  // the same, or why not: ranks that disagree are all told. Allocates, and may take its time; one
  // call at a time. Returns the waiter's name.
  std::uint64_t AddParameters(std::int64_t rank, std::int64_t generation, std::size_t first,
                              const ParameterAddition& wanted, AdditionCallback done);
  void AdditionDeadline(std::uint64_t waiter);  // names the ranks that have not asked
  void AdditionGone(std::uint64_t waiter);

  // -- Steps (see StepMachine for the rules)
  absl::Status Begin(std::int64_t rank, std::int64_t generation, const StepBegin& begin);
  // `place`: kBackend where the bytes are moved by a device; memory there is used if it can be.
  absl::StatusOr<OpenSlice> OpenGradient(const SliceAddress& address, std::int64_t generation,
                                         std::int64_t step, Dtype dtype,
                                         StagingPlace place = StagingPlace::kHost);
  absl::StatusOr<SliceArrival> CloseGradient(const OpenSlice& slice);
  // The same for many, which are then reduced together: what became of each, as far as the first
  // that was refused.
  std::vector<absl::StatusOr<SliceArrival>> CloseGradients(std::span<const OpenSlice> slices);
  // A stream ended with this slice unfinished.
  void Abandon(const OpenSlice& slice);
  // `done` is called exactly once unless WaiterGone comes first. Returns the waiter's name.
  std::uint64_t Finish(std::int64_t rank, std::int64_t generation, std::int64_t step,
                       const std::vector<std::string>& absent, OutcomeCallback done,
                       std::shared_ptr<ParameterTargets> targets = nullptr);
  std::uint64_t Skip(std::int64_t rank, std::int64_t generation, std::int64_t step, SkipCause cause,
                     double loss_scale, OutcomeCallback done);
  void Deadline(std::uint64_t waiter);
  void WaiterGone(std::uint64_t waiter);

  // -- Reading
  // Resolves what a Pull asks for; `slices` empty: the rank's own. FAILED_PRECONDITION for a
  // version that is not the current one.
  absl::StatusOr<std::vector<PullSlice>> CheckPull(std::int64_t rank, std::int64_t generation,
                                                   std::int64_t version, const RankSlices& slices,
                                                   bool master) const;
  // Reads elements [first, first + count) of the slice into `out`, which lives until `done`.
  // ABORTED when the version has passed meanwhile: a pull never mixes two.
  void Read(const PullSlice& slice, std::int64_t version, std::int64_t first, std::int64_t count,
            void* out, StatusCallback done);
  // The same for all of these slices at once, each whole, slices[i] into outs[i]: memory that the
  // backends reach. Many cost little more than one.
  void ReadAll(const std::vector<PullSlice>& slices, const std::vector<void*>& outs,
               std::int64_t version, StatusCallback done);

  // Leaves the run; true when every joined rank has left.
  absl::StatusOr<bool> Leave(std::int64_t rank, std::int64_t generation,
                             std::vector<std::int64_t>& open_ranks);
  // No more steps: waiters and later calls get `status`.
  void Stop(const absl::Status& status);

  // -- The other daemons of the run
  // FAILED_PRECONDITION when a peer has another plan or list of daemons, INVALID_ARGUMENT when it
  // is none. While parameters are added daemons differ for a moment: unless `exact`, the plan of
  // before or after is as good.
  absl::Status CheckPeer(int daemon, const std::string& agreement, bool exact) const;
  // Votes that another daemon cast or passed on; the first that the step machine refused, or OK.
  absl::Status OnVotes(const std::vector<CastVote>& votes);
  std::vector<CastVote> VotesOf(std::int64_t step) const;
  // The two rounds of raising the generation, on this daemon.
  // ABORTED when the generation is too low; FAILED_PRECONDITION when only a reinitialization helps;
  // UNAVAILABLE when the promise could not be kept on disk.
  absl::StatusOr<DaemonPromise> Prepare(std::int64_t generation, const RaiseWish& wish);
  // UNAVAILABLE, to be repeated, while a step of the old generation is being committed.
  absl::Status Raise(const RaiseOrder& order);
  // Both rounds on all daemons, within `wait`. OK when the generation is above `wish.current`, by
  // whomever, and what is to be adopted is; `done` is called at once or later, on another thread.
  void RaiseOnAll(const RaiseWish& wish, const std::string& reason, absl::Duration wait,
                  StatusCallback done);
  // Asks the others, which may have had the run for long. Blocks for a second at most.
  // FAILED_PRECONDITION when one has another version or plan.
  absl::Status LearnFromPeers();
  // The run was closed: a run of that name that is made later is another one.
  void ForgetGeneration();

  // -- Checkpoints
  // The state at version `step`: of now, or once steps have come so far, until `deadline`. Blocks;
  // not on an executor's thread. FAILED_PRECONDITION when the version is past, or the state is not
  // one to be kept (opening, lost, failed).
  absl::StatusOr<std::shared_ptr<StateImage>> TakeImage(std::int64_t step, absl::Time deadline);
  // Memory of an image that is not needed any more: the next one's.
  void GiveBack(std::shared_ptr<StateImage> image);
  // The version of the last copy that was taken because of checkpoint_every_steps; -1: none.
  std::int64_t periodic_version() const;
  std::shared_ptr<StateCopies> MakeStateCopies() const;
  // What a Raise that names `name` takes over. Replaces what was staged before; null: forgets it.
  void Stage(const std::string& name, std::shared_ptr<StateCopies> copies,
             const checkpoint::Control& control);
  // As RaiseOnAll with a reinitialization, from the staged checkpoint. Blocks.
  absl::Status RestoreOnAll(const std::string& name, std::int64_t step, absl::Time deadline);
  // A checkpoint of this run is there, and this daemon has no state: nobody may initialize it.
  void ExpectRestore(std::int64_t step);
  RunMetrics& metrics() { return *metrics_; }

  // -- Buddies (run_buddy.cc)
  bool has_buddy() const { return buddy_ != nullptr; }
  // What the daemon before this one puts here. ABORTED while this one has no state of that lineage;
  // FAILED_PRECONDITION where there are no buddies.
  absl::StatusOr<v1::BuddyPutReply> BuddyPut(const v1::BuddyPutRequest& request);
  // UNAVAILABLE unless this daemon is at that version.
  absl::StatusOr<v1::BuddyIndexReply> BuddyIndex(const v1::BuddyIndexRequest& request);
  absl::StatusOr<v1::BuddyReadReply> BuddyRead(const v1::BuddyReadRequest& request) const;
  // Stages the state of that version from what this daemon's buddy holds; blocks.
  absl::StatusOr<v1::BuddyRecoverReply> StageFromBuddy(std::int64_t version, std::int64_t lineage);
  // Brings back all daemons that lost their state: see RecoverGeneration. Blocks.
  absl::Status RecoverOnAll(absl::Time deadline);

  // -- Views
  const Plan& plan() const { return registry().plan(); }
  // What daemons compare: the plan's hash, and for how many devices it is.
  std::string PlanName() const { return PlanNameOf(registry()); }
  const std::vector<std::string>& daemons() const { return context_.peers->daemons(); }
  int daemon() const { return context_.peers->self(); }
  int devices() const { return static_cast<int>(context_.devices.size()); }
  RunPosition Position() const;
  RunSnapshot Snapshot() const;
  void Describe(std::vector<std::string> names,
                std::function<void(absl::StatusOr<std::vector<ParameterSnapshot>>)> done);
  // Of the whole run: the other daemons are asked for their part. FAILED_PRECONDITION when steps go
  // on too fast to find all at one version, UNAVAILABLE naming a daemon that does not answer.
  void Digest(bool per_parameter, std::function<void(absl::StatusOr<DigestSnapshot>)> done);
  // What this daemon owns. FAILED_PRECONDITION when it is at another version.
  void HashShards(std::int64_t version,
                  std::function<void(absl::StatusOr<std::vector<ShardHashes>>)> done);

 private:
  Run(Registry registry, const RunContext& context, std::string overlap);
  using After = std::vector<std::function<void()>>;  // callbacks to call without the lock
  absl::StatusOr<SliceArrival> CloseLocked(const OpenSlice& slice, After& after)
      MUOND_REQUIRES(mutex_);
  void CallAll(After& after) const MUOND_EXCLUDES(mutex_) {
    for (auto& call : after) call();
  }

  absl::Status CheckOpen(std::int64_t generation) const MUOND_REQUIRES(mutex_);
  absl::Status CheckJoined(std::int64_t rank) const;
  absl::Status CheckTrusted(std::int64_t version) const MUOND_REQUIRES(mutex_);
  absl::StatusOr<SliceId> Resolve(const SliceAddress& address) const;
  std::string PlanNameOf(const Registry& registry) const;
  std::string SliceObject(const SliceId& id, const std::string& action) const;
  Registry& mutable_registry() { return registries_.newest(); }
  void OpenMetrics() MUOND_REQUIRES(mutex_);
  void PublishParameters() MUOND_REQUIRES(mutex_);
  void CountMemory(int sign) MUOND_REQUIRES(mutex_);
  void CountWorkspace() MUOND_REQUIRES(mutex_);
  void StartIfReady() MUOND_REQUIRES(mutex_);
  void FailEngine(std::int64_t life, const std::string& reason);
  void FinishWriteInitial(const OpenSlice& slice, std::int64_t life, absl::Status status,
                          const ArrivalCallback& done);
  // Registers a waiter and feeds the machine the event that it waits for.
  std::uint64_t Wait(std::int64_t rank, OutcomeCallback done,
                     const std::function<void(std::uint64_t, Effects&)>& event);
  bool IsRepeat(std::int64_t step) const MUOND_REQUIRES(mutex_);
  absl::Status NotRunning(std::int64_t rank) const MUOND_REQUIRES(mutex_);
  absl::Status CheckInitial(std::int64_t generation, int parameter) const MUOND_REQUIRES(mutex_);
  // run_add.cc
  absl::Status CheckAdding(std::int64_t rank, std::int64_t generation, std::size_t first) const
      MUOND_REQUIRES(mutex_);
  absl::StatusOr<std::unique_ptr<PendingAddition>> MakeAddition(const Registry& base,
                                                                const ParameterAddition& wanted);
  absl::Status MatchAddition(std::int64_t rank, const ParameterAddition& wanted) const
      MUOND_REQUIRES(mutex_);
  absl::Status StageAddition(std::int64_t rank, const ParameterAddition& wanted);
  absl::StatusOr<bool> CheckAdded(std::int64_t rank, std::int64_t generation, std::size_t first,
                                  const ParameterAddition& wanted) const;
  absl::Status JoinAddition(std::int64_t rank, std::int64_t generation, std::size_t first,
                            const ParameterAddition& wanted, std::uint64_t waiter,
                            const AdditionCallback& done, After& after);
  void DropAddition(const absl::Status& why, After& after) MUOND_REQUIRES(mutex_);
  absl::Status CheckAdopt(const std::string& name) const MUOND_REQUIRES(mutex_);
  bool Grows(const std::string& name) const MUOND_REQUIRES(mutex_) {
    return !name.empty() && name != adopted_;
  }
  void Adopt() MUOND_REQUIRES(mutex_);
  absl::StatusOr<std::shared_ptr<StagingBuffer>> LayerMemory(const Layer& layer, Dtype dtype,
                                                             StagingPlace place)
      MUOND_REQUIRES(mutex_);
  // Why nothing can be read of this version any more; OK when it can.
  absl::Status CheckReadable(std::int64_t version) const MUOND_REQUIRES(mutex_);
  Layer LayerOf(const SliceId& id) const;
  bool StillPlaced(const OpenSlice& slice, const Layer& layer) const MUOND_REQUIRES(mutex_);

  // Carries out effects in their order; the lock is held.
  void Carry(Effects& effects, After& after) MUOND_REQUIRES(mutex_);
  void CarryReduce(const ReduceEffect& effect) MUOND_REQUIRES(mutex_);
  void CarryCommit(const CommitEffect& effect) MUOND_REQUIRES(mutex_);
  void CarryVote(const VoteEffect& effect, After& after) MUOND_REQUIRES(mutex_);
  void EndVotes() MUOND_REQUIRES(mutex_);
  void OnPeerAnswer(int daemon, const PeerPosition& position, const std::vector<CastVote>& votes);
  void OnPeerTrouble(int daemon, const absl::Status& status);
  void LoseState(const std::string& why) MUOND_REQUIRES(mutex_);
  absl::Status NeedsRestore() const MUOND_REQUIRES(mutex_);
  void Reset(std::int64_t resume_step) MUOND_REQUIRES(mutex_);
  void Restore() MUOND_REQUIRES(mutex_);
  void StartImage() MUOND_REQUIRES(mutex_);
  void OnVersion() MUOND_REQUIRES(mutex_);

  void OpenBuddy();
  void CloseBuddy();
  void StartBuddy() MUOND_REQUIRES(mutex_);
  void ForgetBuddy() MUOND_REQUIRES(mutex_);
  void DropBuddyCopies() MUOND_REQUIRES(mutex_);
  void SendGradient(const ReduceEffect& effect, const ReduceRequest& request,
                    const ReducedGradient& result) MUOND_REQUIRES(mutex_);
  BuddyAttemptKey AttemptKey(std::int64_t attempt) const MUOND_REQUIRES(mutex_);
  void OnHeld(const BuddyAttemptKey& attempt);
  void OnBuddyTrouble(int daemon, const absl::Status& status, const PeerPosition* position);
  bool OnSnapshotWanted();
  bool SnapshotForBuddy() MUOND_REQUIRES(mutex_);
  void RecordStep(const StepOutcome& outcome) MUOND_REQUIRES(mutex_);
  absl::Status CheckBuddy(const v1::PeerRun& peer, std::int64_t lineage) const
      MUOND_REQUIRES(mutex_);
  bool HasState() const MUOND_REQUIRES(mutex_) {
    return running_ || restored_;
  }
  std::int64_t LineageLocked() const MUOND_REQUIRES(mutex_);
  absl::Status ReadItem(std::int64_t item, char* out, std::int64_t bytes);
  std::int64_t PackedElements(int state) const;
  absl::StatusOr<std::vector<ReplayStep>> ReadSteps(const v1::BuddyIndexReply& index,
                                                    std::int64_t& bytes);
  void Replay(std::vector<ReplayStep> steps) MUOND_REQUIRES(mutex_);
  checkpoint::Control ControlLocked() const MUOND_REQUIRES(mutex_);
  std::int64_t GenerationLocked() const MUOND_REQUIRES(mutex_);
  std::int64_t PromisedLocked() const MUOND_REQUIRES(mutex_);
  absl::Status RecallGeneration();
  absl::Status StoreGeneration() MUOND_REQUIRES(mutex_);
  absl::Status RaiseLocked(const RaiseOrder& order, std::int64_t now, After& after)
      MUOND_REQUIRES(mutex_);
  absl::Status RaiseHere(const RaiseWish& wish, absl::Time deadline);
  void WatchPromise() MUOND_REQUIRES(mutex_);
  void TakeUpPromise();
  StepLayout LayoutHere() const;
  void MakeMachine() MUOND_REQUIRES(mutex_);
  // The hashes of what is here, and the digest as far as it is known.
  struct HashedState {
    std::vector<ShardHashes> shards;
    DigestSnapshot digest;
  };
  void HashState(std::function<void(absl::StatusOr<HashedState>)> done);
  void DigestTry(bool per_parameter, int tries,
                 std::function<void(absl::StatusOr<DigestSnapshot>)> done);
  DigestSnapshot DigestOf(HashedState state, bool per_parameter) const;
  void CarryOutcome(const OutcomeEffect& effect) MUOND_REQUIRES(mutex_);
  void EndAttempt() MUOND_REQUIRES(mutex_);
  void FinishReduce(std::int64_t life, const ReduceEffect& effect, ReduceRequest request,
                    const absl::StatusOr<ReducedGradient>& result);
  void ReleaseLayers(const ReduceEffect& effect, ReduceRequest& request) MUOND_REQUIRES(mutex_);
  void FinishCommit(std::int64_t life, const absl::StatusOr<Committed>& result);
  void OnFailed() MUOND_REQUIRES(mutex_);
  void PublishHealth(const CommitReport& report, const StateHealth& health) MUOND_REQUIRES(mutex_);
  void PublishProgress() MUOND_REQUIRES(mutex_);
  RunPosition PositionLocked() const MUOND_REQUIRES(mutex_);
  ParameterSnapshot SnapshotOf(int parameter, const ParameterFacts& facts) const
      MUOND_REQUIRES(mutex_);
  RunState StateLocked() const MUOND_REQUIRES(mutex_);
  double LossScaleLocked() const MUOND_REQUIRES(mutex_);
};

}  // namespace muond
