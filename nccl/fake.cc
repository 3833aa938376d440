#include <algorithm>
#include <chrono>
#include <cstring>

#include "absl/strings/str_format.h"
#include "nccl/fake_state.h"

namespace muond::nccl::fake {

State& The() {
  static auto* const state = new State();
  return *state;
}

std::string& CurrentDevice() {
  thread_local std::string device;
  return device;
}

void Violated(State& state, const std::string& words) {
  auto& all = state.violations;
  if (std::find(all.begin(), all.end(), words) == all.end()) all.push_back(words);
}

namespace {

thread_local bool in_group = false;
thread_local std::vector<std::pair<FakeStream*, Op>> group;

bool Silent(const State& state, const std::string& uuid) MUOND_REQUIRES(state.mutex) {
  return !state.faults.silent.empty() && state.faults.silent == uuid;
}

Communicator* PeerOf(const State& state, const Communicator& comm) MUOND_REQUIRES(state.mutex) {
  for (Communicator* other : state.comms) {
    if (other->key == comm.key && other->rank != comm.rank) return other;
  }
  return nullptr;
}

// The first op of that kind that is not done, of a communicator, among the works in front.
Op* Front(State& state, const Communicator* comm, bool send) MUOND_REQUIRES(state.mutex) {
  for (FakeStream* stream : state.streams) {
    if (stream->queue.empty()) continue;
    for (Op& op : stream->queue.front().ops) {
      if (op.comm == comm && op.send == send && !op.done) return &op;
    }
  }
  return nullptr;
}

bool Match(State& state, Op& op) MUOND_REQUIRES(state.mutex) {
  if (op.done || op.comm->aborted || Silent(state, op.comm->uuid)) return false;
  Communicator* const peer = PeerOf(state, *op.comm);
  if (peer == nullptr || peer->aborted || Silent(state, peer->uuid)) return false;
  if (Front(state, op.comm, op.send) != &op) return false;
  Op* const other = Front(state, peer, !op.send);
  if (other == nullptr) return false;
  if (other->bytes != op.bytes) {
    Violated(state, absl::StrFormat("a send and its receive differ in size: %d and %d", op.bytes,
                                    other->bytes));
    return false;
  }
  const Op& from = op.send ? op : *other;
  const Op& to = op.send ? *other : op;
  if (!state.faults.move_nothing) std::memcpy(to.data, from.data, op.bytes);
  if (std::exchange(state.faults.flip_bit, false)) to.data[0] = static_cast<char>(to.data[0] ^ 1);
  ++state.counts.sends;
  state.counts.bytes += static_cast<std::int64_t>(op.bytes);
  op.done = other->done = true;
  return true;
}

}  // namespace

void Pump(State& state) {
  for (bool moved = true; moved;) {
    moved = false;
    for (FakeStream* stream : state.streams) {
      while (!stream->queue.empty()) {
        Work& work = stream->queue.front();
        for (Op& op : work.ops) moved = Match(state, op) || moved;
        if (!std::all_of(work.ops.begin(), work.ops.end(), [](const Op& op) { return op.done; })) {
          break;
        }
        if (work.bytes > 0) std::memcpy(work.to, work.from, work.bytes);
        stream->queue.pop_front();
        ++stream->done;
        moved = true;
      }
    }
  }
}

namespace {

// Called at the start of each NCCL call about a communicator.
void Used(State& state, Communicator* comm, const char* what) MUOND_REQUIRES(state.mutex) {
  if (state.comms.count(comm) == 0) return Violated(state, std::string(what) + ": none such");
  if (comm->thread != std::this_thread::get_id()) {
    Violated(state, absl::StrFormat("%s: on another thread than the communicator's", what));
  }
  if (comm->uuid != CurrentDevice()) Violated(state, absl::StrFormat("%s: another device", what));
}

Result GetVersion(int* version) {
  *version = TheLibrary().version;
  return Result::kSuccess;
}

Result GetUniqueId(UniqueId* id) {
  State& state = The();
  MutexLock lock(state.mutex);
  std::memset(id->bytes, 0, sizeof(id->bytes));
  const std::string text = absl::StrFormat("fake-%d", ++state.ids);
  std::memcpy(id->bytes, text.data(), text.size());
  return Result::kSuccess;
}

Result Init(Communicator** comm, int ranks, UniqueId id, int rank, Config* config) {
  State& state = The();
  MutexLock lock(state.mutex);
  if (config->blocking != 0) Violated(state, "a blocking communicator");
  if (ranks != 2 || rank < 0 || rank > 1) return Result::kInvalidArgument;
  auto* const made = new Communicator{.key = std::string(id.bytes, sizeof(id.bytes)),
                                      .rank = rank,
                                      .uuid = CurrentDevice(),
                                      .polls = state.faults.polls,
                                      .thread = std::this_thread::get_id()};
  state.comms.insert(made);
  ++state.counts.open_communicators;
  *comm = made;
  return Result::kInProgress;
}

Result GetAsyncError(Communicator* comm, Result* error) {
  State& state = The();
  MutexLock lock(state.mutex);
  Used(state, comm, "ncclCommGetAsyncError");
  Pump(state);
  *error = comm->error;
  if (state.faults.remote_error) *error = Result::kRemoteError;
  if (*error != Result::kSuccess) return Result::kSuccess;
  Communicator* const peer = PeerOf(state, *comm);
  const bool missing = peer == nullptr || Silent(state, comm->uuid) || Silent(state, peer->uuid);
  if (peer != nullptr && peer->uuid == comm->uuid) {
    comm->error = peer->error = *error = Result::kInvalidUsage;
    comm->words = peer->words = "Duplicate GPU detected";
  } else if (comm->polls > 0 && (--comm->polls > 0 || missing)) {
    comm->polls = std::max(comm->polls, 1);
    *error = Result::kInProgress;
  }
  return Result::kSuccess;
}

Result Abort(Communicator* comm) {
  State& state = The();
  MutexLock lock(state.mutex);
  if (comm->thread == std::this_thread::get_id()) {
    Violated(state, "ncclCommAbort: on the thread that must not block");
  }
  comm->aborted = true;
  state.changed.wait_for(lock, std::chrono::seconds(20), [&]() MUOND_REQUIRES(state.mutex) {
    return !state.faults.stuck_abort;
  });
  for (FakeStream* stream : state.streams) {
    for (Work& work : stream->queue) {
      for (Op& op : work.ops) op.done = op.done || op.comm == comm;
    }
  }
  Pump(state);
  state.comms.erase(comm);
  --state.counts.open_communicators;
  ++state.counts.aborts;
  delete comm;
  return Result::kSuccess;
}

const char* LastError(Communicator* comm) { return comm == nullptr ? "" : comm->words.c_str(); }

Result GroupStart() {
  State& state = The();
  MutexLock lock(state.mutex);
  if (in_group) Violated(state, "ncclGroupStart: inside a group");
  in_group = true;
  return Result::kSuccess;
}

Result Add(bool send, void* data, std::size_t count, int type, int peer, Communicator* comm,
           Stream stream) {
  State& state = The();
  MutexLock lock(state.mutex);
  Used(state, comm, send ? "ncclSend" : "ncclRecv");
  if (!in_group) Violated(state, "a send or receive outside of a group");
  if (count == 0) Violated(state, "a send or receive of nothing");
  if (comm->polls > 0) Violated(state, "a send or receive while another call is in progress");
  if (type != kByte || peer != 1 - comm->rank) return Result::kInvalidArgument;
  group.emplace_back(static_cast<FakeStream*>(stream),
                     Op{comm, send, static_cast<char*>(data), count, false});
  return Result::kSuccess;
}

Result Send(const void* data, std::size_t count, int type, int peer, Communicator* comm,
            Stream stream) {
  return Add(true, const_cast<void*>(data), count, type, peer, comm, stream);
}

Result Recv(void* data, std::size_t count, int type, int peer, Communicator* comm, Stream stream) {
  return Add(false, data, count, type, peer, comm, stream);
}

Result GroupEnd() {
  State& state = The();
  MutexLock lock(state.mutex);
  if (!in_group) Violated(state, "ncclGroupEnd: outside of a group");
  in_group = false;
  std::map<FakeStream*, Work> works;
  for (auto& [stream, op] : group) {
    op.comm->polls = state.faults.polls;
    works[stream].ops.push_back(op);
  }
  group.clear();
  for (auto& [stream, work] : works) {
    stream->queue.push_back(std::move(work));
    ++stream->given;
  }
  Pump(state);
  return works.empty() || state.faults.polls == 0 ? Result::kSuccess : Result::kInProgress;
}

}  // namespace

const Library& TheLibrary() {
  static const auto* const library =
      new Library{{GetVersion, GetUniqueId, Init, GetAsyncError, Abort, LastError, GroupStart,
                   GroupEnd, Send, Recv},
                  22809,
                  "fake"};
  return *library;
}

void SetFaults(const Faults& faults) {
  State& state = The();
  MutexLock lock(state.mutex);
  state.faults = faults;
  state.changed.notify_all();
}

void Reset() {
  State& state = The();
  MutexLock lock(state.mutex);
  state.faults = {};
  state.violations.clear();
  state.counts.aborts = state.counts.sends = state.counts.bytes = 0;
  state.changed.notify_all();
}

Counts Count() {
  State& state = The();
  MutexLock lock(state.mutex);
  return state.counts;
}

std::vector<std::string> Violations() {
  State& state = The();
  MutexLock lock(state.mutex);
  return state.violations;
}

}  // namespace muond::nccl::fake
