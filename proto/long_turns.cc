#include "proto/long_turns.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace muond {
namespace {

constexpr std::uint64_t kTurnNs = 20'000'000;

// As in linux/sched/types.h, which glibc 2.36 has no wrapper for.
struct Attributes {
  std::uint32_t size = 0;
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime = 0;  // of SCHED_OTHER: the turn, in nanoseconds; 0: the kernel's own
  std::uint64_t deadline = 0;
  std::uint64_t period = 0;
  std::uint32_t util_min = 0;
  std::uint32_t util_max = 0;
};

bool Get(Attributes& attributes) {
  return syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0u) == 0;
}

bool SetTurn(const Attributes& of, std::uint64_t turn_ns) {
  const Attributes asked{.size = sizeof(asked), .nice = of.nice, .runtime = turn_ns};
  return syscall(SYS_sched_setattr, 0, &asked, 0u) == 0;
}

}  // namespace

LongTurns::LongTurns() {
  Attributes now;
  if (!Get(now) || now.policy != SCHED_OTHER || now.runtime >= kTurnNs) return;
  before_ns_ = now.runtime;
  asked_ = SetTurn(now, kTurnNs);
}

LongTurns::~LongTurns() {
  Attributes now;
  if (asked_ && Get(now)) SetTurn(now, before_ns_);
}

}  // namespace muond
