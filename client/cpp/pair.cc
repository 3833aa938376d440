#include "client/cpp/pair.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/cpp/call_scope.h"
#include "nccl/library.h"
#include "nccl/warm_up.h"
#include "proto/check.h"
#include "proto/steady_time.h"
#include "proto/status.h"

namespace muond::client {

nccl::Done PairWaiting::One() {
  MutexLock lock(mutex_);
  ++left_;
  return [this](const absl::Status& status) { End(status); };
}

void PairWaiting::End(const absl::Status& status) {
  // Under the lock to the end: whoever waits may destroy this right after.
  MutexLock lock(mutex_);
  if (status_.ok()) status_ = status;
  --left_;
  changed_.notify_all();
}

bool PairWaiting::Wait(absl::Time deadline) {
  MutexLock lock(mutex_);
  const auto over = [this]() MUOND_REQUIRES(mutex_) { return left_ == 0; };
  if (deadline == absl::InfiniteFuture()) {
    changed_.wait(lock, over);
    return true;
  }
  return changed_.wait_for(lock, absl::ToChronoNanoseconds(deadline - SteadyNow()), over);
}

absl::Status PairWaiting::status() {
  MutexLock lock(mutex_);
  return status_;
}

PairPack::~PairPack() {
  if (data_ != nullptr) device_->Free(data_);
}

absl::StatusOr<std::byte*> PairPack::Reserve(std::int64_t bytes) {
  if (bytes <= bytes_) return data_;
  if (data_ != nullptr) device_->Free(std::exchange(data_, nullptr));
  bytes_ = 0;
  const std::int64_t wanted = std::max<std::int64_t>(bytes + bytes / 2, nccl::kWarmUpBytes);
  MUOND_ASSIGN_OR_RETURN(void* const data, device_->Allocate(static_cast<std::size_t>(wanted)));
  data_ = static_cast<std::byte*>(data);
  bytes_ = wanted;
  return data_;
}

absl::StatusOr<std::shared_ptr<PairLink>> PairLink::Open(v1::Optimizer::Stub& stub,
                                                         const PairRequest& request,
                                                         std::shared_ptr<nccl::Worker> worker,
                                                         absl::Time deadline) {
  v1::OpenPairRequest open;
  *open.mutable_id() = request.id;
  open.set_rank(request.rank);
  open.set_nccl_version(request.nccl_version);
  open.set_gpu(worker->device().uuid());
  open.set_window_bytes(request.window_bytes);
  open.set_windows(request.windows);
  open.set_pull_bytes(request.pull_bytes);
  // Without a deadline: the call lasts as long as the pair. The channel's pings watch the daemon.
  auto context = std::make_unique<grpc::ClientContext>();
  v1::OpenPairReply opened;
  auto reader = stub.OpenPair(context.get(), open);
  bool told = false;
  {
    const CallScope::Call scoped(*context);
    told = reader->Read(&opened);
  }
  if (!told) return FromGrpc(reader->Finish());
  std::shared_ptr<PairLink> link(new PairLink(opened.handle(), std::move(worker)));
  link->context_ = std::move(context);
  link->reader_ = std::move(reader);
  nccl::UniqueId id;
  absl::Status status = nccl::CheckVersions(static_cast<int>(opened.nccl_version()),
                                            request.nccl_version);
  if (status.ok() && opened.unique_id().size() != sizeof(id.bytes)) {
    status = absl::InternalError(
        absl::StrFormat("run \"%s\": NCCL pair: its id has %d bytes, expected %d",
                        request.id.run(), opened.unique_id().size(), sizeof(id.bytes)));
  }
  if (status.ok()) status = link->TakeWindows(opened);
  if (status.ok()) {
    std::memcpy(id.bytes, opened.unique_id().data(), sizeof(id.bytes));
    status = link->Join(id, deadline);
  }
  MUOND_RETURN_IF_ERROR(status);
  return link;
}

PairLink::~PairLink() {
  if (link_ != nullptr) link_->Abort(absl::CancelledError("NCCL: the trainer has let go of it"));
  // The packs and the caller's buffers are NCCL's until the abort is through.
  for (Outgoing& window : outgoing_) {
    if (window.sent != nullptr) window.sent->Wait(absl::InfiniteFuture());
  }
  context_->TryCancel();
  if (watch_.joinable()) {
    watch_.join();
  } else {
    reader_->Finish();
  }
  if (stream_ != nullptr) worker_->device().FreeStream(stream_);
}

absl::Status PairLink::TakeWindows(const v1::OpenPairReply& opened) {
  bool incoming = false;
  for (int i = 0; i < opened.windows_size(); ++i) {
    const v1::ArenaWindow& window = opened.windows(i);
    if (window.offset() < 0 || window.bytes() <= 0) {
      return absl::InternalError(absl::StrFormat("NCCL pair: window %d makes no sense", i));
    }
    if (window.to_daemon()) {
      outgoing_.push_back(
          {window, i, std::make_shared<PairPack>(worker_->shared_device()), nullptr});
    } else {
      incoming_ = window;
      incoming_index_ = i;
      incoming = true;
    }
  }
  if (!outgoing_.empty() && incoming) return absl::OkStatus();
  return absl::InternalError("NCCL pair: it has no windows");
}

absl::Status PairLink::Join(const nccl::UniqueId& id, absl::Time deadline) {
  nccl::Device& device = worker_->device();
  MUOND_ASSIGN_OR_RETURN(stream_, device.NewStream());
  for (auto& pack : in_packs_) pack = std::make_shared<PairPack>(worker_->shared_device());
  Outgoing& first = outgoing_[0];
  const auto warm = static_cast<std::int64_t>(nccl::kWarmUpBytes);
  MUOND_ASSIGN_OR_RETURN(std::byte* const out, first.pack->Reserve(warm));
  MUOND_ASSIGN_OR_RETURN(std::byte* const in, in_packs_[0]->Reserve(warm));
  link_ = worker_->Connect(id, 1, deadline, [](const absl::Status&) {});
  const auto waiting = std::make_shared<PairWaiting>();
  const std::shared_ptr<void> keep(nullptr,
                                   [a = first.pack, b = in_packs_[0], c = waiting](void*) {});
  nccl::WarmUp(worker_->shared_device(), *link_, handle_, 1,
               {out, static_cast<std::size_t>(first.place.bytes())},
               {in, static_cast<std::size_t>(incoming_.bytes())}, keep, deadline, waiting->One());
  waiting->Wait(absl::InfiniteFuture());  // the link keeps the deadline
  const absl::Status met = waiting->status();
  MUOND_RETURN_IF_ERROR(met);
  watch_ = std::thread([this] { Watch(); });
  return absl::OkStatus();
}

// The call ends when the daemon has let go of the pair, or is gone.
void PairLink::Watch() {
  v1::OpenPairReply more;
  while (reader_->Read(&more)) {
  }
  const grpc::Status status = reader_->Finish();
  link_->Abort(absl::UnavailableError(
      absl::StrFormat("NCCL: the daemon has ended the pair: %s", status.error_message())));
}

bool PairLink::lost() const { return link_ == nullptr || !link_->status().ok(); }

}  // namespace muond::client
