// How threads that move gigabytes leave room for small calls.
//
// A kernel lets a thread finish its turn before one that has just become ready: a turn is a few
// milliseconds where all cores copy, and a small call takes several. Linux lets a thread that asks
// for longer turns (sched_setattr, the slice of EEVDF, from 6.12 on) be interrupted by all that did
// not ask: its share of the processor stays the same, small calls wait no more.
#pragma once

#include <cstdint>

namespace muond {

// While it lives, this thread takes long turns. Does nothing on kernels without them, and for a
// thread whose owner has chosen another policy. For the thread that made it.
class LongTurns {
 public:
  LongTurns();
  ~LongTurns();
  LongTurns(const LongTurns&) = delete;
  LongTurns& operator=(const LongTurns&) = delete;

 private:
  bool asked_ = false;
  std::uint64_t before_ns_ = 0;  // its turn
};

}  // namespace muond
