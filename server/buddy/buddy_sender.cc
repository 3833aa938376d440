#include "server/buddy/buddy_sender.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "grpcpp/grpcpp.h"
#include "proto/convert.h"
#include "proto/crc32c.h"
#include "proto/grpc_deadline.h"
#include "proto/mutex.h"
#include "proto/status.h"
#include "proto/steady_time.h"
#include "server/buddy/buddy_state.h"

namespace muond {
namespace {

constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;
constexpr absl::Duration kCallTimeout = absl::Seconds(5);
constexpr absl::Duration kPause = absl::Milliseconds(20);

void AddChunk(v1::BuddyPutRequest& request, const char* data, std::int64_t offset,
              std::int64_t bytes, v1::BuddyChunk chunk) {
  chunk.set_offset(offset);
  chunk.set_data(data + offset, static_cast<std::size_t>(bytes));
  chunk.set_crc32c(Crc32c(chunk.data().data(), chunk.data().size()));
  *request.add_chunks() = std::move(chunk);
}

v1::BuddyAttempt ToProto(const BuddyAttemptKey& key) {
  v1::BuddyAttempt message;
  message.set_step(key.step);
  message.set_generation(key.generation);
  message.set_number(key.number);
  return message;
}

}  // namespace

struct BuddySender::Work {
  std::shared_ptr<Peers> peers;
  std::int64_t steps = 0;
  Listener listener;
  std::thread thread;

  Mutex mutex;
  CondVar ready;
  v1::PeerRun introduction MUOND_GUARDED_BY(mutex);
  bool stopping MUOND_GUARDED_BY(mutex) = false;
  std::int64_t lineage MUOND_GUARDED_BY(mutex) = 0;
  std::int64_t held MUOND_GUARDED_BY(mutex) = -1;
  // Changes whenever what is being sent may have been overtaken.
  std::int64_t turn MUOND_GUARDED_BY(mutex) = 0;
  // The attempt.
  BuddyAttemptKey attempt MUOND_GUARDED_BY(mutex);
  std::deque<BuddyPiece> pieces MUOND_GUARDED_BY(mutex);
  std::int64_t piece_at MUOND_GUARDED_BY(mutex) = 0;  // byte of the first piece
  std::size_t added MUOND_GUARDED_BY(mutex) = 0;  // pieces, those sent included
  std::optional<std::vector<int>> seal MUOND_GUARDED_BY(mutex);
  absl::Time sealed_at MUOND_GUARDED_BY(mutex);
  // The snapshot.
  std::int64_t version MUOND_GUARDED_BY(mutex) = -1;
  std::shared_ptr<StateCopies> copies MUOND_GUARDED_BY(mutex);
  std::vector<TensorRef> tensors MUOND_GUARDED_BY(mutex);
  std::size_t tensor MUOND_GUARDED_BY(mutex) = 0;
  std::int64_t tensor_at MUOND_GUARDED_BY(mutex) = 0;
  bool started MUOND_GUARDED_BY(mutex) = false;
  bool wanted MUOND_GUARDED_BY(mutex) = false;

  absl::Time failing_since = absl::InfiniteFuture();  // of its thread alone
  grpc::ClientContext* call MUOND_GUARDED_BY(mutex) = nullptr;  // on its way

  enum class Kind : std::uint8_t { kNothing, kGradients, kSeal, kSnapshot, kWant };
  // What one message carries, and how far it gets things when it is answered.
  struct Message {
    Kind kind = Kind::kNothing;
    v1::BuddyPutRequest request;
    std::int64_t turn = 0;
    std::int64_t bytes = 0;
    std::size_t whole = 0;    // pieces or tensors that it ends
    std::int64_t at = 0;      // then, in the one that follows
  };

  void Loop();
  Message Next() MUOND_REQUIRES(mutex);
  bool Covered() const MUOND_REQUIRES(mutex) {
    return held >= 0 && held <= attempt.step && attempt.step - held < steps;
  }
  void FillGradients(Message& message) const MUOND_REQUIRES(mutex);
  void FillSnapshot(Message& message) const MUOND_REQUIRES(mutex);
  void Send(Message& message);
  void OnReply(const Message& message, const v1::BuddyPutReply& reply);
  void OnError(const absl::Status& status, const std::optional<v1::RunPosition>& position);
  void DropAttempt(const BuddyAttemptKey& next) MUOND_REQUIRES(mutex);
  void DropSnapshot() MUOND_REQUIRES(mutex);
  int buddy() const { return BuddyOf(peers->self(), peers->count()); }
};

BuddySender::BuddySender(std::shared_ptr<Peers> peers, std::int64_t steps, Listener listener)
    : work_(std::make_shared<Work>()) {
  work_->peers = std::move(peers);
  work_->steps = steps;
  work_->listener = std::move(listener);
  work_->thread = std::thread([work = work_] { work->Loop(); });
}

BuddySender::~BuddySender() {
  {
    MutexLock lock(work_->mutex);
    work_->stopping = true;
    if (work_->call != nullptr) work_->call->TryCancel();
  }
  work_->ready.notify_all();
  if (work_->thread.get_id() == std::this_thread::get_id()) {
    work_->thread.detach();  // a listener's call was the last to hold the run
  } else {
    work_->thread.join();
  }
}

void BuddySender::Work::DropAttempt(const BuddyAttemptKey& next) {
  if (attempt == next) return;
  pieces.clear();
  piece_at = 0;
  added = 0;
  seal.reset();
  wanted = false;
  attempt = next;
  ++turn;
}

void BuddySender::Add(const BuddyAttemptKey& attempt, BuddyPiece piece) {
  MutexLock lock(work_->mutex);
  work_->DropAttempt(attempt);
  work_->pieces.push_back(std::move(piece));
  ++work_->added;
  work_->ready.notify_all();
}

void BuddySender::Seal(const BuddyAttemptKey& attempt, std::vector<int> states) {
  MutexLock lock(work_->mutex);
  work_->DropAttempt(attempt);  // one without a gradient here may be new
  work_->seal = std::move(states);
  work_->sealed_at = SteadyNow();
  work_->ready.notify_all();
}

void BuddySender::EndAttempt() {
  MutexLock lock(work_->mutex);
  work_->DropAttempt({});
}

void BuddySender::Work::DropSnapshot() {
  copies.reset();
  tensors.clear();
  tensor = 0;
  tensor_at = 0;
  started = wanted = false;
  version = -1;
}

void BuddySender::Snapshot(std::int64_t version, std::shared_ptr<StateCopies> copies) {
  MutexLock lock(work_->mutex);
  work_->DropSnapshot();
  work_->version = version;
  work_->tensors = TensorsOf(*copies);
  work_->copies = std::move(copies);
  ++work_->turn;
  work_->ready.notify_all();
}

void BuddySender::Restart(v1::PeerRun introduction, std::int64_t lineage, std::int64_t held) {
  MutexLock lock(work_->mutex);
  work_->DropSnapshot();
  work_->DropAttempt({});
  work_->introduction = std::move(introduction);
  work_->lineage = lineage;
  work_->held = held;
  ++work_->turn;
}

// ---- On its thread ----------------------------------------------------------------------------

void BuddySender::Work::FillGradients(Message& message) const {
  message.kind = Kind::kGradients;
  *message.request.mutable_attempt() = ToProto(attempt);
  message.at = piece_at;
  for (const BuddyPiece& piece : pieces) {
    const std::int64_t bytes = std::min(piece.bytes - message.at, kChunkBytes - message.bytes);
    v1::BuddyChunk chunk;
    chunk.mutable_gradient()->set_state(piece.state);
    chunk.mutable_gradient()->set_dtype(muond::ToProto(piece.dtype));
    chunk.mutable_gradient()->set_divisor(piece.divisor);
    chunk.mutable_gradient()->set_bytes(piece.bytes);
    AddChunk(message.request, piece.data, message.at, bytes, std::move(chunk));
    message.bytes += bytes;
    message.at += bytes;
    if (message.at < piece.bytes) return;
    ++message.whole;
    message.at = 0;
    if (message.bytes >= kChunkBytes) return;
  }
}

void BuddySender::Work::FillSnapshot(Message& message) const {
  message.kind = Kind::kSnapshot;
  message.request.set_snapshot(version);
  if (!started) {
    message.request.set_start(true);
    for (const TensorRef& ref : tensors) *message.request.add_tensors() = ref.head;
  }
  message.at = tensor_at;
  for (std::size_t i = tensor; i < tensors.size(); ++i) {
    const std::int64_t all = tensors[i].bytes;
    const std::int64_t bytes = std::min(all - message.at, kChunkBytes - message.bytes);
    v1::BuddyChunk chunk;
    chunk.set_item(static_cast<std::int64_t>(i));
    AddChunk(message.request, reinterpret_cast<const char*>(tensors[i].data), message.at, bytes,
             std::move(chunk));
    message.bytes += bytes;
    message.at += bytes;
    if (message.at < all) return;
    ++message.whole;
    message.at = 0;
    if (message.bytes >= kChunkBytes) return;
  }
}

// Gradients wait for a snapshot that covers them: the buddy never has those of
// more steps than were asked for.
BuddySender::Work::Message BuddySender::Work::Next() {
  Message message{.turn = turn};
  const bool waiting = seal || !pieces.empty();
  if (!pieces.empty() && Covered()) {
    FillGradients(message);
  } else if (seal && Covered() && added == seal->size()) {  // else some are still being copied
    message.kind = Kind::kSeal;
    *message.request.mutable_attempt() = ToProto(attempt);
    message.request.set_seal(true);
    for (const int state : *seal) message.request.add_states(state);
  } else if (version >= 0) {
    FillSnapshot(message);
  } else if (waiting && !Covered() && !wanted) {
    message.kind = Kind::kWant;
    wanted = true;
  }
  *message.request.mutable_peer() = introduction;
  message.request.set_lineage(lineage);
  return message;
}

void BuddySender::Work::Loop() {
  MutexLock lock(mutex);
  while (!stopping) {
    Message message = Next();
    if (message.kind == Kind::kNothing) {
      ready.wait(lock);
      continue;
    }
    lock.unlock();
    const bool want = message.kind == Kind::kWant;
    const bool comes = want && listener.wanted();
    if (!want) Send(message);
    lock.lock();
    if (want && !comes) {
      wanted = false;
      ready.wait_for(lock, absl::ToChronoNanoseconds(kPause));
    }
  }
}

void BuddySender::Work::Send(Message& message) {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadlineIn(kCallTimeout));
  v1::BuddyPutReply reply;
  {
    MutexLock lock(mutex);
    if (stopping) return;
    call = &context;
  }
  const absl::Status status =
      FromGrpc(peers->buddy(buddy()).Put(&context, message.request, &reply));
  bool pause = !status.ok();
  if (status.ok()) {
    // Not there, though it was put: the buddy is another than it was. A new generation follows.
    pause = message.kind == Kind::kSeal && !reply.sealed();
    OnReply(message, reply);
  } else if (!absl::IsCancelled(status)) {
    OnError(status, PositionFrom(context));
  }
  MutexLock lock(mutex);
  call = nullptr;
  if (pause && !stopping) ready.wait_for(lock, absl::ToChronoMilliseconds(kPause));
}

void BuddySender::Work::OnReply(const Message& message, const v1::BuddyPutReply& reply) {
  failing_since = absl::InfiniteFuture();
  listener.sent(message.bytes);
  MutexLock lock(mutex);
  const bool same = message.request.lineage() == lineage &&
                    message.request.peer().agreement() == introduction.agreement();
  if (same) held = reply.held();
  if (message.turn != turn) return;
  switch (message.kind) {
    case Kind::kGradients:
      pieces.erase(pieces.begin(), pieces.begin() + static_cast<std::ptrdiff_t>(message.whole));
      piece_at = message.at;
      return;
    case Kind::kSnapshot:
      if (reply.unknown()) {  // the buddy is another than it was: from the beginning
        started = false;
        tensor = 0;
        tensor_at = 0;
        return;
      }
      started = true;
      tensor += message.whole;
      tensor_at = message.at;
      if (tensor == tensors.size()) DropSnapshot();
      return;
    case Kind::kSeal: {
      if (!reply.sealed() || !Covered()) return;
      seal.reset();
      const BuddyAttemptKey key = attempt;
      const absl::Duration waited = SteadyNow() - sealed_at;
      lock.unlock();
      listener.waited(waited);
      listener.held(key);
      return;
    }
    case Kind::kNothing:
    case Kind::kWant:
      return;
  }
}

void BuddySender::Work::OnError(const absl::Status& status,
                                const std::optional<v1::RunPosition>& position) {
  const bool unreachable = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
  if (!unreachable || position) {
    failing_since = absl::InfiniteFuture();
    if (!position) return listener.trouble(buddy(), status, nullptr);
    const PeerPosition at{position->generation(), position->next_step(), position->lineage(),
                          position->state()};
    return listener.trouble(buddy(), status, &at);
  }
  failing_since = std::min(failing_since, SteadyNow());
  if (SteadyNow() - failing_since >= peers->patience()) {
    listener.trouble(buddy(), absl::UnavailableError(status.message()), nullptr);
  }
}

}  // namespace muond
