// What the fake's two halves share: communicators, streams and the faults of a test.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl/fake.h"

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
  std::mutex mutex;
  std::condition_variable changed;
  Faults faults;
  Counts counts;
  std::vector<std::string> violations;
  std::set<Communicator*> comms;
  std::set<FakeStream*> streams;
  std::uint64_t ids = 0;
  std::map<void*, std::size_t> memory;
};

State& The();

// The device that MakeCurrent has made this thread's.
std::string& CurrentDevice();

// The lock is held, here and below.
void Violated(State& state, const std::string& words);
// Does all that can be done.
void Pump(State& state);

}  // namespace fake
}  // namespace muond::nccl
