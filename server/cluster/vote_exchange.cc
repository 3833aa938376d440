#include "server/cluster/vote_exchange.h"

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "grpcpp/alarm.h"
#include "grpcpp/grpcpp.h"
#include "proto/grpc_deadline.h"
#include "proto/status.h"
#include "proto/steady_time.h"
#include "server/cluster/vote_message.h"

namespace muond {
namespace {

// One call: long enough for a busy daemon, short enough to ask again.
constexpr absl::Duration kCallTimeout = absl::Seconds(2);
constexpr absl::Duration kFirstPause = absl::Milliseconds(10);
constexpr absl::Duration kLongestPause = absl::Milliseconds(500);
constexpr double kPauseGrowth = 1.6;

}  // namespace

// One call at a time is on the way to each peer; its objects live here until the next one.
struct VoteExchange::Line {
  int daemon = 0;
  std::unique_ptr<grpc::ClientContext> context;
  v1::VoteRequest request;
  v1::VoteReply reply;
  grpc::Alarm alarm;
  absl::Duration pause = kFirstPause;
  absl::Time sent;
  absl::Time failing_since = absl::InfiniteFuture();
};

VoteExchange::VoteExchange(std::shared_ptr<Peers> peers, v1::PeerRun introduction,
                           std::int64_t step, Listener listener)
    : peers_(std::move(peers)),
      introduction_(std::move(introduction)),
      step_(step),
      listener_(std::move(listener)) {}

std::shared_ptr<VoteExchange> VoteExchange::Make(std::shared_ptr<Peers> peers,
                                                 const std::string& run,
                                                 const std::string& plan_hash, std::int64_t step,
                                                 Listener listener) {
  const v1::PeerRun introduction = peers->Introduction(run, plan_hash);
  std::shared_ptr<VoteExchange> exchange(
      new VoteExchange(std::move(peers), introduction, step, std::move(listener)));
  for (int daemon = 0; daemon < exchange->peers_->count(); ++daemon) {
    if (daemon == exchange->peers_->self()) continue;
    exchange->lines_.push_back(std::make_unique<Line>());
    exchange->lines_.back()->daemon = daemon;
  }
  return exchange;
}

void VoteExchange::Start() {
  for (auto& line : lines_) Send(*line);
}

void VoteExchange::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  // What is on its way goes on: the last daemon to vote has its verdict at once, and the others
  // wait for its vote.
  for (auto& line : lines_) line->alarm.Cancel();
}

bool VoteExchange::stopped() const {
  MutexLock lock(mutex_);
  return stopped_;
}

void VoteExchange::Send(Line& line) {
  // Asked for outside the lock: the listener has one of its own, and may be calling Stop.
  const std::vector<CastVote> known = listener_.known();
  MutexLock lock(mutex_);
  if (stopped_ && line.context != nullptr) return;  // everybody is told once
  line.request.Clear();
  line.reply.Clear();
  *line.request.mutable_peer() = introduction_;
  line.request.set_step(step_);
  VotesToProto(known, line.request.mutable_votes());
  line.sent = SteadyNow();
  line.context = std::make_unique<grpc::ClientContext>();
  line.context->set_deadline(GrpcDeadlineIn(kCallTimeout));
  peers_->stub(line.daemon)
      .async()
      ->Vote(line.context.get(), &line.request, &line.reply,
             [self = shared_from_this(), &line](const grpc::Status& status) {
               self->OnReply(line, FromGrpc(status));
             });
}

void VoteExchange::OnReply(Line& line, const absl::Status& status) {
  if (stopped()) return;
  const bool unreachable = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
  if (!unreachable) line.failing_since = absl::InfiniteFuture();
  if (!unreachable && listener_.answered) listener_.answered(SteadyNow() - line.sent);
  if (status.ok()) {
    const v1::RunPosition& position = line.reply.position();
    if (const auto votes = VotesFromProto(line.reply.votes()); votes.ok()) {
      listener_.heard(line.daemon,
                      {position.generation(), position.next_step(), position.lineage(),
                       position.state()},
                      *votes);
    } else {
      listener_.trouble(line.daemon, votes.status());
    }
  } else if (!unreachable) {
    listener_.trouble(line.daemon, status);
  } else {
    line.failing_since = std::min(line.failing_since, SteadyNow());
    if (SteadyNow() - line.failing_since >= peers_->patience()) {
      listener_.trouble(line.daemon, absl::UnavailableError(status.message()));
    }
  }
  MutexLock lock(mutex_);
  if (stopped_) return;
  const absl::Duration pause = line.pause;
  line.pause = std::min(line.pause * kPauseGrowth, kLongestPause);
  // An alarm keeps its callback for life: holding `self` there would keep the exchange for ever.
  line.alarm.Set(GrpcDeadlineIn(pause),
                 [weak = weak_from_this(), &line](bool fired) {
                   const auto self = fired ? weak.lock() : nullptr;
                   if (self != nullptr) self->Send(line);
                 });
}

}  // namespace muond
