// Pull through an arena: the executor reads parameters straight into windows that the trainer sees.
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/crc32c.h"
#include "proto/mutex.h"
#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/pull_plan.h"

namespace muond {
namespace {

constexpr std::int64_t kAlignment = 64;  // of a region
// Of one fill: bounds its message, whatever the slices.
constexpr std::size_t kRegionsMax = 4096;

// A window towards the trainer goes round: free, being read into, told of, free again when the
// trainer says so. What a trainer does not give back is not filled again; nothing waits for it but
// its own call.
class ArenaPullStream final : public grpc::ServerBidiReactor<v1::PullArenaRequest, v1::PullReply> {
 public:
  ArenaPullStream(grpc::CallbackServerContext* context, const RpcContext& rpc)
      : context_(context), rpc_(rpc) {
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    const absl::Status status = ok ? Take() : absl::OkStatus();
    Advance([&]() MUOND_REQUIRES(mutex_) {
      hearing_ = ok && status.ok();
      if (!status.ok() && status_.ok()) status_ = status;
      if (!ok && !told_all_ && status_.ok()) status_ = absl::CancelledError("the caller went away");
      return hearing_;
    });
  }
  void OnWriteDone(bool ok) override {
    Advance([&]() MUOND_REQUIRES(mutex_) {
      writing_ = false;
      if (!ok && status_.ok()) status_ = absl::CancelledError("the caller went away");
      return false;
    });
  }
  void OnDone() override {
    if (leased_) arena_->EndPull();
    delete this;
  }

 private:
  absl::Status Take() {
    if (plan_ != nullptr) return Free(request_.window(), request_.sequence());
    MUOND_ASSIGN_OR_RETURN(plan_, PullPlan::Make(rpc_, *context_, request_.pull(), &run_));
    MUOND_ASSIGN_OR_RETURN(
        arena_, rpc_.arenas->Find(request_.arena(), {run_->name(), request_.pull().rank()}));
    MUOND_RETURN_IF_ERROR(arena_->BeginPull());
    leased_ = true;
    MutexLock lock(mutex_);
    for (std::size_t i = 0; i < arena_->layout().windows.size(); ++i) {
      if (!arena_->layout().windows[i].to_daemon) free_.push_back(static_cast<std::int64_t>(i));
    }
    told_.resize(arena_->layout().windows.size(), 0);
    if (plan_->chunk_bytes() > arena_->layout().windows[free_[0]].bytes) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: pull: chunk_bytes: expected at most the window's %d bytes, got %d",
          arena_->object(), arena_->layout().windows[free_[0]].bytes, plan_->chunk_bytes()));
    }
    return absl::OkStatus();
  }

  absl::Status Free(std::int64_t window, std::int64_t sequence) {
    MutexLock lock(mutex_);
    if (window < 0 || window >= std::ssize(told_) || told_[window] == 0 ||
        told_[window] != sequence) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: pull: window %d is not in the trainer's hands with fill %d",
                          arena_->object(), window, sequence));
    }
    told_[window] = 0;
    free_.push_back(window);
    return absl::OkStatus();
  }

  // As in push and pull: changes the state, then starts what it allows. `change` tells whether to
  // hear the trainer's next message.
  template <typename Change>
  void Advance(Change change) {
    bool hear = false, write = false, read = false, end = false;
    absl::Status status;
    {
      MutexLock lock(mutex_);
      hear = change();
      if (status_.ok() && ready_ && !writing_) {
        std::swap(reply_, next_);
        ready_ = false;
        told_[reply_.fill().window()] = reply_.fill().sequence();
        write = writing_ = true;
      }
      if (status_.ok() && plan_ != nullptr && !reading_ && !ready_ && !plan_->done() &&
          !free_.empty()) {
        window_ = free_.front();
        free_.erase(free_.begin());
        read = reading_ = true;
      }
      // While a window is read into, the plan is that reader's.
      if (plan_ != nullptr && !reading_ && !ready_ && plan_->done()) told_all_ = true;
      end = !writing_ && !reading_ && !ended_ && (!status_.ok() || told_all_);
      ended_ = ended_ || end;
      if (ended_) hear = false;
      if (end) status = status_;
    }
    if (hear) StartRead(&request_);
    if (write) StartWrite(&reply_);
    if (read) ReadWindow();
    if (end) Finish(Answer(context_, status, run_.get()));
  }

  struct Piece {
    PullPiece piece;
    std::int64_t offset = 0;  // in the window
    std::uint32_t crc32c = 0;
  };

  void ReadWindow() {
    const ArenaWindow& window = arena_->layout().windows[window_];
    pieces_.clear();
    std::int64_t used = 0;
    while (auto piece = plan_->Next(window.bytes - used)) {
      pieces_.push_back({*piece, used, 0});
      used += (piece->bytes() + kAlignment - 1) / kAlignment * kAlignment;
      if (used >= window.bytes || pieces_.size() == kRegionsMax) break;
    }
    missing_ = pieces_.size();
    {
      MutexLock lock(mutex_);
      failure_ = absl::OkStatus();
    }
    // The last answer may come before this loop has ended: it frees what the loop uses.
    const std::size_t count = pieces_.size();
    const std::vector<Piece> pieces = pieces_;
    const std::shared_ptr<Run> run = run_;
    std::byte* const data = arena_->WindowData(window_);
    const std::int64_t version = plan_->version();
    for (std::size_t i = 0; i < count; ++i) {
      std::byte* const at = data + pieces[i].offset;
      run->Read(*pieces[i].piece.slice, version, pieces[i].piece.first, pieces[i].piece.count, at,
                [this, i, at](const absl::Status& status) { OnPiece(i, at, status); });
    }
  }

  void OnPiece(std::size_t index, const std::byte* at, const absl::Status& status) {
    if (status.ok()) {
      // The trainer could have changed the bytes by now: then it deceives itself alone.
      Piece& piece = pieces_[index];
      piece.crc32c = Crc32c(at, static_cast<std::size_t>(piece.piece.bytes()));
    } else {
      MutexLock lock(mutex_);
      if (failure_.ok()) failure_ = status;
    }
    if (missing_.fetch_sub(1) > 1) return;
    if (failure().ok()) Describe();
    Advance([&]() MUOND_REQUIRES(mutex_) {
      reading_ = false;
      ready_ = failure_.ok();
      if (!failure_.ok() && status_.ok()) status_ = failure_;
      return false;
    });
  }

  absl::Status failure() {
    MutexLock lock(mutex_);
    return failure_;
  }

  // Makes the message of a window that is full.
  void Describe() {
    next_.Clear();
    next_.set_version(plan_->version());
    v1::ArenaFill* fill = next_.mutable_fill();
    fill->set_window(window_);
    fill->set_sequence(++sequence_);
    for (const Piece& piece : pieces_) {
      v1::Chunk* chunk = fill->add_chunks();
      *chunk = PullPlan::HeaderOf(piece.piece);
      chunk->set_crc32c(piece.crc32c);
      chunk->mutable_region()->set_offset(arena_->layout().windows[window_].offset + piece.offset);
      chunk->mutable_region()->set_bytes(piece.piece.bytes());
      rpc_.metrics->OnTransfer(TransportPath::kArena, TransportDirection::kSent,
                               piece.piece.bytes());
    }
    arena_->SetFilled(window_, sequence_);
  }

  grpc::CallbackServerContext* const context_;
  const RpcContext& rpc_;
  std::shared_ptr<Run> run_;
  std::shared_ptr<Arena> arena_;
  bool leased_ = false;
  std::unique_ptr<PullPlan> plan_;
  v1::PullArenaRequest request_;
  v1::PullReply reply_;                   // being written
  v1::PullReply next_;                    // read, or being read
  std::int64_t window_ = 0;               // being read into
  std::int64_t sequence_ = 0;             // of fills
  std::vector<Piece> pieces_;             // of that window
  std::atomic<std::size_t> missing_ = 0;  // of them

  Mutex mutex_;
  absl::Status failure_ MUOND_GUARDED_BY(mutex_);
  std::vector<std::int64_t> free_ MUOND_GUARDED_BY(mutex_);
  // By window: the fill that the trainer has; 0: none.
  std::vector<std::int64_t> told_ MUOND_GUARDED_BY(mutex_);
  bool hearing_ MUOND_GUARDED_BY(mutex_) = true;
  bool reading_ MUOND_GUARDED_BY(mutex_) = false;
  bool writing_ MUOND_GUARDED_BY(mutex_) = false;
  bool ready_ MUOND_GUARDED_BY(mutex_) = false;
  bool told_all_ MUOND_GUARDED_BY(mutex_) = false;
  bool ended_ MUOND_GUARDED_BY(mutex_) = false;
  absl::Status status_ MUOND_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ServerBidiReactor<v1::PullArenaRequest, v1::PullReply>* OptimizerService::PullArena(
    grpc::CallbackServerContext* context) {
  return new ArenaPullStream(context, context_);
}

}  // namespace muond
