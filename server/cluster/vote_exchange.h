// Tells the other daemons the votes of one step and hears theirs, until the step is over: each is
// asked again and again, so that a lost message, a slow daemon or one that was away for a while
// only costs time. A daemon that can't be reached is reported once `Peers::patience` has passed.
//
// Thread rule: any thread; the listener is called on gRPC's threads, several
// at a time, and may be called for a moment after Stop has returned.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/mutex.h"
#include "server/cluster/peers.h"
#include "server/step/step_machine.h"

namespace muond {

// Where a run stands on another daemon.
struct PeerPosition {
  std::int64_t generation = 0;
  std::int64_t next_step = 0;
  std::int64_t lineage = 0;
  v1::RunState state = v1::RUN_STATE_UNSPECIFIED;
};

class VoteExchange : public std::enable_shared_from_this<VoteExchange> {
 public:
  struct Listener {
    // All votes known here for the step, at the moment.
    std::function<std::vector<CastVote>()> known;
    // What a daemon answered.
    std::function<void(int daemon, const PeerPosition&, const std::vector<CastVote>&)> heard;
    // UNAVAILABLE: out of reach for long. Else what it answered: NOT_FOUND when it does not know
    // the run, FAILED_PRECONDITION when it has another plan.
    std::function<void(int daemon, const absl::Status&)> trouble;
    // A daemon answered, whatever; after how long.
    std::function<void(absl::Duration)> answered;
  };

  static std::shared_ptr<VoteExchange> Make(std::shared_ptr<Peers> peers, const std::string& run,
                                            const std::string& plan_hash, std::int64_t step,
                                            Listener listener);
  // Calls the listener before it returns; once.
  void Start();
  // Asks no more. The first message to each peer goes out all the same.
  void Stop();

 private:
  struct Line;  // to one peer
  VoteExchange(std::shared_ptr<Peers> peers, v1::PeerRun introduction, std::int64_t step,
               Listener listener);
  void Send(Line& line);
  void OnReply(Line& line, const absl::Status& status);
  bool stopped() const;

  const std::shared_ptr<Peers> peers_;
  const v1::PeerRun introduction_;
  const std::int64_t step_;
  const Listener listener_;
  mutable Mutex mutex_;
  bool stopped_ MUOND_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Line>> lines_;
};

}  // namespace muond
