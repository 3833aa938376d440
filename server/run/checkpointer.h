// Saves and restores the runs of this daemon: when, which, and together with the other daemons.
//
// Daemon 0 of a run coordinates. It chooses the version, every daemon copies its state at that
// version between two commits and writes it in the background, and daemon 0 publishes the whole
// once all parts are durable. To restore, every daemon reads and checks its part beside its state;
// only when all have it does the run go back, under a new generation. What concerns a run's
// checkpoints is done one after another, on two threads of this class: one coordinates, the other
// does this daemon's part for another coordinator.
//
// Thread rule: any thread. Callbacks run on a thread of this class.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muond/v1/checkpoint.pb.h"
#include "proto/mutex.h"
#include "server/checkpoint/store.h"
#include "server/engine/executor.h"
#include "server/run/run_table.h"

namespace muond {

struct CheckpointOptions {
  // Of all runs, shared by all daemons; empty: no checkpoints, and state comes back from buddies.
  std::string directory;
  std::int64_t every_steps = 0;   // save after so many steps; 0: not by steps
  absl::Duration every;           // save after so long, if steps were taken; 0: not by time
  std::int64_t keep = 3;          // complete checkpoints of a run that are kept
  // Which one a run goes on from that has lost its state or is new here: "latest", a step, "none".
  std::string restore = "latest";
  std::string writer;             // name and version of this program
};

class Checkpointer {
 public:
  // INVALID_ARGUMENT for options that make no sense; the status of the directory when it can't be
  // opened. Nothing happens before Start.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Open(CheckpointOptions options,
                                                            std::shared_ptr<Peers> peers);
  ~Checkpointer();
  // Ends its threads. Runs must not be made any more, calls not come; Wake may still be called.
  void Stop();

  // `runs` outlives this object's threads.
  void Start(RunTable* runs);
  // Something may be due: a copy was taken, a run needs a restore.
  void Wake();
  // A run was made here: when there is a checkpoint of it, it is not to be initialized.
  void OnMade(Run& run);

  using SaveDone = std::function<void(const absl::StatusOr<v1::SaveReply>&)>;
  using RestoreDone = std::function<void(const absl::StatusOr<v1::RestoreReply>&)>;
  // See the service's description. Passed on to daemon 0 by any other.
  void Save(std::shared_ptr<Run> run, const v1::SaveRequest& request, SaveDone done);
  void Restore(std::shared_ptr<Run> run, const v1::RestoreRequest& request, RestoreDone done);
  // This daemon's part, for a coordinator.
  void SavePart(std::shared_ptr<Run> run, const v1::SavePartRequest& request,
                std::function<void(const absl::StatusOr<v1::SavePartReply>&)> done);
  void Stage(std::shared_ptr<Run> run, const v1::StageRequest& request,
             std::function<void(const absl::StatusOr<v1::StageReply>&)> done);

  bool has_directory() const { return files_ != nullptr; }

  // The daemon is going away: saves every run that has taken steps since its last checkpoint.
  // Blocks until it is done; no wait within it is longer than `patience`.
  void SaveAll(absl::Duration patience);

 private:
  Checkpointer(CheckpointOptions options, std::shared_ptr<Peers> peers,
               std::unique_ptr<checkpoint::FileSystem> files);

  // What was done for a run, as far as this daemon coordinates it. On the coordinating thread only.
  struct Progress {
    std::weak_ptr<Run> run;
    std::int64_t generation = 0, version = -1;  // last saved
    v1::SaveReply saved;
    std::int64_t periodic = -1;  // version of the last periodic copy that was dealt with
    absl::Time since;            // last save, or the run's beginning here
    absl::Time retry;            // no automatic restore before
    std::string complaint;       // the last one that was logged
    std::string unfinished;      // checkpoint that some daemons may have gone back to, not all
  };

  void Loop();
  void Tick();
  void TickRun(const std::shared_ptr<Run>& run);
  Progress& ProgressOf(const std::shared_ptr<Run>& run);

  absl::StatusOr<v1::SaveReply> SaveNow(const std::shared_ptr<Run>& run,
                                        std::optional<std::int64_t> exact, absl::Duration wait);
  absl::StatusOr<v1::SaveReply> SaveVersion(const std::shared_ptr<Run>& run, std::int64_t step,
                                            absl::Duration wait);
  absl::StatusOr<checkpoint::Manifest> CollectParts(const std::shared_ptr<Run>& run,
                                                    std::int64_t step, const std::string& saving,
                                                    absl::Duration wait);
  absl::StatusOr<v1::SavePartReply> WriteOwn(Run& run, const v1::SavePartRequest& request,
                                             checkpoint::Control* control);

  void AutoRestore(const std::shared_ptr<Run>& run, Progress& progress);
  absl::StatusOr<v1::RestoreReply> RestoreNow(const std::shared_ptr<Run>& run,
                                              const v1::RestoreRequest& request);
  bool AnyNeedsRestore(const Run& run);
  absl::Status RecoverFromBuddies(const std::shared_ptr<Run>& run, absl::Time deadline);
  v1::RestoreReply ReplyOf(const Run& run, const std::string& name) const;
  absl::StatusOr<std::vector<std::string>> Candidates(const Run& run, const std::string& name);
  absl::Status RestoreFrom(const std::shared_ptr<Run>& run, const std::string& name,
                           bool allow_relayout, absl::Time deadline);
  absl::StatusOr<std::int64_t> StageOwn(Run& run, const std::string& name, bool allow_relayout);
  bool coordinates() const { return peers_->self() == 0; }

  const CheckpointOptions options_;
  const std::shared_ptr<Peers> peers_;
  const std::unique_ptr<checkpoint::FileSystem> files_;
  RunTable* runs_ = nullptr;
  std::map<std::string, Progress> progress_;
  std::int64_t saves_ = 0;  // begun by this process

  Mutex mutex_;
  CondVar wake_;
  bool awake_ MUOND_GUARDED_BY(mutex_) = false;
  bool stopping_ MUOND_GUARDED_BY(mutex_) = false;
  bool ticking_ MUOND_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Executor> coordinate_, parts_;
  std::thread clock_;
};

}  // namespace muond
