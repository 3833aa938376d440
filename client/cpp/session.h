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
// Gradients and parameters may lie in the memory of a GPU: SessionOptions::gpu, SliceSource::place
// and SliceSink::place (client/cpp/gpu.h).
//
// Every call has a deadline and may be repeated: the service applies a step once however often it
// is finished. UNAVAILABLE, ABORTED streams and DATA_LOSS are retried here within the deadline
// (retry.h). Step, Complete, Skip, Pull and AddParameters also live through daemons that restart
// and runs that are restored, within recovery_timeout (interruption.h); what is returned needs the
// caller: see each method. Pushes only read the caller's buffers.
// Thread rule: one thread at a time per Session, Cancel from any; Sessions are independent.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/gpu.h"
#include "client/cpp/interruption.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/mutex.h"
#include "proto/steady_time.h"
#include "proto/tls.h"
#include "proto/values.h"

namespace grpc {
class Channel;
}

namespace muond::nccl {
class Worker;
}

namespace muond::client {

class CallScope;
class Connection;
class Daemons;
class ArenaLink;
class GpuLayout;
class GpuLink;
class OwnerTable;
class PushQueue;
class SliceTable;
class Recovery;
struct CallResult;
struct ExchangePath;
struct RetryPlan;
struct SinkPart;
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
  // How long one step, Pull or AddParameters may be held up by daemons that are away or runs being
  // restored, from the first that is heard of it; zero: the first is returned.
  absl::Duration recovery_timeout = absl::Seconds(300);
  // Hears of each, on the session's thread: must not call the session. Empty: a line on stderr.
  InterruptionHook on_interruption;
  std::int64_t chunk_bytes = std::int64_t{1} << 20;   // payload of one message
  // How gradients and parameters go: "auto" takes the best path that the daemon offers; "grpc",
  // "arena" (memory shared with a daemon on this host), "cuda-ipc" (likewise, of a GPU), "nccl"
  // (from GPU to GPU) and "pointer" (a daemon in this process) are taken or refused.
  std::string transport = "auto";
  std::int64_t arena_window_bytes = std::int64_t{4} << 20;  // a multiple of 4096
  std::int64_t arena_windows = 2;  // in each direction: one is filled while the other is drained
  // The GPU whose memory gradients and parameters lie in: its CUDA ordinal in this process.
  // Negative: host memory. Slices may name places of their own all the same.
  int gpu = -1;
  // Element type of gradients, for the size of a GPU's windows, each of which holds all of the
  // rank's; nothing: each parameter's own. A wider one is refused when it is pushed.
  std::optional<Dtype> gpu_gradient_dtype;
  std::int64_t gpu_windows = 2;  // towards the daemon
  // Of path "nccl": a daemon's windows for gradients are this large, or as large as the largest
  // slice where that is more.
  std::int64_t nccl_window_bytes = std::int64_t{256} << 20;
  absl::Duration nccl_timeout = absl::Seconds(20);  // to make a pair, and of each exchange
  // NCCL on this trainer's GPU, null: the machine's (nccl/library.h). Tests bring their own.
  std::shared_ptr<nccl::Worker> nccl_worker;
  // The driver of GPUs; null: the machine's, by LoadGpuDriver. Tests bring their own.
  std::shared_ptr<GpuDriver> gpu_driver;
};

// The data path to one daemon, and why it is no other.
struct ChosenTransport {
  std::string daemon;  // address
  std::string name;    // "grpc", "arena", "inprocess", "cuda-ipc", "nccl" or "pointer"
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
  mutable Mutex mutex_;
  CondVar ended_;
  bool done_ MUOND_GUARDED_BY(mutex_) = false;
  absl::Status status_ MUOND_GUARDED_BY(mutex_);
};

// One slice's values to send: `elements` values of `dtype`, the row-major order of the box.
struct SliceSource {
  std::string parameter;
  std::int64_t slice = 0;
  const void* data = nullptr;
  std::int64_t elements = 0;
  Dtype dtype = Dtype::kF32;
  std::int64_t micro_batch = 0;
  GpuPlace place;  // of `data`
};

// Where one slice's values go, likewise. `dtype` must be the parameter's (or f32 for masters).
struct SliceSink {
  std::string parameter;
  std::int64_t slice = 0;
  void* data = nullptr;
  std::int64_t elements = 0;
  Dtype dtype = Dtype::kF32;
  GpuPlace place;  // of `data`
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
  // Where the run is interrupted it rejoins, awaits the restore and takes the step again, for
  // recovery_timeout. ABORTED when the run then stands before another step (it went back to an
  // older checkpoint): next_step() says which, pull that version. FAILED_PRECONDITION when its
  // state is lost and there is no checkpoint: Reinitialize.
  absl::StatusOr<StepOutcome> Step(StepBegin begin, std::span<const SliceSource> gradients,
                                   const std::vector<std::string>& absent = {});
  // Step, and a Pull of the version that it leads to: where all of it lies in memory that one
  // daemon reaches, in one call, and the parameters are written as they are updated. An error may
  // be the pull's: the step stands then (last_outcome()).
  absl::StatusOr<StepOutcome> StepAndPull(StepBegin begin, std::span<const SliceSource> gradients,
                                          std::span<const SliceSink> sinks,
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
  // Likewise with a Pull, as StepAndPull.
  absl::StatusOr<StepOutcome> FinishAndPull(std::span<const SliceSink> sinks,
                                            const std::vector<std::string>& absent = {});
  // Finish that recovers as Step does: where Begin, a push or Finish was interrupted, the whole
  // step is taken again from `gradients`: all that were pushed, with the same bytes still.
  absl::StatusOr<StepOutcome> Complete(StepBegin begin, std::span<const SliceSource> gradients,
                                       const std::vector<std::string>& absent = {});

  // From any thread: every call that is under way, and what PushAsync has queued, returns
  // CANCELLED. The run is as if the trainer had been silent; later calls work.
  void Cancel();

  // Registers again under the same session name and adopts generation, next step, loss scale and
  // last outcome. Step, Complete, Skip, Pull and AddParameters do so by themselves.
  absl::Status Rejoin();

  // Rejoins until the daemons have restored the run from a checkpoint: what to do after opening a
  // session in state NEEDS_RESTORE, and when the pieces of a step are told so. next_step()
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

  // Adds parameters, and groups for them, to the run: between two steps, all ranks, the same
  // parameters, each with the slices that it holds of them. Returns when they are the run's on
  // every daemon: under a new generation, behind the others in routing() and in order of
  // registration, with fresh state and a t of their own. Then Initialize their values; what was
  // there stays as it is and where it is. May be repeated when it fails, also by a trainer that has
  // restarted and opened the session with the parameters of before. DEADLINE_EXCEEDED naming ranks
  // that did not ask for them within step_timeout; INVALID_ARGUMENT, to all, when ranks disagree;
  // else the errors of Open about the new parameters. The run changes on all daemons or on none.
  absl::Status AddParameters(const ParameterAddition& addition);

  // Discards the step on the trainer's word (its own scaler skipped it).
  absl::StatusOr<StepOutcome> Skip(SkipCause cause, double loss_scale);

  // Reads slices of `version` (StepOutcome::version, or 0 before the first step).
  // FAILED_PRECONDITION for any other version; never a mix of two. On error the sinks' contents are
  // undefined.
  absl::Status Pull(std::int64_t version, std::span<const SliceSink> sinks, bool master = false);

  // Where a GPU's memory that is shared with a daemon keeps this slice: a trainer that has its
  // gradients made there, or its parameters be views of it, saves a copy. Device pointers, good
  // until the arena is lost (the path changes) or the session ends. Gradients: of the window that
  // the next Begin uses; ask again before each step, or take `window` 0 <= w < gpu_windows of every
  // (step mod gpu_windows). NOT_FOUND for slices that this rank has not, FAILED_PRECONDITION where
  // the path is another than "cuda-ipc" or several daemons own the slice.
  absl::StatusOr<void*> GradientPlace(const std::string& parameter, std::int64_t slice,
                                      std::int64_t window);
  absl::StatusOr<void*> ParameterPlace(const std::string& parameter, std::int64_t slice);

  // Leaves the run; the last rank's Close frees it. True when the run is gone.
  absl::StatusOr<bool> Close();

 private:
  // A step in one call: what Begin, Push, Finish and Pull would say.
  struct StepRequest {
    const StepBegin* begin = nullptr;  // null: it was begun
    std::span<const SliceSource> gradients;
    const std::vector<std::string>* absent = nullptr;
    std::span<const SliceSink> sinks;
  };
  Session();
  friend class Recovery;
  // Registers with one daemon.
  CallResult RegisterWith(int daemon, absl::Duration timeout, v1::RegisterReply* reply);
  // Rejoin, with less than call_timeout for each daemon where `deadline` is nearer.
  absl::Status RejoinBy(absl::Time deadline);
  // Takes over where the run stands, from the answers of all daemons.
  absl::Status Adopt(const std::vector<v1::RegisterReply>& replies);
  absl::Status CheckAlike(const std::vector<v1::RegisterReply>& replies) const;
  void CompareStates(const std::vector<v1::RegisterReply>& replies);
  // Of all daemons; they must agree.
  absl::StatusOr<StepOutcome> Consume(const std::vector<v1::FinishReply>& replies);
  std::vector<SlicePart> PartsFor(int daemon, std::span<const SliceSource> sources) const;
  // On all daemons, without joining again.
  absl::Status RaiseOnce(v1::RaiseGenerationRequest request);
  // Asks all daemons; true when they have the parameters already. `name`: what they call them.
  absl::StatusOr<bool> AskToAdd(const ParameterAddition& addition, std::string* name);
  bool Has(const ParameterAddition& addition) const;
  // The pieces of a step with what a refusal said about the run's position; Begin's tells on
  // success too.
  CallResult BeginOnce(const StepBegin& begin);
  CallResult PushOnce(std::span<const SliceSource> gradients);
  CallResult FinishOnce(const std::vector<std::string>& absent,
                        std::vector<v1::FinishReply>* replies);
  absl::StatusOr<bool> Consumed(std::int64_t step, const absl::Status& cause) const;
  CallResult PullOnce(std::int64_t version, std::span<const SliceSink> sinks, bool master);
  CallResult SkipOnce(const v1::SkipRequest& request, std::vector<v1::FinishReply>* replies);
  // One try of a whole step, or of its Finish where `begun`.
  CallResult TryStep(const StepRequest& step, bool begun, bool* pulled,
                     std::vector<v1::FinishReply>* replies);
  absl::StatusOr<StepOutcome> TakeStep(StepBegin begin, bool begun,
                                       std::span<const SliceSource> gradients,
                                       std::span<const SliceSink> sinks,
                                       const std::vector<std::string>& absent);
  v1::RunId Id() const;
  std::int64_t ChunkBytes() const;
  // The path that the daemon's answer names; gRPC when an arena can't be had and need not.
  absl::Status ChoosePath(int daemon, const v1::RegisterReply& reply);
  absl::Status AttachArena(int daemon, std::int64_t generation);
  // The arena of a daemon, a new one when it was lost; null where the path is another.
  absl::StatusOr<std::shared_ptr<ArenaLink>> ArenaOf(int daemon);
  // -- Memory that a daemon reaches itself (session_exchange.cc)
  absl::Status SetUpGpu();
  absl::StatusOr<std::shared_ptr<GpuDriver>> Driver() const;
  void OfferPaths(v1::RegisterRequest* request);
  GpuLayout LayoutFor(int daemon) const;
  absl::Status AttachGpus();
  absl::Status AttachGpu(int daemon);
  // -- NCCL (session_pair.cc)
  // The thread of this trainer's GPU; the reason where there is no NCCL.
  absl::StatusOr<std::shared_ptr<nccl::Worker>> NcclWorker();
  absl::Status AttachPair(int daemon);
  absl::Time NcclDeadline() const { return SteadyNow() + options_.nccl_timeout; }
  // Fills one behind the other, as many under way as the pair has windows; one attempt. `done`: how
  // many parts the daemon has taken, from the front on.
  CallResult FillPair(int daemon, std::span<const SlicePart> parts, bool initial, bool* complete,
                      std::size_t* done);
  // The sinks, from the front on, that one call asks for.
  std::span<const SinkPart> PullPiece(int daemon, std::span<const SinkPart> sinks) const;
  // What an attempt has sent is settled: gone, or the pair is given up.
  static absl::Status SettlePair(const ExchangePath& path, const absl::Status& answer);
  absl::StatusOr<std::optional<ExchangePath>> ExchangeWith(int daemon);
  absl::StatusOr<GpuLink*> LinkOf(const std::string& parameter, std::int64_t slice);
  absl::Status PathLost(int daemon) const;
  CallResult CallExchange(int daemon, const std::string& action, absl::Duration timeout,
                          const std::function<absl::Status(v1::ExchangeRequest&)>& put,
                          v1::ExchangeReply* reply);
  CallResult FillDirect(int daemon, const std::string& action, std::span<const SlicePart> parts,
                        bool initial, bool* complete);
  CallResult PullDirect(int daemon, const std::string& action, std::int64_t version,
                        std::span<const SinkPart> sinks, bool master);
  std::optional<CallResult> StepDirect(const StepRequest& step, bool* pulled,
                                       std::vector<v1::FinishReply>* replies);
  std::vector<SinkPart> SinksFor(int daemon, std::span<const SliceSink> sinks) const;
  // What goes to one daemon, by whichever paths its parts can take.
  CallResult SendParts(int daemon, const std::string& action, std::vector<SlicePart> parts,
                       bool initial, bool* complete);
  CallResult StreamParts(int daemon, const std::string& action,
                         const std::vector<SlicePart>& parts, bool initial, bool* complete);
  CallResult PullParts(int daemon, const std::string& action, std::int64_t version,
                       std::vector<SinkPart> parts, bool master);
  CallResult StreamPull(int daemon, const std::string& action, std::int64_t version,
                        const std::vector<SinkPart>& parts, bool master);
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
  std::string gpu_uuid_;  // of options_.gpu
  std::shared_ptr<nccl::Worker> nccl_worker_;
  std::int64_t generation_ = 0;
  std::int64_t told_ = 0;  // the highest generation that a daemon told of
  bool one_generation_ = true;  // at the last Register; else it is being raised
  absl::Status mixed_;          // then: the daemons' states are of different lineages
  std::int64_t next_step_ = 0;
  std::int64_t step_ = -1;          // begun last; -1: none since the session joined
  bool whole_ = false;              // all pieces of it so far have succeeded
  std::int64_t micro_batches_ = 1;  // of that step
  double loss_scale_ = 1.0;
  std::unique_ptr<PushQueue> queue_;  // last: its thread uses the rest
};

}  // namespace muond::client
