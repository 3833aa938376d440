#include "client/cpp/arena_push.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "client/cpp/arena.h"
#include "client/cpp/call_scope.h"
#include "grpcpp/client_context.h"
#include "proto/convert.h"
#include "proto/crc32c.h"
#include "proto/grpc_deadline.h"
#include "proto/long_turns.h"
#include "proto/mutex.h"
#include "proto/status.h"
#include "proto/steady_time.h"

namespace muond::client {
namespace {

constexpr std::int64_t kAlignment = 64;  // of a region
// Elements are copied and summed while they are in the processor's cache.
constexpr std::int64_t kRegionBytes = std::int64_t{128} << 10;
// Of one fill: bounds its message, whatever the slices.
constexpr int kRegionsMax = 4096;
// Between looks at whether the stream still lives, while the daemon drains.
constexpr absl::Duration kLook = absl::Milliseconds(20);

// A stream of small messages that other threads wait on. It may end at any moment, and says so.
template <typename Message>
class Stream final : public grpc::ClientWriteReactor<Message> {
 public:
  // After the call was prepared with this reactor.
  void Begin() {
    this->AddHold();  // for the writes that come from outside of reactions
    this->StartCall();
  }

  // Waits until the message before is on its way. False: the stream has ended.
  bool Write(Message message) {
    MutexLock lock(mutex_);
    changed_.wait(lock, [this]() MUOND_REQUIRES(mutex_) { return !writing_; });
    if (broken_) return false;
    writing_ = true;
    message_ = std::move(message);
    lock.unlock();
    this->StartWrite(&message_);
    return true;
  }

  bool ended() {
    MutexLock lock(mutex_);
    return broken_ || ending_ || done_;
  }

  // No more messages; returns the daemon's answer.
  grpc::Status Finish() {
    MutexLock lock(mutex_);
    changed_.wait(lock, [this]() MUOND_REQUIRES(mutex_) { return !writing_; });
    const bool broken = broken_;
    lock.unlock();
    if (!broken) this->StartWritesDone();
    this->RemoveHold();
    lock.lock();
    changed_.wait(lock, [this]() MUOND_REQUIRES(mutex_) { return done_; });
    return status_;
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    broken_ = broken_ || !ok;
    changed_.notify_all();
  }
  // The daemon sends them with its answer, so there is one. OnDone would not tell before the hold
  // is given back, nor a write as long as none is made.
  void OnReadInitialMetadataDone(bool) override {
    MutexLock lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  void OnDone(const grpc::Status& status) override {
    // Under the lock to the end: whoever waits destroys this right after.
    MutexLock lock(mutex_);
    status_ = status;
    done_ = true;
    changed_.notify_all();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  Message message_;
  bool writing_ MUOND_GUARDED_BY(mutex_) = false;
  bool broken_ MUOND_GUARDED_BY(mutex_) = false;
  bool ending_ MUOND_GUARDED_BY(mutex_) = false;
  bool done_ MUOND_GUARDED_BY(mutex_) = false;
  grpc::Status status_ MUOND_GUARDED_BY(mutex_);
};

// Puts slices into windows and sends a message for each that is full.
template <typename Message>
class Filler {
 public:
  Filler(const PushJob& job, const Message& head, absl::Time deadline, Stream<Message>& stream)
      : job_(job), arena_(*job.arena), deadline_(deadline), stream_(stream), message_(head) {}

  // False: the stream has ended.
  bool Put(const SlicePart& part) {
    const SliceSource& source = *part.source;
    const auto size = static_cast<std::int64_t>(DtypeBytes(source.dtype));
    // A region lies in one window, which may be a small one.
    const std::int64_t most =
        std::min({kRegionBytes, job_.chunk_bytes, arena_.window_bytes()}) / size;
    for (const ElementRange& range : part.ranges) {
      const std::int64_t end = range.first + range.count;
      for (std::int64_t at = range.first; at < end;) {
        const std::int64_t room = Room();
        if (room < 0) return false;
        if (room < std::min(most, end - at) * size ||
            message_.fill().chunks_size() == kRegionsMax) {
          if (!Send()) return false;
          continue;
        }
        const std::int64_t count = std::min(most, end - at);
        PutRegion(source, at, count, count * size);
        at += count;
      }
    }
    return true;
  }

  // Sends what is there; the first message always, so that the daemon learns who opened the stream.
  bool End() { return first_ || message_.has_fill() ? Send() : true; }

 private:
  // Of the window in hand, once the daemon has drained it; negative: it never will.
  std::int64_t Room() {
    if (!ready_) {
      if (!WaitDrained()) return -1;
      ready_ = true;
      used_ = 0;
    }
    return window().place.bytes() - used_;
  }

  bool WaitDrained() {
    const ArenaLink::Window& w = window();
    const ArenaMemory& memory = arena_.memory();
    // What an earlier stream put there is nobody's any more.
    if (static_cast<std::size_t>(fills_) < arena_.outgoing().size()) return true;
    for (;;) {
      const std::uint64_t drained = memory.Get(w.place.drained());
      if (drained >= static_cast<std::uint64_t>(w.sequence)) return true;
      if (stream_.ended() || SteadyNow() >= deadline_) return false;
      memory.WaitWhile(w.place.drained(), drained, kLook);
    }
  }

  void PutRegion(const SliceSource& source, std::int64_t first, std::int64_t count,
                 std::int64_t bytes) {
    const std::int64_t offset = window().place.offset() + used_;
    std::byte* const to = arena_.memory().data() + offset;
    const std::int64_t size = bytes / count;
    std::memcpy(to, static_cast<const std::byte*>(source.data) + first * size,
                static_cast<std::size_t>(bytes));
    v1::Chunk* chunk = message_.mutable_fill()->add_chunks();
    chunk->set_parameter(source.parameter);
    chunk->set_slice(source.slice);
    chunk->set_micro_batch(source.micro_batch);
    chunk->set_dtype(ToProto(source.dtype));
    chunk->set_offset(first);
    // Of the copy: it is in the cache, and it is what the daemon sees.
    chunk->set_crc32c(Crc32c(to, static_cast<std::size_t>(bytes)));
    chunk->mutable_region()->set_offset(offset);
    chunk->mutable_region()->set_bytes(bytes);
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  bool Send() {
    if (stream_.ended()) return false;
    if (message_.has_fill()) {
      ArenaLink::Window& w = window();
      message_.mutable_fill()->set_arena(arena_.handle());
      message_.mutable_fill()->set_window(w.index);
      message_.mutable_fill()->set_sequence(++w.sequence);
      arena_.memory().Set(w.place.filled(), static_cast<std::uint64_t>(w.sequence));
      ++fills_;
      next_ = (next_ + 1) % arena_.outgoing().size();
      ready_ = false;
    }
    first_ = false;
    return stream_.Write(std::exchange(message_, Message()));
  }

  ArenaLink::Window& window() { return arena_.outgoing()[next_]; }

  const PushJob& job_;
  ArenaLink& arena_;
  const absl::Time deadline_;
  Stream<Message>& stream_;
  Message message_;  // being put together
  bool first_ = true;
  std::size_t next_ = 0;   // window in hand
  bool ready_ = false;     // it is drained
  std::int64_t used_ = 0;  // bytes of it
  std::int64_t fills_ = 0;  // of this stream
};

template <typename Message, typename Prepare>
CallResult Send(const PushJob& job, const Message& head, absl::Time deadline, Prepare prepare) {
  const auto stub = v1::Optimizer::NewStub(job.channel);
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(deadline));
  const CallScope::Call scoped(context);
  Stream<Message> stream;
  prepare(*stub->async(), &context, &stream);
  stream.Begin();
  const LongTurns turns;
  Filler<Message> filler(job, head, deadline, stream);
  const bool sent = std::all_of(job.parts.begin(), job.parts.end(),
                                [&](const SlicePart& part) { return filler.Put(part); });
  if (sent) filler.End();
  const grpc::Status status = stream.Finish();
  if (!status.ok()) return {FromGrpc(status), PositionFrom(context)};
  return {};
}

}  // namespace

CallResult SendThroughArena(const PushJob& job, const v1::InitializeRequest& head,
                            absl::Time deadline, v1::InitializeReply* reply) {
  return Send(job, head, deadline, [reply](auto& stub, auto* context, auto* stream) {
    stub.Initialize(context, reply, stream);
  });
}

CallResult SendThroughArena(const PushJob& job, const v1::PushRequest& head, absl::Time deadline,
                            v1::PushReply* reply) {
  return Send(job, head, deadline, [reply](auto& stub, auto* context, auto* stream) {
    stub.Push(context, reply, stream);
  });
}

}  // namespace muond::client
