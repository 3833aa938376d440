#include <deque>
#include <memory>
#include <utility>

#include "proto/mutex.h"
#include "server/rpc/admin_service.h"

namespace muond {
namespace {

// A watcher that is this many events behind misses the next ones: steps don't wait for it.
constexpr std::size_t kWaitingMax = 256;

// Writes events one at a time. What comes meanwhile waits in a queue.
class WatchStream final : public grpc::ServerWriteReactor<v1::StepEvent> {
 public:
  WatchStream(StepEvents* events, const std::string& run) : events_(events) {
    subscription_ = events_->Subscribe(
        run, [this](const std::shared_ptr<const StepEvent>& event) { OnEvent(event); });
  }

  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(mutex_);
      writing_ = false;
      if (!ok) ended_ = true;
    }
    Continue();
  }
  void OnCancel() override {
    {
      MutexLock lock(mutex_);
      ended_ = true;
    }
    Continue();
  }
  void OnDone() override {
    events_->Unsubscribe(subscription_);
    delete this;
  }

 private:
  void OnEvent(const std::shared_ptr<const StepEvent>& event) {
    {
      MutexLock lock(mutex_);
      if (event == nullptr) {
        ended_ = true;
      } else if (waiting_.size() == kWaitingMax) {
        ++missed_;
      } else {
        waiting_.push_back(event);
      }
    }
    Continue();
  }

  // Starts the next write, or ends the stream, unless a write is under way: that one continues.
  void Continue() {
    bool finish = false;
    {
      MutexLock lock(mutex_);
      if (writing_ || finished_) return;
      if (ended_) {
        finish = finished_ = true;
      } else if (waiting_.empty()) {
        return;
      } else {
        message_ = ToProto(*waiting_.front());
        message_.set_missed(std::exchange(missed_, 0));
        waiting_.pop_front();
        writing_ = true;
      }
    }
    if (finish) {
      Finish({grpc::StatusCode::UNAVAILABLE, "watch: the daemon is shutting down"});
    } else {
      StartWrite(&message_);
    }
  }

  StepEvents* const events_;
  std::uint64_t subscription_ = 0;
  Mutex mutex_;
  std::deque<std::shared_ptr<const StepEvent>> waiting_ MUOND_GUARDED_BY(mutex_);
  std::int64_t missed_ MUOND_GUARDED_BY(mutex_) = 0;
  bool writing_ MUOND_GUARDED_BY(mutex_) = false;
  bool ended_ MUOND_GUARDED_BY(mutex_) = false;
  bool finished_ MUOND_GUARDED_BY(mutex_) = false;
  v1::StepEvent message_;
};

}  // namespace

grpc::ServerWriteReactor<v1::StepEvent>* AdminService::Watch(grpc::CallbackServerContext*,
                                                             const v1::WatchRequest* request) {
  return new WatchStream(context_.events, request->run());
}

}  // namespace muond
