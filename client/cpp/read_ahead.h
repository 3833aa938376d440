// The messages of a stream, read by a thread of their own while the caller is at work on those
// before: gRPC's synchronous reader leaves the socket alone between two reads.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/sync_stream.h"

namespace muond::client {

// For one thread. The reader outlives it, and nobody else reads meanwhile.
class ReadAhead {
 public:
  using Reader = grpc::ClientReaderInterface<grpc::ByteBuffer>;
  explicit ReadAhead(Reader& reader) : reader_(reader) {}
  // Waits for a read that is under way: cancel the call first where its end is not awaited.
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The next message; false when the stream has ended.
  bool Next(grpc::ByteBuffer* message);

 private:
  void Work();

  Reader& reader_;
  int direct_ = 0;  // messages that the caller has read itself
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<grpc::ByteBuffer> messages_;
  bool ended_ = false, stopping_ = false;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace muond::client
