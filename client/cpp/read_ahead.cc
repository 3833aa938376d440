#include "client/cpp/read_ahead.h"

#include "proto/long_turns.h"

namespace muond::client {
namespace {

// A stream that is shorter is not worth a thread.
constexpr int kDirect = 2;
constexpr std::size_t kMessagesMax = 4;

}  // namespace

ReadAhead::~ReadAhead() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool ReadAhead::Next(grpc::ByteBuffer* message) {
  if (direct_ < kDirect) {
    ++direct_;
    return reader_.Read(message);
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { Work(); });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ended_ || !messages_.empty(); });
  if (messages_.empty()) return false;
  message->Swap(&messages_.front());
  messages_.pop_front();
  changed_.notify_all();
  return true;
}

void ReadAhead::Work() {
  const LongTurns turns;
  for (;;) {
    grpc::ByteBuffer message;
    const bool read = reader_.Read(&message);
    std::unique_lock lock(mutex_);
    if (read) messages_.emplace_back().Swap(&message);
    ended_ = !read;
    changed_.notify_all();
    if (ended_) return;
    changed_.wait(lock, [this] { return stopping_ || messages_.size() < kMessagesMax; });
    if (stopping_) return;
  }
}

}  // namespace muond::client
