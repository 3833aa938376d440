#include "nccl/link.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "nccl/library.h"
#include "proto/check.h"
#include "proto/mutex.h"
#include "proto/steady_time.h"

namespace muond::nccl {
namespace {

// Between two looks at what is under way: short beside an exchange, long beside a look.
constexpr auto kLook = std::chrono::microseconds(20);
constexpr auto kAbortsWait = std::chrono::seconds(10);
constexpr int kRanks = 2;

}  // namespace

// What a link's owner and the worker's thread both see.
struct Link::Shared {
  enum class Phase { kNew, kConnecting, kIdle, kEnqueueing, kBroken };

  mutable Mutex mutex;
  std::deque<Exchange> posted MUOND_GUARDED_BY(mutex);
  std::optional<absl::Status> abort MUOND_GUARDED_BY(mutex);  // somebody wants it broken
  absl::Status status MUOND_GUARDED_BY(mutex);
  std::weak_ptr<Worker::State> worker;

  // Of the worker's thread alone.
  Phase phase = Phase::kNew;
  UniqueId id{};
  int rank = 0;
  absl::Time connect_by;
  Done ready;
  Communicator* comm = nullptr;
  Stream stream = nullptr;
  struct Started {
    Exchange exchange;
    Event event = nullptr;
  };
  std::deque<Started> started;
};

struct Worker::State : std::enable_shared_from_this<Worker::State> {
  using Phase = Link::Shared::Phase;
  using Shared = std::shared_ptr<Link::Shared>;

  State(const Api& functions, std::shared_ptr<Device> gpu)
      : api(functions), device(std::move(gpu)) {}

  void Run();
  bool Step(const Shared& link);
  bool Begin(const Shared& link);
  bool PollConnecting(const Shared& link);
  bool PollEnqueueing(const Shared& link);
  bool Start(const Shared& link);
  bool Issue(Link::Shared& link, const Exchange& exchange, absl::Status& failure);
  bool PollStarted(const Shared& link);
  void Break(const Shared& link, const absl::Status& why);
  absl::Status Failure(Link::Shared& link, const char* action, Result result) const;
  void Wake() {
    MutexLock lock(mutex);
    woken = true;
    changed.notify_all();
  }

  const Api api;
  const std::shared_ptr<Device> device;
  Mutex mutex;
  CondVar changed;
  std::vector<Shared> added MUOND_GUARDED_BY(mutex);
  bool woken MUOND_GUARDED_BY(mutex) = false;
  bool stopping MUOND_GUARDED_BY(mutex) = false;
  int aborts MUOND_GUARDED_BY(mutex) = 0;  // under way

  std::vector<Shared> links;  // of the thread alone
};

Link::~Link() { Abort(absl::CancelledError("NCCL: the link was closed")); }

absl::Status Link::Post(Exchange exchange) {
  {
    MutexLock lock(shared_->mutex);
    if (!shared_->status.ok()) return shared_->status;
    if (shared_->abort) return *shared_->abort;
    shared_->posted.push_back(std::move(exchange));
  }
  if (const auto worker = shared_->worker.lock()) worker->Wake();
  return absl::OkStatus();
}

void Link::Abort(const absl::Status& why) {
  {
    MutexLock lock(shared_->mutex);
    if (shared_->abort || !shared_->status.ok()) return;
    shared_->abort = why;
  }
  if (const auto worker = shared_->worker.lock()) worker->Wake();
}

absl::Status Link::status() const {
  MutexLock lock(shared_->mutex);
  return shared_->status.ok() && shared_->abort ? *shared_->abort : shared_->status;
}

Worker::Worker(const Api& api, std::shared_ptr<Device> device)
    : device_(device), state_(std::make_shared<State>(api, std::move(device))) {
  thread_ = std::thread([state = state_] { state->Run(); });
}

Worker::~Worker() {
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_all();
  }
  // A callback may have held what held this.
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
    return;
  }
  thread_.join();
  MutexLock lock(state_->mutex);
  state_->changed.wait_for(lock, kAbortsWait,
                           [&]() MUOND_REQUIRES(state_->mutex) { return state_->aborts == 0; });
}

const Api& Worker::api() const { return state_->api; }

std::shared_ptr<Link> Worker::Connect(const UniqueId& id, int rank, absl::Time deadline,
                                      Done ready) {
  auto shared = std::make_shared<Link::Shared>();
  shared->worker = state_;
  shared->id = id;
  shared->rank = rank;
  shared->connect_by = deadline;
  shared->ready = std::move(ready);
  {
    MutexLock lock(state_->mutex);
    state_->added.push_back(shared);
    state_->woken = true;
    state_->changed.notify_all();
  }
  return std::shared_ptr<Link>(new Link(std::move(shared)));
}

void Worker::State::Run() {
  const absl::Status current = device->MakeCurrent();
  for (;;) {
    bool stop = false;
    {
      MutexLock lock(mutex);
      for (Shared& link : added) links.push_back(std::move(link));
      added.clear();
      woken = false;
      stop = stopping;
    }
    bool busy = false;
    const std::vector<Shared> all = links;  // a step may end a link
    for (const Shared& link : all) {
      if (stop || !current.ok()) {
        Break(link, stop ? absl::CancelledError("NCCL: the device's thread has ended") : current);
      } else {
        busy = Step(link) || busy;
      }
    }
    if (stop) return;
    MutexLock lock(mutex);
    const auto wake = [this]() MUOND_REQUIRES(mutex) { return woken || stopping; };
    if (busy) {
      changed.wait_for(lock, kLook, wake);
    } else {
      changed.wait(lock, wake);
    }
  }
}

// Whether the link must be looked at again soon.
bool Worker::State::Step(const Shared& link) {
  std::optional<absl::Status> abort;
  {
    MutexLock lock(link->mutex);
    abort = link->abort;
  }
  if (abort) {
    Break(link, *abort);
    return false;
  }
  switch (link->phase) {
    case Phase::kNew:
      return Begin(link);
    case Phase::kConnecting:
      return PollConnecting(link);
    case Phase::kEnqueueing:
      return PollEnqueueing(link);
    case Phase::kIdle:
      return PollStarted(link) && Start(link);
    case Phase::kBroken:
      break;
  }
  return false;
}

bool Worker::State::Begin(const Shared& link) {
  auto stream = device->NewStream();
  if (!stream.ok()) {
    Break(link, stream.status());
    return false;
  }
  link->stream = *stream;
  Config config;
  config.blocking = 0;
  const Result result =
      api.comm_init_rank_config(&link->comm, kRanks, link->id, link->rank, &config);
  std::memset(&link->id, 0, sizeof(link->id));
  if (result != Result::kSuccess && result != Result::kInProgress) {
    Break(link, Failure(*link, "connect", result));
    return false;
  }
  link->phase = Phase::kConnecting;
  return true;
}

bool Worker::State::PollConnecting(const Shared& link) {
  Result error = Result::kSuccess;
  const Result asked = api.comm_get_async_error(link->comm, &error);
  if (asked != Result::kSuccess) error = asked;
  if (error == Result::kInProgress) {
    if (SteadyNow() < link->connect_by) return true;
    Break(link, absl::DeadlineExceededError("NCCL: connect: the other rank did not come in time"));
    return false;
  }
  if (error != Result::kSuccess) {
    Break(link, Failure(*link, "connect", error));
    return false;
  }
  link->phase = Phase::kIdle;
  if (const Done ready = std::exchange(link->ready, nullptr)) ready(absl::OkStatus());
  return true;
}

// Gives everything that was posted to NCCL, until one exchange takes its time.
bool Worker::State::Start(const Shared& link) {
  for (;;) {
    Link::Shared::Started next;
    {
      MutexLock lock(link->mutex);
      if (link->posted.empty()) return !link->started.empty();
      next.exchange = std::move(link->posted.front());
      link->posted.pop_front();
    }
    link->started.push_back(std::move(next));
    absl::Status failure;
    const bool enqueued = Issue(*link, link->started.back().exchange, failure);
    if (!failure.ok()) {
      Break(link, failure);
      return false;
    }
    if (!enqueued) {
      link->phase = Phase::kEnqueueing;
      return true;
    }
    if (!PollEnqueueing(link)) return false;
  }
}

// False: NCCL is still at it.
bool Worker::State::Issue(Link::Shared& link, const Exchange& exchange, absl::Status& failure) {
  for (Stream after : exchange.after) {
    failure = device->Order(link.stream, after);
    if (!failure.ok()) return false;
  }
  for (const DeviceCopy& copy : exchange.copies) {
    failure = device->Copy(copy.to, copy.from, copy.bytes, link.stream);
    if (!failure.ok()) return false;
  }
  const int peer = 1 - link.rank;
  Result worst = api.group_start();
  const auto note = [&worst](Result result) {
    if (worst == Result::kSuccess || worst == Result::kInProgress) worst = result;
  };
  for (const auto& [data, bytes] : exchange.sends) {
    if (bytes > 0) note(api.send(data, bytes, kByte, peer, link.comm, link.stream));
  }
  for (const auto& [data, bytes] : exchange.receives) {
    if (bytes > 0) note(api.recv(data, bytes, kByte, peer, link.comm, link.stream));
  }
  note(api.group_end());
  if (worst == Result::kSuccess) return true;
  if (worst != Result::kInProgress) failure = Failure(link, "exchange", worst);
  return false;
}

// The newest exchange is NCCL's: notes an event behind it.
bool Worker::State::PollEnqueueing(const Shared& link) {
  Link::Shared::Started& newest = link->started.back();
  Result error = Result::kSuccess;
  const Result asked = api.comm_get_async_error(link->comm, &error);
  if (asked != Result::kSuccess) error = asked;
  if (error == Result::kInProgress) {
    link->phase = Phase::kEnqueueing;
    if (SteadyNow() < newest.exchange.deadline) return true;
    Break(link, absl::DeadlineExceededError("NCCL: exchange: the peer did not answer in time"));
    return false;
  }
  if (error != Result::kSuccess) {
    Break(link, Failure(*link, "exchange", error));
    return false;
  }
  auto event = device->Record(link->stream);
  if (!event.ok()) {
    Break(link, event.status());
    return false;
  }
  newest.event = *event;
  link->phase = Phase::kIdle;
  return true;
}

// Ends what is done, in order. False: the link broke.
bool Worker::State::PollStarted(const Shared& link) {
  while (!link->started.empty()) {
    Link::Shared::Started& oldest = link->started.front();
    const auto done = device->Done(oldest.event);
    if (!done.ok()) {
      Break(link, done.status());
      return false;
    }
    if (!*done) break;
    device->FreeEvent(oldest.event);
    const Link::Shared::Started ended = std::move(oldest);
    link->started.pop_front();
    ended.exchange.done(absl::OkStatus());
  }
  Result error = Result::kSuccess;
  const Result asked = api.comm_get_async_error(link->comm, &error);
  if (asked != Result::kSuccess) error = asked;
  if (error != Result::kSuccess && error != Result::kInProgress) {
    Break(link, Failure(*link, "exchange", error));
    return false;
  }
  if (!link->started.empty() && SteadyNow() >= link->started.front().exchange.deadline) {
    Break(link, absl::DeadlineExceededError(
                    "NCCL: exchange: the peer did not do its part in time"));
    return false;
  }
  return true;
}

void Worker::State::Break(const Shared& link, const absl::Status& why) {
  if (link->phase == Phase::kBroken) return;
  link->phase = Phase::kBroken;
  links.erase(std::remove(links.begin(), links.end(), link), links.end());
  {
    MutexLock lock(link->mutex);
    link->status = why;
    for (Exchange& exchange : link->posted) link->started.push_back({std::move(exchange), nullptr});
    link->posted.clear();
  }
  {
    MutexLock lock(mutex);
    ++aborts;
  }
  // May block, and the other links' thread must not.
  std::thread([self = shared_from_this(), link, why] {
    self->device->MakeCurrent().IgnoreError();
    if (link->comm != nullptr) self->api.comm_abort(link->comm);
    for (const Link::Shared::Started& started : link->started) {
      if (started.event != nullptr) self->device->FreeEvent(started.event);
    }
    if (link->stream != nullptr) self->device->FreeStream(link->stream);
    if (const Done ready = std::exchange(link->ready, nullptr)) ready(why);
    for (const Link::Shared::Started& started : link->started) started.exchange.done(why);
    link->started.clear();
    MutexLock lock(self->mutex);
    --self->aborts;
    self->changed.notify_all();
  }).detach();
}

absl::Status Worker::State::Failure(Link::Shared& link, const char* action, Result result) const {
  const char* const words = api.get_last_error(link.comm);
  const std::string more = words != nullptr && *words != '\0' ? absl::StrFormat(": %s", words) : "";
  const std::string message =
      absl::StrFormat("NCCL: %s: %s%s", action, ResultName(result), more);
  // What another link may mend, and what it will not.
  if (result == Result::kInvalidUsage || result == Result::kInvalidArgument) {
    return absl::FailedPreconditionError(message);
  }
  return absl::UnavailableError(message);
}

}  // namespace muond::nccl
