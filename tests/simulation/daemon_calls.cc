// What a simulated daemon does about each message.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "tests/simulation/daemon.h"

namespace muond::simulation {
namespace {

constexpr Time kLongestPause = 200'000;
constexpr Time kPatience = 400'000;  // with a daemon that gives no sign of life
constexpr Time kTakeUp = 900'000;    // a promise that nobody has taken up

absl::Status NoState() {
  return absl::FailedPreconditionError("the daemon has no state of the run");
}

}  // namespace

void Daemon::Receive(const Message& message) {
  std::visit([&](const auto& body) { On(message, body); }, message.body);
}

std::int64_t Daemon::Generation(std::int64_t told) const {
  return bug_ == Bug::kNoGenerationCheck ? machine_->generation() : told;
}

bool Daemon::Closed(const Message& message) {
  if (!usable()) ReplyStatus(message, NoState());
  if (usable() && grow_after_commit_) ReplyStatus(message, absl::UnavailableError("growing"));
  return !usable() || grow_after_commit_;
}

void Daemon::On(const Message& message, const BeginCall& call) {
  if (Closed(message)) return;
  absl::Status status;
  Feed([&](Effects& effects) {
    status = machine_->OnBegin(call.rank, Generation(call.generation), call.begin, effects);
  });
  ReplyStatus(message, status);
}

void Daemon::On(const Message& message, const PushCall& call) {
  if (Closed(message)) return;
  const auto admission = machine_->Admit(call.id, Generation(call.generation), call.step);
  if (!admission.ok()) {
    ++checker_.coverage.stale_pushes;
    return ReplyStatus(message, admission.status());
  }
  // The bytes take their time.
  Later(world_.random().Between(0, 2'000), [this, message, call, admission = *admission,
                                            epoch = epoch_, attempt = machine_->attempt()] {
    if (epoch == epoch_ && usable()) return ClosePush(message, call, admission, attempt);
    ReplyStatus(message, absl::AbortedError("the run has failed or started over"));
  });
}

void Daemon::ClosePush(const Message& message, const PushCall& call,
                       StepMachine::Admission admission, std::int64_t attempt) {
  const std::int64_t generation = Generation(call.generation);
  // What was written belongs to its own attempt. What was only read must still be known: else the
  // machine would take a slice that nobody wrote.
  bool lost = attempt != machine_->attempt();
  if (admission == StepMachine::Admission::kVerify) {
    const auto again = machine_->Admit(call.id, generation, call.step);
    lost = again.ok() && *again == StepMachine::Admission::kWrite;
  }
  if (lost) {
    ++checker_.coverage.stale_pushes;
    return ReplyStatus(message, absl::AbortedError("the step ended or started over meanwhile"));
  }
  absl::Status status;
  Feed([&](Effects& effects) {
    const auto arrival =
        machine_->OnSlice(call.id, generation, call.step, DigestOf(call.id, call.content), effects);
    status = arrival.status();
    if (arrival.ok() && *arrival == StepMachine::Arrival::kAccepted) {
      engine_->Store(call.id, call.content);
    }
  });
  ReplyStatus(message, status);
}

// Gives the waiter its deadline, unless it has been answered already.
void Daemon::Wait(const Message& message, std::uint64_t waiter) {
  if (!waiters_.contains(waiter)) return;
  Later(world_.random().Between(100'000, 600'000), [this, waiter] {
    if (machine_ == nullptr || !waiters_.contains(waiter)) return;
    Feed([&](Effects& effects) { machine_->OnDeadline(waiter, effects); });
  });
}

void Daemon::On(const Message& message, const FinishCall& call) {
  if (Closed(message)) return;
  const std::uint64_t waiter = ++waiters_made_;
  waiters_[waiter] = {message.from, message.call};
  const auto& last = machine_->last_outcome();
  if (bug_ == Bug::kApplyTwice && last && last->step == call.step && last->applied) {
    engine_->CommitAgain();
  }
  Feed([&](Effects& effects) {
    machine_->OnFinish(call.rank, Generation(call.generation), call.step, call.absent, waiter,
                       effects);
  });
  Wait(message, waiter);
}

void Daemon::On(const Message& message, const SkipCall& call) {
  if (Closed(message)) return;
  const std::uint64_t waiter = ++waiters_made_;
  waiters_[waiter] = {message.from, message.call};
  Feed([&](Effects& effects) {
    machine_->OnSkip(call.rank, Generation(call.generation), call.step, call.cause, call.loss_scale,
                     waiter, effects);
  });
  Wait(message, waiter);
}

void Daemon::On(const Message& message, const CancelCall& call) {
  for (const auto& [waiter, caller] : waiters_) {
    if (caller.trainer != message.from || caller.call != call.call) continue;
    ++checker_.coverage.cancelled;
    machine_->OnWaiterGone(waiter);
    waiters_.erase(waiter);
    return;
  }
}

void Daemon::On(const Message& message, const JoinCall&) { ReplyStatus(message, absl::OkStatus()); }

void Daemon::On(const Message& message, const NewGenerationCall& call) {
  const bool grown = grown_ || !call.grow;
  if (!raiser_->active() && usable() && disk_.generation > call.above && !commit_open_ && grown) {
    return ReplyStatus(message, absl::OkStatus());
  }
  if (raiser_->active() && (raiser_->reinitializes() != call.reinitialize ||
                            (call.grow && !raiser_->grows()))) {
    return ReplyStatus(message, absl::UnavailableError("another order is on its way"));
  }
  raise_calls_.push_back(message);
  if (raiser_->active()) return;
  raiser_->Start(
      std::max(disk_.generation, call.above), call.reinitialize, call.resume_step, call.grow,
      [this](const absl::Status& status) {
        world_.Log(absl::StrFormat("daemon %d: raising ends: %s", id_, status.ToString()));
        for (const Message& waiting : raise_calls_) ReplyStatus(waiting, status);
        raise_calls_.clear();
      });
}

void Daemon::On(const Message& message, const VotesCall& call) {
  if (!usable()) return ReplyStatus(message, NoState());
  if (!grow_after_commit_) Hear(call.votes);
  Answer answer;
  answer.votes = machine_->VotesOf(call.step);
  Reply(message, std::move(answer));
}

void Daemon::Hear(std::vector<CastVote> votes) {
  for (CastVote& cast : votes) {
    if (!usable()) return;
    cast.vote.generation = Generation(cast.vote.generation);
    if (bug_ == Bug::kOldVoteCounted && cast.daemon != id_ &&
        cast.vote.step < machine_->next_step()) {
      cast.vote.step = machine_->next_step();
      cast.vote.generation = machine_->generation();
    }
    const bool early = cast.vote.step > machine_->next_step();
    Feed([&](Effects& effects) {
      const absl::Status status = machine_->OnVote(cast, effects);
      if (!status.ok()) ++checker_.coverage.refused_votes;
      if (status.ok() && early) ++checker_.coverage.early_votes;
      if (absl::IsAlreadyExists(status) || absl::IsInvalidArgument(status)) {
        checker_.Violation(absl::StrFormat("daemon %d: %s", id_, status.ToString()));
      }
    });
  }
}

void Daemon::Tell() {
  if (!telling_) return;
  if (!usable() || machine_->generation() != telling_->generation ||
      machine_->next_step() != telling_->step) {
    telling_.reset();
    return;
  }
  for (int peer = 0; peer < world_.scenario().model.daemons; ++peer) {
    if (peer == id_) continue;
    world_.Send(
        {id_, peer, ++calls_, VotesCall{machine_->VotesOf(telling_->step), telling_->step}});
    if (world_.now() - telling_->heard[peer] < kPatience) continue;
    Feed([&](Effects& effects) { machine_->OnUnreachable(peer, "no sign of life", effects); });
  }
  Later(telling_->pause, [this, step = telling_->step, generation = telling_->generation] {
    if (telling_ && telling_->step == step && telling_->generation == generation) Tell();
  });
  telling_->pause = std::min<Time>(telling_->pause * 2, kLongestPause);
}

void Daemon::On(const Message& message, const PrepareCall& call) {
  if (call.generation <= disk_.generation || call.generation < disk_.promised) {
    return ReplyStatus(message, absl::AbortedError("promised more"));
  }
  if (!usable() && !call.reinitialize) return ReplyStatus(message, NoState());
  Answer answer;
  if (machine_ != nullptr && bug_ == Bug::kBrokenPromise) {
    answer.votes = machine_->VotesOf(machine_->next_step());
  } else if (machine_ != nullptr) {
    const auto promise = machine_->OnPrepare(call.generation);
    if (!promise.ok()) {
      return checker_.Violation(absl::StrFormat("daemon %d: %s", id_, promise.status().ToString()));
    }
    answer.votes = promise->votes;
  }
  disk_.promised = call.generation;
  checker_.OnPromise(id_, call.generation);
  WatchPromise();
  Reply(message, std::move(answer));
}

// As Run::WatchPromise: raises the generation itself when nobody else does.
void Daemon::WatchPromise() {
  const Time turn = kTakeUp * id_ / world_.scenario().model.daemons;
  Later(kTakeUp + turn, [this, promised = disk_.promised] {
    if (!usable() || disk_.promised != promised || promised <= disk_.generation) return;
    if (raiser_->active()) return WatchPromise();
    ++checker_.coverage.taken_up;
    raiser_->Start(disk_.generation, false, 0, false, [this](const absl::Status& status) {
      for (const Message& waiting : raise_calls_) ReplyStatus(waiting, status);
      raise_calls_.clear();
    });
  });
}

void Daemon::On(const Message& message, const RaiseCall& call) {
  if (call.generation > disk_.generation) {
    if (commit_open_) ++checker_.coverage.raised_during_commit;
    if (!call.reinitialize && machine_ != nullptr) {
      Feed([&](Effects& effects) {
        machine_->OnGeneration(call.generation, call.settled, effects);
      });
      if (machine_->generation() < call.generation) {
        return ReplyStatus(message, absl::AbortedError("promised more"));
      }
    } else if (call.generation < disk_.promised && bug_ != Bug::kOvertakenRaise) {
      return ReplyStatus(message, absl::AbortedError("promised more"));
    }
    ++checker_.coverage.generations;
    disk_.generation = call.generation;
    disk_.promised = call.generation;
    const bool grows = call.grow && !grown_ && machine_ != nullptr;
    if (grows && call.follow) ++checker_.coverage.followed;
    if (call.reinitialize) {
      ++checker_.coverage.reinitializations;
      grow_after_commit_ = false;
      grown_ = grown_ || call.grow;
      StartLineage(call.generation, call.resume_step);
    } else if (grows && commit_open_) {
      grow_after_commit_ = true;
    } else if (grows) {
      Grow();
    }
    if (usable()) checker_.OnRaised(id_, call.generation, grown_ || grow_after_commit_);
  }
  // It holds only when nothing of the old generation is under way.
  if (commit_open_) return ReplyStatus(message, absl::UnavailableError("committing"));
  ReplyStatus(message, absl::OkStatus());
}

void Daemon::On(const Message& message, const Answer& answer) {
  raiser_->OnAnswer(message);
  if (answer.status.ok() && telling_ && message.call <= calls_) {
    telling_->heard[message.from] = world_.now();
  }
  // Those of a promise are for the raiser alone.
  if (usable() && !grow_after_commit_ && message.call <= calls_) Hear(answer.votes);
}

}  // namespace muond::simulation
