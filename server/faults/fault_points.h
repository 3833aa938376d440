// The named fault-injection points, all declared here: where each one fires and what it simulates.
// Off in production; tests and the daemon's option for faults arm them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "proto/mutex.h"

namespace muond {

enum class FaultPoint : std::uint8_t {
  kDropFinishReply,
  kDropPushReply,
  kDropPullReply,
  kFailReduce,
  kFailCommit,
  kKernelTrap,
  kNewtonSchulzFastPathNan,
  kNewtonSchulzFallbackNan,
  kMomentumNan,
  kDelayCommit,
  kStopInReduce,
  kStopInCommit,
  kStopBeforeFinishReply,
  kCount,
};

struct FaultPointInfo {
  FaultPoint point;
  const char* name;       // in specs, logs and documents
  const char* where;      // the place in the code that asks
  const char* simulates;  // the fault that the place then pretends
};

// The declaration table, in the order of the enum.
const std::array<FaultPointInfo, static_cast<std::size_t>(FaultPoint::kCount)>& FaultPoints();

// Decides when a point fires. Thread-safe. Disarmed (the default), asking costs one relaxed atomic
// load.
class FaultInjector {
 public:
  static constexpr std::int64_t kForever = 0;

  FaultInjector() = default;
  FaultInjector(const FaultInjector&) = delete;
  FaultInjector& operator=(const FaultInjector&) = delete;

  // Lets `after` questions pass, then answers the next `count` with yes (kForever: all of them). A
  // point that is armed already starts over. Both must be >= 0 (checked).
  void Arm(FaultPoint point, std::int64_t after = 0, std::int64_t count = 1);

  // Arms what `spec` says: "name[:after[:count]],...", e.g. "fail_commit:2,momentum_nan:0:3"; an
  // empty spec arms nothing. INVALID_ARGUMENT that names the unknown point and the known ones, or
  // the number that can't be read; nothing is armed then.
  absl::Status ArmFromSpec(const std::string& spec);

  void Disarm();

  // True: behave as the table says. Call once per event that could fail.
  bool Fire(FaultPoint point) {
    return (armed_.load(std::memory_order_relaxed) & Bit(point)) != 0 && FireArmed(point);
  }

  // Where the point fires, the process stops, as by SIGSTOP, until somebody continues or kills it:
  // a test of several processes then knows exactly where this one stands.
  void StopHere(FaultPoint point);

  // How often the point fired since the injector was made.
  std::int64_t fired(FaultPoint point) const;

 private:
  struct Plan {
    std::int64_t after = 0;  // questions still to pass
    std::int64_t left = 0;   // times still to fire
    bool forever = false;
    std::int64_t fired = 0;
  };
  static std::uint32_t Bit(FaultPoint point) { return 1u << static_cast<unsigned>(point); }
  bool FireArmed(FaultPoint point);

  std::atomic<std::uint32_t> armed_{0};  // one bit per point
  mutable Mutex mutex_;
  std::array<Plan, static_cast<std::size_t>(FaultPoint::kCount)> plans_ MUOND_GUARDED_BY(mutex_);
};

}  // namespace muond
