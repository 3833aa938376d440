// A trainer's seat in a run: register, push gradients, get parameters back. The run may span
// several daemons: a session talks to all of them and sends each what it owns.
//
//   auto session = Session::Open(spec, rank, slices, options);      // routing report included
//   session->Initialize(values);                                    // once
//   for (...) {
//     auto outcome = session->Step({.loss_scale = session->loss_scale(), ...}, gradients);
//     session->Pull(outcome->version, parameters);
//   }
//
// Every call has a deadline and may be repeated: the service applies a step once however often it
// is finished. UNAVAILABLE, ABORTED streams and DATA_LOSS are retried here within the deadline
// (retry.h); what is returned needs the caller: see each method. Pushes only read the caller's
// buffers.
// Thread rule: one thread at a time per Session, Cancel from any; Sessions are independent.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/tls.h"
#include "proto/values.h"

namespace grpc {
class Channel;
}

namespace muond::client {

class CallScope;
class Connection;
class Daemons;
class ArenaLink;
class OwnerTable;
class PushQueue;
class SliceTable;
struct CallResult;
struct RetryPlan;
struct SlicePart;

struct SessionOptions {
  // "unix:///run/muond/muond.sock" or "127.0.0.1:7070"; empty: $MUOND_ENDPOINT. Any daemon of the
  // run will do: it names the others.
  std::string endpoint;
  // Who this trainer is to daemons on other machines; empty: $MUOND_TLS_CERT, _KEY, _CA, or none.
  TlsFiles tls;
  // Takes the place of `endpoint`: an in-process server's channel.
  std::shared_ptr<grpc::Channel> channel;
  std::string session;                                // identity across restarts; empty: "rank-<n>"
  absl::Duration call_timeout = absl::Seconds(30);    // of a control call, retries included
  absl::Duration step_timeout = absl::Seconds(120);   // of Finish: waiting for the other ranks
  absl::Duration bulk_timeout = absl::Seconds(300);   // of one Initialize, Push or Pull stream
  std::int64_t chunk_bytes = std::int64_t{1} << 20;   // payload of one message
  // How gradients and parameters go: "auto" takes the best path that the daemon offers, "grpc" and
  // "arena" (memory shared with a daemon on this host) are taken or refused.
  std::string transport = "auto";
  std::int64_t arena_window_bytes = std::int64_t{4} << 20;  // a multiple of 4096
  std::int64_t arena_windows = 2;  // in each direction: one is filled while the other is drained
};

// The data path to one daemon, and why it is no other.
struct ChosenTransport {
  std::string daemon;  // address
  std::string name;    // "grpc", "arena" or "inprocess"
  std::string reason;  // in words
};

// Slices that are pushed in the background. Thread-safe.
class PushTicket {
 public:
  // What became of them; DEADLINE_EXCEEDED when they are still on their way after `timeout`.
  absl::Status Wait(absl::Duration timeout);
  bool done() const;

 private:
  friend class PushQueue;
  void End(const absl::Status& status);
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  absl::Status status_;
};

// One slice's values to send: `elements` values of `dtype`, the row-major order of the box.
struct SliceSource {
  std::string parameter;
  std::int64_t slice = 0;
  const void* data = nullptr;
  std::int64_t elements = 0;
  Dtype dtype = Dtype::kF32;
  std::int64_t micro_batch = 0;
};

// Where one slice's values go, likewise. `dtype` must be the parameter's (or f32 for masters).
struct SliceSink {
  std::string parameter;
  std::int64_t slice = 0;
  void* data = nullptr;
  std::int64_t elements = 0;
  Dtype dtype = Dtype::kF32;
};

class Session {
 public:
  // Registers (or rejoins) the run. Errors as of the Register call: INVALID_ARGUMENT and
  // FAILED_PRECONDITION name the parameters and the remedy (Muon silently inactive, placeholder
  // shapes, gaps); UNAVAILABLE when no daemon answers within call_timeout.
  static absl::StatusOr<std::unique_ptr<Session>> Open(const RunSpec& spec, std::int64_t rank,
                                                       const RankSlices& slices,
                                                       const SessionOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Who got which algorithm and why, in registration order.
  const v1::RoutingReport& routing() const { return registered_.routing(); }
  const v1::RegisterReply& registered() const { return registered_; }
  std::int64_t rank() const { return rank_; }
  std::int64_t generation() const { return generation_; }
  // The step that Begin will name next, and the scale that its gradients must be made with.
  std::int64_t next_step() const { return next_step_; }
  double loss_scale() const { return loss_scale_; }
  // Where the run stood at the last Register; NEEDS_RESTORE when a daemon lost its state.
  v1::RunState state() const { return registered_.position().state(); }
  int daemons() const;
  // By daemon, in the plan's order. Changes when a path is lost: the reason tells.
  std::vector<ChosenTransport> transports() const;
  // Of the newest step that this session or, before it joined, the run has seen the end of.
  const std::optional<StepOutcome>& last_outcome() const { return last_outcome_; }

  // Sends initial values; true when the run then has all of them (all ranks').
  absl::StatusOr<bool> Initialize(std::span<const SliceSource> values);

  // Begin, push, finish. `begin.step` and `begin.loss_scale` are filled in from the session when
  // step is 0 and loss_scale is 0. Returns the outcome; a skipped step is an outcome, not an error.
  absl::StatusOr<StepOutcome> Step(StepBegin begin, std::span<const SliceSource> gradients,
                                   const std::vector<std::string>& absent = {});

  // The same in pieces, for trainers that push while backward still runs. ABORTED: the generation
  // was raised or the step's attempt was given up; Rejoin, then start the step again from Begin.
  absl::Status Begin(const StepBegin& begin);
  absl::Status Push(std::span<const SliceSource> gradients);
  // Push in the background, for trainers that push each parameter when its gradient is ready:
  // returns at once, after the checks. The buffers must stay as they are until the ticket is done;
  // every other method waits for what is on its way, and Finish returns the first failure.
  absl::StatusOr<std::shared_ptr<PushTicket>> PushAsync(std::span<const SliceSource> gradients);
  absl::StatusOr<StepOutcome> Finish(const std::vector<std::string>& absent = {});

  // From any thread: every call that is under way, and what PushAsync has queued, returns
  // CANCELLED. The run is as if the trainer had been silent; later calls work.
  void Cancel();

  // Registers again under the same session name and adopts generation, next step, loss scale and
  // last outcome. Step does so by itself.
  absl::Status Rejoin();

  // Rejoins until the daemons have restored the run from a checkpoint: what to do when Step is told
  // that the run needs a restore, and after opening a session in state NEEDS_RESTORE. next_step()
  // then says where to go on; a trainer that was further pulls that version. DEADLINE_EXCEEDED with
  // the run still in that state.
  absl::Status AwaitRestore(absl::Duration timeout);

  // Starts the step in flight over on all daemons and for all ranks: for a trainer that lost
  // gradients that it had pushed. A step that some daemon may have applied is completed first. The
  // other ranks' calls get ABORTED, and a Rejoin shows them the new generation.
  absl::Status RaiseGeneration(const std::string& reason);
  // Forgets what the daemons hold and goes on from these values, of all slices of this rank, at
  // step next_step(): for a run that needs a restore and has none. All ranks call it; momentum,
  // second moments and t start anew. True when the run then has all values.
  absl::StatusOr<bool> Reinitialize(std::span<const SliceSource> values,
                                    const std::string& reason);

  // Discards the step on the trainer's word (its own scaler skipped it).
  absl::StatusOr<StepOutcome> Skip(SkipCause cause, double loss_scale);

  // Reads slices of `version` (StepOutcome::version, or 0 before the first step).
  // FAILED_PRECONDITION for any other version; never a mix of two. On error the sinks' contents are
  // undefined.
  absl::Status Pull(std::int64_t version, std::span<const SliceSink> sinks, bool master = false);

  // Leaves the run; the last rank's Close frees it. True when the run is gone.
  absl::StatusOr<bool> Close();

 private:
  Session();
  // Registers with one daemon.
  CallResult RegisterWith(int daemon, v1::RegisterReply* reply);
  // Takes over where the run stands, from the answers of all daemons.
  absl::Status Adopt(const std::vector<v1::RegisterReply>& replies);
  absl::Status CheckAlike(const std::vector<v1::RegisterReply>& replies) const;
  void CompareStates(const std::vector<v1::RegisterReply>& replies);
  // Of all daemons; they must agree.
  absl::StatusOr<StepOutcome> Consume(const std::vector<v1::FinishReply>& replies);
  std::vector<SlicePart> PartsFor(int daemon, std::span<const SliceSource> sources) const;
  absl::Status Raise(bool reinitialize, const std::string& reason);
  // The pieces of a step with what a refusal said about the run's position; Begin's tells on
  // success too.
  CallResult BeginOnce(const StepBegin& begin);
  CallResult PushOnce(std::span<const SliceSource> gradients);
  CallResult FinishOnce(const std::vector<std::string>& absent,
                        std::vector<v1::FinishReply>* replies);
  // One try of a whole step; empty outcome: it must begin anew after a Rejoin.
  absl::StatusOr<std::optional<StepOutcome>> TryStep(const StepBegin& begin,
                                                     std::span<const SliceSource> gradients,
                                                     const std::vector<std::string>& absent);
  v1::RunId Id() const;
  std::int64_t ChunkBytes() const;
  // The path that the daemon's answer names; gRPC when an arena can't be had and need not.
  absl::Status ChoosePath(int daemon, const v1::RegisterReply& reply);
  absl::Status AttachArena(int daemon, std::int64_t generation);
  // The arena of a daemon, a new one when it was lost; null where the path is another.
  absl::StatusOr<std::shared_ptr<ArenaLink>> ArenaOf(int daemon);
  // What PushAsync has queued is done or has failed.
  CallResult DrainQueue();
  RetryPlan Plan(int daemon, const std::string& action, absl::Duration timeout) const;

  std::unique_ptr<CallScope> calls_;  // each method that is under way has one inside it
  std::unique_ptr<Daemons> daemons_;
  std::unique_ptr<OwnerTable> owners_;
  std::unique_ptr<SliceTable> table_;
  SessionOptions options_;
  RunSpec spec_;
  RankSlices slices_;
  v1::RegisterReply registered_;
  std::optional<StepOutcome> last_outcome_;
  std::int64_t rank_ = 0;
  std::int64_t generation_ = 0;
  bool one_generation_ = true;  // at the last Register; else it is being raised
  absl::Status mixed_;          // then: the daemons' states are of different lineages
  std::int64_t next_step_ = 0;
  std::int64_t step_ = -1;          // begun last; -1: none since the session joined
  std::int64_t micro_batches_ = 1;  // of that step
  double loss_scale_ = 1.0;
  std::unique_ptr<PushQueue> queue_;  // last: its thread uses the rest
};

}  // namespace muond::client
