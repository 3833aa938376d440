#include "tests/simulation/raiser.h"

#include <algorithm>

namespace muond::simulation {
namespace {

constexpr Time kAskAgain = 30'000;
constexpr Time kPatience = 1'500'000;
// Numbers of calls that are not a daemon's votes.
constexpr std::uint64_t kFirstCall = std::uint64_t{1} << 62;

}  // namespace

Raiser::Raiser(int self, World& world, Bug bug, std::int64_t& proposed,
               std::function<void(Time, std::function<void()>)> later)
    : self_(self),
      world_(world),
      bug_(bug),
      proposed_(proposed),
      later_(std::move(later)),
      calls_(kFirstCall + static_cast<std::uint64_t>(world.now())) {}

void Raiser::Start(std::int64_t above, bool reinitialize, std::int64_t resume_step, bool grow,
                   std::function<void(const absl::Status&)> done) {
  order_ = {.reinitialize = reinitialize, .resume_step = resume_step, .grow = grow};
  done_ = std::move(done);
  later_(kPatience, [this, mine = ++try_] {
    if (active() && try_ == mine) End(absl::UnavailableError("not all daemons have answered"));
  });
  Propose(above);
}

void Raiser::Propose(std::int64_t above) {
  const std::int64_t daemons = world_.scenario().model.daemons;
  if (bug_ == Bug::kSharedNumbers) {
    order_.generation = above + 1;
  } else {
    order_.generation = std::max(above, proposed_) + 1;
    while (order_.generation % daemons != self_) ++order_.generation;
    proposed_ = order_.generation;
  }
  phase_ = Phase::kPreparing;
  ++round_;
  answers_.assign(daemons, std::nullopt);
  Ask();
}

// All that have not answered, again and again.
void Raiser::Ask() {
  for (int daemon = 0; daemon < static_cast<int>(answers_.size()); ++daemon) {
    if (answers_[daemon]) continue;
    open_[++calls_] = round_;
    Message message{self_, daemon, calls_, order_};
    if (phase_ == Phase::kPreparing) {
      message.body = PrepareCall{order_.generation, order_.reinitialize};
    }
    world_.Send(std::move(message));
  }
  later_(kAskAgain, [this, round = round_] {
    if (active() && round == round_) Ask();
  });
}

void Raiser::OnAnswer(const Message& message) {
  const auto call = open_.find(message.call);
  if (call == open_.end()) return;
  const bool current = active() && call->second == round_;
  open_.erase(call);
  if (!current) return;
  const Answer& answer = std::get<Answer>(message.body);
  if (absl::IsUnavailable(answer.status)) return;
  if (absl::IsAborted(answer.status)) {
    // Another has gone higher.
    if (phase_ == Phase::kRaising) return End(absl::UnavailableError("overtaken"));
    return Propose(std::max(answer.position.promised, answer.position.generation));
  }
  if (!answer.status.ok()) return End(answer.status);
  answers_[message.from] = answer;
  if (std::count(answers_.begin(), answers_.end(), std::nullopt) > 0) return;
  if (phase_ == Phase::kRaising) return End(absl::OkStatus());
  Order();
}

void Raiser::Order() {
  std::vector<StepMachine::Promise> promises;
  for (const auto& answer : answers_) {
    promises.push_back({answer->position.next_step, answer->votes, answer->position.lineage});
    order_.resume_step = std::max(order_.resume_step, answer->position.next_step);
  }
  // Nobody falls back behind one that has grown.
  const bool grown = std::any_of(answers_.begin(), answers_.end(),
                                 [](const auto& answer) { return answer->position.grown; });
  if (grown && !order_.grow && bug_ != Bug::kGrowsAlone) order_.grow = order_.follow = true;
  if (!order_.reinitialize) {
    const std::vector<std::string> names(promises.size(), "some");
    if (const absl::Status one = CheckOneLineage(names, promises);
        !one.ok() && bug_ != Bug::kMixedLineages) {
      return End(one);
    }
    order_.settled = SettledVotes(static_cast<int>(promises.size()), promises);
    if (bug_ == Bug::kNoSettling) order_.settled.clear();
  }
  phase_ = Phase::kRaising;
  ++round_;
  answers_.assign(answers_.size(), std::nullopt);
  Ask();
}

void Raiser::End(const absl::Status& status) {
  phase_ = Phase::kIdle;
  ++round_;
  open_.clear();
  done_(status);
}

}  // namespace muond::simulation
