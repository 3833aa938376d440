// A trainer's end of an NCCL pair: the communicator with one daemon, which window of the daemon's
// comes next, and what has to be packed.
//
// Large slices are sent from where they lie and received where they belong; small ones share a
// transfer by way of a pack on the trainer's GPU. Both ends make the same list of transfers of the
// message that names the slices (nccl/transfer_plan.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/pull_stream.h"
#include "client/cpp/push_stream.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "nccl/link.h"
#include "nccl/transfer_plan.h"
#include "proto/mutex.h"

namespace muond::nccl {
struct Library;
}

namespace muond::client {

// Memory for packs and the warm-up, on the trainer's GPU; only grows.
class PairPack {
 public:
  explicit PairPack(std::shared_ptr<nccl::Device> device) : device_(std::move(device)) {}
  ~PairPack();
  PairPack(const PairPack&) = delete;
  PairPack& operator=(const PairPack&) = delete;
  absl::StatusOr<std::byte*> Reserve(std::int64_t bytes);

 private:
  const std::shared_ptr<nccl::Device> device_;
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Of several exchanges that were posted: how many are still under way, and what went wrong.
class PairWaiting {
 public:
  // One more, before it is posted: hears how it ended.
  nccl::Done One();
  // What was not posted does not come.
  void Never(const absl::Status& why) { End(why); }
  // False: some are still under way.
  bool Wait(absl::Time deadline);
  absl::Status status();

 private:
  void End(const absl::Status& status);
  Mutex mutex_;
  CondVar changed_;
  int left_ MUOND_GUARDED_BY(mutex_) = 0;
  absl::Status status_ MUOND_GUARDED_BY(mutex_);
};

struct PairRequest {
  v1::RunId id;
  std::int64_t rank = 0;
  int nccl_version = 0;
  std::int64_t window_bytes = 0;  // towards the daemon: at least the largest part of a slice
  std::int64_t windows = 0;
  std::int64_t pull_bytes = 0;  // all of the rank's parameters
};

// One thread at a time, but for lost().
class PairLink {
 public:
  // Opens a pair and meets the daemon, by the deadline. Errors: the daemon's; those of nccl::Link
  // and nccl::WarmUp.
  static absl::StatusOr<std::shared_ptr<PairLink>> Open(v1::Optimizer::Stub& stub,
                                                        const PairRequest& request,
                                                        std::shared_ptr<nccl::Worker> worker,
                                                        absl::Time deadline);
  ~PairLink();
  PairLink(const PairLink&) = delete;
  PairLink& operator=(const PairLink&) = delete;

  const std::string& handle() const { return handle_; }
  // Whether nothing can go this way any more: the daemon is gone, or an exchange went wrong.
  bool lost() const;
  // The pair is of no use any more.
  void Abandon(const absl::Status& why) { link_->Abort(why); }

  std::int64_t window_bytes() const { return outgoing_[0].place.bytes(); }
  std::int64_t windows() const { return std::ssize(outgoing_); }
  std::int64_t pull_bytes() const { return incoming_.bytes(); }

  // How many parts, from the front on, one Send takes.
  std::size_t CountThatFit(std::span<const SlicePart> parts) const;
  // Sends parts from the front on that fit into the next window, as many as it returns, and names
  // them in `fill`, each with its sum. Their values must be there (streams waited for), and stay
  // until AwaitSent; the daemon must have answered the fill before the last `windows`.
  absl::StatusOr<std::size_t> Send(std::span<const SlicePart> parts, absl::Time deadline,
                                   v1::ArenaFill* fill);
  // Returns when all that was sent has gone: soon after the daemon's answers. Breaks the pair when
  // it has not by the deadline.
  absl::Status AwaitSent(absl::Time deadline);

  // Where the daemon is to put what is asked for: behind the `*used` bytes of its window that other
  // pulls have taken, which grow.
  absl::Status Place(std::span<const SinkPart> sinks, std::int64_t* used, v1::ExchangePull* pull);
  // What a daemon sends, on its way here.
  struct Arrival {
    std::vector<const SinkPart*> sinks;  // in the order of the regions
    std::vector<std::uint64_t> sums;     // that they must have
    std::vector<nccl::DeviceCopy> copies;  // out of the pack, once it is there
    std::shared_ptr<PairWaiting> waiting;
  };
  // Begins to receive what the daemon has answered to send, answers in their order; the sinks stay
  // until Settle. A pair has kArrivals at most that are not settled.
  static constexpr std::size_t kArrivals = 3;
  absl::StatusOr<Arrival> Receive(std::span<const SinkPart> sinks, const v1::ExchangePull& pull,
                                  const v1::ExchangeReply& reply, absl::Time deadline);
  // Returns when it is there. DATA_LOSS for what does not have its sum, DEADLINE_EXCEEDED, or why
  // the pair broke.
  absl::Status Settle(const Arrival& arrival);

 private:
  PairLink(std::string handle, std::shared_ptr<nccl::Worker> worker)
      : handle_(std::move(handle)), worker_(std::move(worker)) {}
  absl::Status TakeWindows(const v1::OpenPairReply& opened);
  absl::Status Join(const nccl::UniqueId& id, absl::Time deadline);
  void Watch();
  absl::Status Sum(std::span<const SlicePart> parts, v1::ArenaFill* fill);
  absl::Status CheckSums(const Arrival& arrival);

  // A window of the daemon's, and what was sent there last.
  struct Outgoing {
    v1::ArenaWindow place;
    std::int64_t index = 0;  // in the daemon's table
    std::shared_ptr<PairPack> pack;
    std::shared_ptr<PairWaiting> sent;  // null: nothing, or it was waited for
  };
  absl::StatusOr<std::vector<nccl::Exchange>> MakeSends(const Outgoing& window,
                                                        std::span<const SlicePart> parts,
                                                        const v1::ArenaFill& fill) const;
  absl::Status AwaitSent(Outgoing& window, absl::Time deadline);
  std::shared_ptr<PairWaiting> PostAll(std::vector<nccl::Exchange> groups,
                                       std::shared_ptr<const void> keep, absl::Time deadline);

  const std::string handle_;
  const std::shared_ptr<nccl::Worker> worker_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReader<v1::OpenPairReply>> reader_;
  std::thread watch_;
  std::shared_ptr<nccl::Link> link_;
  nccl::Stream stream_ = nullptr;  // of sums and of copies out of the pack
  std::vector<Outgoing> outgoing_;
  v1::ArenaWindow incoming_;
  std::int64_t incoming_index_ = 0;
  std::int64_t sequence_ = 0;  // of the last fill
  std::array<std::shared_ptr<PairPack>, kArrivals> in_packs_;  // of arrivals, in turn
  std::size_t arrivals_ = 0;
};

}  // namespace muond::client
