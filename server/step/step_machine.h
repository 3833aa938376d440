// Which events of a run's steps are legal when, and what follows from them.
//
// A pure value machine: events in, effects out; no clock, lock, thread, I/O or device. server/run
// drives it and carries out the effects, a test can drive it from a list. Given the same events in
// the same order it does the same, and the outcome of a step does not depend on the order in which
// its slices and votes arrive.
//
// A run may span several daemons, each with a machine of its own. A vote is what a machine knows of
// a step once all its gradients are reduced; all machines decide by the same pure function of all
// votes, so none needs a leader and none can go on without the others.
//
// Invariants (checked): nothing is committed before a verdict; a step is committed at most once,
// however often it is finished; a skipped step commits nothing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/values.h"
#include "server/step/attempt.h"
#include "server/step/loss_scaler.h"
#include "server/step/step_layout.h"
#include "server/step/verdict.h"

namespace muond {

// What the engine found in a reduced gradient.
struct GradientFacts {
  std::int64_t nonfinite = 0;
  std::vector<double> block_sums;  // sum of squares per block, unscaled; unread if nonfinite > 0
  bool state_overflow = false;     // the new state could be non-finite
};

// What the engine did in a commit.
struct CommitFacts {
  std::int64_t newton_schulz_calls = 0;
  std::int64_t newton_schulz_fallbacks = 0;
  std::int64_t zero_inputs = 0;
  std::string failure;  // not empty: state can't be trusted, the run has failed
};

// ---- Effects ----------------------------------------------------------------------------------

// Sum the layers, scan the result; answer with OnReduced. `divisor` is what the sum is divided by
// (mean over ranks and micro-batches as declared) times the loss scale. Comes as soon as all slices
// of the state are in; where ranks named it absent, once all ranks have finished.
struct ReduceEffect {
  std::int64_t attempt = 0;  // to be handed back: tells an answer that comes late
  int state = 0;             // index of the parameter that holds the state
  std::vector<Layer> layers;
  double divisor = 1.0;
};
// Apply the step to every state parameter but the absent ones; answer with OnCommitted.
struct CommitEffect {
  std::int64_t step = 0;
  double clip_coefficient = 1.0;
  std::set<int> absent;  // state indices, those without elements among them
  std::map<std::string, Hyperparameters> muon, adamw;  // by group, those in force
};
// Throw the step's gradients away: it was skipped, or its attempt ended without a verdict.
// Reductions under way may be dropped or answered, as the engine likes.
struct DiscardEffect {
  std::int64_t step = 0;
};
// Answer a Finish or Skip call; `outcome` is set when status is OK.
struct ReplyEffect {
  std::uint64_t waiter = 0;
  absl::Status status;
  std::optional<StepOutcome> outcome;
};
// The step is over (metrics, logs). Comes before the replies.
struct OutcomeEffect {
  StepOutcome outcome;
  ScaleChange scale_change = ScaleChange::kNone;
};
// Tell all other daemons this one's vote, again and again until its step is over or thrown away:
// each answer may bring votes that are missing here (OnVote). Comes only where there are others.
struct VoteEffect {
  Vote vote;
};
using Effect = std::variant<ReduceEffect, CommitEffect, DiscardEffect, ReplyEffect, OutcomeEffect,
                            VoteEffect>;
using Effects = std::vector<Effect>;

// ---- The machine ------------------------------------------------------------------------------

inline constexpr std::int64_t kMaxMicroBatches = 65536;

// A daemon's vote, as it is told and passed on.
struct CastVote {
  int daemon = 0;
  Vote vote;
  friend bool operator==(const CastVote&, const CastVote&) = default;
};

// What a machine carries from step to step beside its position: it goes into checkpoints.
struct StepMemory {
  LossScalerState scaler;
  std::map<std::string, Hyperparameters> muon, adamw;  // in force, by group
  std::int64_t applied_steps = 0, skipped_steps = 0, consecutive_skips = 0;
  std::optional<StepOutcome> last_outcome;
};

// Where a machine starts: a new run, or one that goes on without its former state.
struct StepStart {
  std::int64_t generation = 1;
  std::int64_t next_step = 0;
  // Which state this is: the generation in which it was made, by initial values or a restore; 0
  // when there is none. State is handed on from step to step and stays of its lineage.
  std::int64_t lineage = 1;
  // Of a run that was restored: what else a machine carries from step to step.
  std::optional<StepMemory> memory;
};

// All statuses name the event, the rank and the step, and where the caller's position is wrong also
// the expected step and generation. An event that is refused changes nothing unless it says so.
class StepMachine {
 public:
  // `spec` gives the rules, and the hyperparameters in force until a Begin changes them. It must
  // have passed the registry, ValidateLossScale and ValidateVerdictRules.
  StepMachine(StepLayout layout, const RunSpec& spec, StepStart start = {});

  // -- Events from trainers. Statuses follow docs/protocol.md's table. Common ones: a rank outside
  // the world is NOT_FOUND; another generation or step is FAILED_PRECONDITION; after OnStop its
  // status; after a failure FAILED_PRECONDITION. What was consumed is answered all the same: a
  // repeat of the last step's Finish, Skip or push gets its first answer.

  // A rank announces the step. OK again for an identical repeat. A step behind: OK when it is the
  // last one (the caller then takes the outcome from last_outcome()), else FAILED_PRECONDITION with
  // the expected step. INVALID_ARGUMENT, to this rank alone, when the loss scale, the number of
  // micro-batches or a hyperparameter can't be; NOT_FOUND for an unknown group.
  // Ranks that disagree (a rank with its own earlier word too): INVALID_ARGUMENT naming ranks and
  // values, to all ranks of the step (waiters get theirs in `effects`, the others at their next
  // push, Finish or Skip); the attempt is discarded and every rank must begin again. Groups that
  // are missing compare as their last values. Hyperparameters stay in force once the step is
  // consumed by a verdict, applied or not; a discarded attempt or a Skip leaves the old ones.
  absl::Status OnBegin(std::int64_t rank, std::int64_t generation, const StepBegin& begin,
                       Effects& effects);

  // May this slice be written? kWrite: yes, its bytes are wanted. kVerify: it is already complete,
  // or was part of the last step; read the stream, compute its digest, and let OnSlice judge.
  // Finish may ride ahead of pushes: what is still missing is admitted after it. Errors: unknown
  // rank, parameter or slice (NOT_FOUND), wrong step or generation, not begun, or skipped by this
  // rank (FAILED_PRECONDITION), named absent by it or a micro-batch beyond those begun
  // (INVALID_ARGUMENT). Reserves nothing: of two streams with one slice both may be admitted, and
  // the caller must keep them from writing to one place.
  enum class Admission : std::uint8_t { kWrite, kVerify };
  absl::StatusOr<Admission> Admit(const SliceId& id, std::int64_t generation,
                                  std::int64_t step) const;

  // A slice arrived whole. kAccepted or kDuplicate (same digest); ALREADY_EXISTS when a slice of
  // that id but another digest is there. The step may have ended since the slice was admitted:
  // ABORTED. The caller must itself refuse (ABORTED) a slice that was admitted for writing when
  // attempt() was another: its bytes went to buffers that are gone.
  enum class Arrival : std::uint8_t { kAccepted, kDuplicate };
  absl::StatusOr<Arrival> OnSlice(const SliceId& id, std::int64_t generation, std::int64_t step,
                                  std::uint64_t digest, Effects& effects);

  // The rank is done with the step; `waiter`, a number that the caller uses once, gets a
  // ReplyEffect, at once or later. `absent` names parameters without a gradient from this rank;
  // names of which it holds no slice say nothing. A repeat waits along, and replaces the list as
  // long as a slice or a rank is missing. Refused: not begun (FAILED_PRECONDITION), a name that
  // does not exist (NOT_FOUND) or of which the rank pushed a slice (INVALID_ARGUMENT).
  // Once all ranks have finished: a sliced parameter that is absent on some of its ranks only is
  // FAILED_PRECONDITION to all waiters. All Finishes are then withdrawn, slices stay: the ranks
  // agree (push the missing slices, zeros if need be, or name it on all) and finish again. A
  // replicated one is present if any rank sends it: the others count as zero, a mean divides by
  // the world. A step in which all is absent is applied and touches no parameter; its norm is 0.
  void OnFinish(std::int64_t rank, std::int64_t generation, std::int64_t step,
                const std::vector<std::string>& absent, std::uint64_t waiter, Effects& effects);

  // The rank discards the step on its own word (needs no Begin); cause kOverflow (moves a dynamic
  // loss scale as an overflow does) or kTrainer; loss_scale 0: the run's. All ranks must, with one
  // cause and scale, else INVALID_ARGUMENT naming those that finished and those that skipped, or
  // what each said, as ranks that disagree about a Begin.
  void OnSkip(std::int64_t rank, std::int64_t generation, std::int64_t step, SkipCause cause,
              double loss_scale, std::uint64_t waiter, Effects& effects);

  // A waiter's deadline passed: DEADLINE_EXCEEDED naming missing ranks, parameters and slices. The
  // step's gradients and the rank's Finish stay, so that a late push completes the step.
  void OnDeadline(std::uint64_t waiter, Effects& effects);
  // A waiter went away (its call was cancelled): no reply; the Finish it carried stays.
  void OnWaiterGone(std::uint64_t waiter);

  // -- Answers of the engine.
  // `attempt` and `state` are the effect's. Each effect is answered once (checked); answers for an
  // attempt that was discarded meanwhile may be given or dropped, and are ignored.
  void OnReduced(std::int64_t attempt, int state, const GradientFacts& facts, Effects& effects);
  void OnCommitted(const CommitFacts& facts, Effects& effects);
  // Reduce or commit could not be carried out (memory, device): the run fails, all waiters get
  // INTERNAL. The step is not consumed.
  void OnEngineFailure(const std::string& reason, Effects& effects);

  // -- Events from the other daemons of the run.
  // A vote that `daemon` cast, from itself or passed on by another. OK also for what is known
  // already or was needed only before. A vote stands: another one of the same daemon for the same
  // step is ALREADY_EXISTS. FAILED_PRECONDITION for a lower generation, ABORTED for a higher one
  // (it is being raised), OUT_OF_RANGE for a step further ahead than the next but one.
  // Votes may be here before this daemon's own gradients. Once all have voted on the same terms
  // the verdict falls; on other terms there is none: waiters and later Finishes get
  // INVALID_ARGUMENT naming the daemons, and the step must begin again in a higher generation.
  absl::Status OnVote(const CastVote& cast, Effects& effects);
  // All votes known here for a step: the one in flight, or the last that was consumed.
  std::vector<CastVote> VotesOf(std::int64_t step) const;
  // A daemon can't be reached. Whoever waits for its vote gets UNAVAILABLE naming it and `why`; a
  // Finish may be repeated, and waits again.
  void OnUnreachable(int daemon, const std::string& why, Effects& effects);

  // Raising the generation takes two rounds, so that no daemon throws away a step that another has
  // applied. First all promise: no more votes in this generation, and what is known of the steps
  // in flight. FAILED_PRECONDITION unless `generation` is above this one and every promise so far,
  // or equal to the last promise (a repeat).
  struct Promise {
    std::int64_t next_step = 0;
    // Known for next_step and for the step before it, of whatever generation: where raising one
    // was broken off half way, the daemons differ in theirs.
    std::vector<CastVote> votes;
    std::int64_t lineage = 0;  // of this daemon's state; 0: it has none
  };
  absl::StatusOr<Promise> OnPrepare(std::int64_t generation);
  // Then it is raised: `settled` are all votes of a step that some daemon may have applied (see
  // SettledVotes), or none. Where that step is in flight here its verdict falls now, else the step
  // in flight is discarded and its waiters get ABORTED. A commit under way is past its verdict: it
  // goes on and its waiters get the outcome. Ignored unless higher.
  void OnGeneration(std::int64_t generation, const std::vector<CastVote>& settled,
                    Effects& effects);
  // Parameters were added behind those that are there, and groups perhaps. Between steps only
  // (checked): the change of generation that brought them has ended what was in flight. Position,
  // votes, scaler, last outcome and the hyperparameters in force stay.
  void OnLayout(StepLayout layout, const RunSpec& spec);
  // No further steps (drain, close): the step in flight is discarded, waiters get `status` (not OK:
  // checked), later calls too. A commit under way goes on and its waiters get the outcome. A step
  // that this daemon has voted on stays in flight, since the others may apply it: its verdict, or a
  // new generation, ends it.
  void OnStop(const absl::Status& status, Effects& effects);

  // -- Views.
  std::int64_t generation() const { return generation_; }
  std::int64_t lineage() const { return lineage_; }
  // Above generation(): the generation is being raised to this, and no vote counts until then.
  std::int64_t promised() const { return promised_; }
  std::int64_t next_step() const { return next_step_; }
  std::int64_t version() const { return next_step_; }
  // Changes whenever slices that were admitted lose their place: a step was consumed or discarded.
  std::int64_t attempt() const { return attempt_.number(); }
  const std::optional<StepOutcome>& last_outcome() const { return last_outcome_; }
  const LossScaler& scaler() const { return scaler_; }
  StepMemory memory() const;
  bool step_in_flight() const { return !attempt_.empty(); }
  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  std::vector<std::int64_t> WaitingRanks() const;  // begun by someone, not finished by these
  std::int64_t WaitingSlices() const { return attempt_.MissingSlices(); }
  std::vector<int> MissingVotes() const;  // daemons, once this one has voted
  const std::map<std::string, Hyperparameters>& muon() const { return muon_; }
  const std::map<std::string, Hyperparameters>& adamw() const { return adamw_; }

 private:
  // Slices, Finishes and Skips come in; then the last reductions; then the other daemons' votes;
  // then the commit.
  enum class Phase : std::uint8_t { kCollecting, kReducing, kVoting, kCommitting };
  // A trainer's call, as messages and checks see it.
  struct Call {
    const char* action;
    std::int64_t rank;
    std::int64_t generation;
    std::int64_t step;
  };

  // step_machine_begin.cc: what a rank's calls before Finish do.
  static std::string Describe(const Call& call);
  absl::Status CheckRank(const Call& call) const;
  absl::Status CheckGeneration(const Call& call) const;
  absl::Status CheckStep(const Call& call) const;
  absl::Status CheckOpen(const Call& call) const;
  absl::Status CheckSlice(const Call& call, const SliceId& id) const;
  absl::Status CheckContributor(const Call& call, const SliceId& id) const;
  absl::StatusOr<StepBegin> Complete(const Call& call, const StepBegin& begin) const;
  absl::Status Disagreement(const Call& call, const StepBegin& begin) const;
  absl::StatusOr<Arrival> Compare(const SliceId& id, std::int64_t step, std::uint64_t there,
                                  std::uint64_t digest) const;
  bool IsLast(std::int64_t step) const { return last_outcome_ && step == last_outcome_->step; }

  // step_machine_finish.cc: how a rank ends a step, and who is told what.
  absl::Status CheckEnding(const Call& call);
  absl::StatusOr<std::set<int>> CheckAbsent(const Call& call,
                                            const std::vector<std::string>& names) const;
  absl::Status CheckSkip(const Call& call, const SkipWord& word) const;
  absl::Status FinishedAndSkipped(const Call& call, const std::set<std::int64_t>& finished,
                                  const std::set<std::int64_t>& skipped) const;
  absl::Status SkipDisagreement(const Call& call, const SkipWord& word) const;
  void Reply(std::uint64_t waiter, const absl::Status& status, Effects& effects) const;
  void ReplyLast(std::uint64_t waiter, Effects& effects) const;
  void ReplyAll(const absl::Status& status, Effects& effects);
  void Reject(std::int64_t caller, const absl::Status& status, Effects& effects);

  // step_machine.cc: what follows.
  void Advance(Effects& effects);
  void RequestReduction(int state, Effects& effects);
  Vote EmptyVote() const;
  Vote OwnVote() const;
  Vote SkipVote() const;
  void Commit(const Verdict& verdict, Effects& effects);
  void Consume(const Verdict& verdict, double told, const CommitFacts& facts, Effects& effects);

  // step_machine_vote.cc: how the daemons agree.
  void Cast(const Vote& vote, Effects& effects);
  void Conclude(Effects& effects);
  std::uint64_t Terms() const;
  absl::Status Terms(const std::map<int, Vote>& votes) const;
  std::string DaemonNames(const std::vector<int>& daemons) const;
  std::string DescribeMissing() const;
  std::vector<std::string> InRegistrationOrder(const std::vector<std::string>& names) const;
  void Discard(Effects& effects);
  void NextAttempt();
  void Fail(const std::string& reason, Effects& effects);

  std::shared_ptr<const LayoutIndex> index_;
  VerdictRules rules_;
  Reduction reduce_ranks_, reduce_micro_batches_;
  LossScaler scaler_;
  std::map<std::string, Hyperparameters> muon_, adamw_;
  std::int64_t generation_ = 1;
  std::int64_t next_step_ = 0;
  std::int64_t lineage_ = 1;

  Phase phase_ = Phase::kCollecting;
  Attempt attempt_;
  // By state: asked for, and what the engine found once it has answered.
  std::map<int, std::optional<GradientFacts>> reductions_;
  std::int64_t reductions_open_ = 0;
  std::optional<Verdict> verdict_;                 // set iff committing
  // By daemon, for the step in flight and, from a daemon that has consumed it, for the next.
  std::map<int, Vote> votes_, early_votes_;
  absl::Status no_verdict_;           // all have voted, on different terms
  std::int64_t promised_ = 0;         // no vote is cast below this generation
  std::map<std::uint64_t, std::int64_t> waiters_;  // their ranks
  // Ranks whose attempt was discarded since they disagreed, until they have been told.
  std::map<std::int64_t, absl::Status> rejected_;

  // Of the last consumed step, so that repeats get identical answers.
  std::optional<StepOutcome> last_outcome_;
  absl::Status last_status_;
  std::map<SliceId, std::uint64_t> last_digests_;
  std::map<int, Vote> last_votes_;
  std::int64_t last_committed_ = -1;
  std::int64_t applied_steps_ = 0;
  std::int64_t skipped_steps_ = 0;
  std::int64_t consecutive_skips_ = 0;

  absl::Status stopped_;
  std::string failure_;
};

// What a change of generation must not throw away, from the promises of all daemons: the votes of
// the lowest next step if those of one generation are complete (some daemon may have its verdict),
// else none. Pure.
std::vector<CastVote> SettledVotes(int daemons, const std::vector<StepMachine::Promise>& promises);

// OK iff all daemons promise for state of one lineage. A change of generation alone must not join
// others: where making state anew was broken off half way, some have the new one and some the old.
// FAILED_PRECONDITION then, naming daemons and lineages and what helps. Pure.
absl::Status CheckOneLineage(const std::vector<std::string>& daemons,
                             const std::vector<StepMachine::Promise>& promises);

}  // namespace muond
