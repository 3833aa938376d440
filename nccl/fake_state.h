// What the fake's two halves share: communicators, streams and the faults of a test.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl/fake.h"
#include "proto/mutex.h"

namespace muond::nccl {

// A seat in a communicator.
struct Communicator {
  std::string key;   // of the id
  int rank = 0;
  std::string uuid;  // of its GPU
  int polls = 0;     // ncclInProgress, that often yet
  Result error = Result::kSuccess;
  std::string words;
  bool aborted = false;
  std::thread::id thread;  // that uses it
};

namespace fake {
struct Op {
  Communicator* comm = nullptr;
  bool send = false;
  char* data = nullptr;
  std::size_t bytes = 0;
  bool done = false;
};

// What a stream does one after the other: the ops of a group, all at once, or a copy.
struct Work {
  std::vector<Op> ops;
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

struct FakeStream {
  std::string uuid;
  std::deque<Work> queue;
  std::uint64_t given = 0, done = 0;  // works
};

struct FakeEvent {
  FakeStream* stream = nullptr;
  std::uint64_t after = 0;
};

struct State {
  Mutex mutex;
  CondVar changed;
  Faults faults MUOND_GUARDED_BY(mutex);
  Counts counts MUOND_GUARDED_BY(mutex);
  std::vector<std::string> violations MUOND_GUARDED_BY(mutex);
  std::set<Communicator*> comms MUOND_GUARDED_BY(mutex);
  std::set<FakeStream*> streams MUOND_GUARDED_BY(mutex);
  std::uint64_t ids MUOND_GUARDED_BY(mutex) = 0;
  std::map<void*, std::size_t> memory MUOND_GUARDED_BY(mutex);
};

State& The();

// The device that MakeCurrent has made this thread's.
std::string& CurrentDevice();

void Violated(State& state, const std::string& words) MUOND_REQUIRES(state.mutex);
// Does all that can be done.
void Pump(State& state) MUOND_REQUIRES(state.mutex);

}  // namespace fake
}  // namespace muond::nccl
