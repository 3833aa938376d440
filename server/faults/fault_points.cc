#include "server/faults/fault_points.h"

#include <signal.h>

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "proto/check.h"

namespace muond {
namespace {

struct Arming {
  FaultPoint point = FaultPoint::kCount;
  std::int64_t after = 0;
  std::int64_t count = 1;
};

std::string KnownNames() {
  return absl::StrJoin(FaultPoints(), ", ", [](std::string* out, const FaultPointInfo& info) {
    out->append(info.name);
  });
}

// Reads parts[index] into `value`, if it is there.
absl::Status ReadCount(const std::vector<std::string>& parts, std::size_t index, const char* what,
                       std::int64_t& value) {
  if (index >= parts.size()) return absl::OkStatus();
  if (absl::SimpleAtoi(parts[index], &value) && value >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "fault point \"%s\": field \"%s\": expected a number of 0 or more, got \"%s\"", parts[0],
      what, parts[index]));
}

absl::Status ReadArming(const std::string& text, Arming& arming) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  for (const FaultPointInfo& info : FaultPoints()) {
    if (parts[0] == info.name) arming.point = info.point;
  }
  if (arming.point == FaultPoint::kCount) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "fault point \"%s\": no such point; there are: %s", parts[0], KnownNames()));
  }
  if (parts.size() > 3) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "fault point \"%s\": expected name[:after[:count]], got \"%s\"", parts[0], text));
  }
  MUOND_RETURN_IF_ERROR(ReadCount(parts, 1, "after", arming.after));
  return ReadCount(parts, 2, "count", arming.count);
}

}  // namespace

const std::array<FaultPointInfo, static_cast<std::size_t>(FaultPoint::kCount)>& FaultPoints() {
  static constexpr std::array<FaultPointInfo, static_cast<std::size_t>(FaultPoint::kCount)> kTable{{
      {FaultPoint::kDropFinishReply, "drop_finish_reply", "rpc: before a Finish call is answered",
       "the connection breaks after the step, the reply is lost: UNAVAILABLE"},
      {FaultPoint::kDropPushReply, "drop_push_reply", "rpc: before a Push stream is answered",
       "the connection breaks after the slices arrived, the reply is lost: UNAVAILABLE"},
      {FaultPoint::kDropPullReply, "drop_pull_reply",
       "rpc: before an Exchange that only pulls is answered",
       "the connection breaks with the parameters on their way, the reply is lost: UNAVAILABLE"},
      {FaultPoint::kFailReduce, "fail_reduce", "engine: start of a reduction",
       "no memory or no device for summing a gradient; no state was touched"},
      {FaultPoint::kFailCommit, "fail_commit", "engine: middle of a commit",
       "the device fails with some parameters applied and some not"},
      {FaultPoint::kKernelTrap, "kernel_trap", "engine: middle of a commit",
       "a kernel traps with some parameters applied and some not: the device is lost"},
      {FaultPoint::kNewtonSchulzFastPathNan, "newton_schulz_fast_path_nan",
       "engine: after the fast path of one matrix",
       "a broken 16-bit product: one NaN in O, to be redone by the fp32 path"},
      {FaultPoint::kNewtonSchulzFallbackNan, "newton_schulz_fallback_nan",
       "engine: after the fp32 path of one matrix",
       "broken hardware: one NaN in O again, the run must fail"},
      {FaultPoint::kMomentumNan, "momentum_nan", "engine: after a commit",
       "a flipped bit: one NaN in the first momentum, for alerts"},
      {FaultPoint::kDelayCommit, "delay_commit", "engine: before a commit",
       "a slow device: the commit waits for one second"},
      {FaultPoint::kStopInReduce, "stop_in_reduce", "engine: start of a reduction",
       "the process stops (SIGSTOP) before this daemon has voted on the step"},
      {FaultPoint::kStopInCommit, "stop_in_commit", "engine: middle of a commit",
       "the process stops (SIGSTOP) with some parameters applied and some not"},
      {FaultPoint::kStopBeforeFinishReply, "stop_before_finish_reply",
       "rpc: before a Finish call is answered",
       "the process stops (SIGSTOP) after the step, its reply is not out"},
  }};
  return kTable;
}

void FaultInjector::Arm(FaultPoint point, std::int64_t after, std::int64_t count) {
  MUOND_CHECK(point < FaultPoint::kCount && after >= 0 && count >= 0, "arming is well-formed");
  MutexLock lock(mutex_);
  Plan& plan = plans_[static_cast<std::size_t>(point)];
  plan = Plan{after, count, count == kForever, plan.fired};
  armed_.fetch_or(Bit(point), std::memory_order_relaxed);
}

absl::Status FaultInjector::ArmFromSpec(const std::string& spec) {
  std::vector<Arming> armings;
  const std::vector<std::string> texts = absl::StrSplit(spec, ',', absl::SkipWhitespace());
  for (const std::string& text : texts) {
    MUOND_RETURN_IF_ERROR(ReadArming(text, armings.emplace_back()));
  }
  for (const Arming& arming : armings) Arm(arming.point, arming.after, arming.count);
  return absl::OkStatus();
}

void FaultInjector::Disarm() {
  MutexLock lock(mutex_);
  armed_.store(0, std::memory_order_relaxed);
}

bool FaultInjector::FireArmed(FaultPoint point) {
  MutexLock lock(mutex_);
  // Another thread may have used up the plan since the caller looked.
  if ((armed_.load(std::memory_order_relaxed) & Bit(point)) == 0) return false;
  Plan& plan = plans_[static_cast<std::size_t>(point)];
  if (plan.after > 0) {
    --plan.after;
    return false;
  }
  ++plan.fired;
  if (!plan.forever && --plan.left == 0) {
    armed_.fetch_and(~Bit(point), std::memory_order_relaxed);
  }
  return true;
}

void FaultInjector::StopHere(FaultPoint point) {
  if (Fire(point)) raise(SIGSTOP);
}

std::int64_t FaultInjector::fired(FaultPoint point) const {
  MutexLock lock(mutex_);
  return plans_[static_cast<std::size_t>(point)].fired;
}

}  // namespace muond
