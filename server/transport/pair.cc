#include "server/transport/pair.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "nccl/warm_up.h"
#include "proto/check.h"
#include "proto/steady_time.h"

namespace muond {
namespace {

constexpr std::int64_t kPlaceBytes = 256;  // windows begin and end at multiples
constexpr std::int64_t kWindowBytesMax = std::int64_t{1} << 40;
constexpr std::size_t kHandleBytes = 16;

absl::Status CheckBytes(const char* what, std::int64_t bytes) {
  if (bytes > 0 && bytes <= kWindowBytesMax && bytes % kPlaceBytes == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("NCCL pair: %s: expected a multiple of %d up to %d, got %d", what,
                      kPlaceBytes, kWindowBytesMax, bytes));
}

}  // namespace

absl::StatusOr<ArenaLayout> LayOutPair(const PairSize& size) {
  if (size.windows < 1 || size.windows > kArenaWindowsMax) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "NCCL pair: windows: expected 1 to %d, got %d", kArenaWindowsMax, size.windows));
  }
  MUOND_RETURN_IF_ERROR(CheckBytes("window_bytes", size.window_bytes));
  MUOND_RETURN_IF_ERROR(CheckBytes("pull_bytes", size.pull_bytes));
  ArenaLayout layout;
  for (std::int64_t i = 0; i <= size.windows; ++i) {
    const bool to_daemon = i < size.windows;
    const std::int64_t bytes = to_daemon ? size.window_bytes : size.pull_bytes;
    layout.windows.push_back(
        {.offset = layout.gpu_bytes, .bytes = bytes, .to_daemon = to_daemon});
    layout.gpu_bytes += bytes;
  }
  return layout;
}

// The memory: exchanges keep it for as long as NCCL may touch it.
struct Pair::Windows {
  std::shared_ptr<nccl::Device> device;
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
  std::function<void(std::int64_t)> freed;
  ~Windows() {
    if (data != nullptr) device->Free(data);
    if (freed != nullptr) freed(bytes);
  }
};

absl::StatusOr<std::shared_ptr<Pair>> Pair::Create(ArenaOwner owner, ArenaLayout layout,
                                                   std::shared_ptr<nccl::Worker> worker,
                                                   std::function<void(std::int64_t)> freed) {
  std::string handle(kHandleBytes, '\0');
  if (getrandom(handle.data(), handle.size(), 0) != static_cast<ssize_t>(handle.size())) {
    return absl::InternalError("NCCL pair: no random numbers for a handle");
  }
  auto windows = std::make_shared<Windows>();
  windows->device = worker->shared_device();
  auto memory = windows->device->Allocate(static_cast<std::size_t>(layout.gpu_bytes));
  if (!memory.ok()) {
    return absl::Status(memory.status().code(),
                        absl::StrFormat("run \"%s\": NCCL pair of rank %d: %d bytes of %s: %s",
                                        owner.run, owner.rank, layout.gpu_bytes,
                                        windows->device->uuid(), memory.status().message()));
  }
  windows->data = static_cast<std::byte*>(*memory);
  windows->bytes = layout.gpu_bytes;
  windows->freed = std::move(freed);
  return std::shared_ptr<Pair>(new Pair(std::move(owner), std::move(layout), std::move(worker),
                                        std::move(handle), std::move(windows)));
}

Pair::Pair(ArenaOwner owner, ArenaLayout layout, std::shared_ptr<nccl::Worker> worker,
           std::string handle, std::shared_ptr<Windows> windows)
    : owner_(std::move(owner)),
      layout_(std::move(layout)),
      worker_(std::move(worker)),
      handle_(std::move(handle)),
      windows_(std::move(windows)) {}

Pair::~Pair() = default;

std::string Pair::object() const {
  return absl::StrFormat("run \"%s\": NCCL pair of rank %d", owner_.run, owner_.rank);
}

void Pair::Connect(const nccl::UniqueId& id, absl::Time deadline, Done ready) {
  auto link = worker_->Connect(id, 0, deadline, [](const absl::Status&) {});
  {
    MutexLock lock(mutex_);
    link_ = link;
  }
  const ArenaWindow& in = layout_.windows.front();
  const ArenaWindow& out = layout_.windows.back();
  nccl::WarmUp(worker_->shared_device(), *link, handle_, 0,
               {windows_->data + out.offset, static_cast<std::size_t>(out.bytes)},
               {windows_->data + in.offset, static_cast<std::size_t>(in.bytes)}, windows_, deadline,
               [self = weak_from_this(), ready = std::move(ready)](const absl::Status& status) {
                 const auto pair = self.lock();
                 if (!status.ok() && pair != nullptr) pair->Revoke(status);
                 ready(status);
               });
}

void Pair::Revoke(const absl::Status& why) {
  std::shared_ptr<nccl::Link> link;
  Done hears;
  absl::Status said;
  {
    MutexLock lock(mutex_);
    if (!revoked_.ok()) return;
    revoked_ = said = absl::Status(why.code(), absl::StrFormat("%s: %s", object(), why.message()));
    link = std::move(link_);
    hears = std::exchange(on_revoked_, nullptr);
    changed_.notify_all();
  }
  if (link != nullptr) link->Abort(why);
  if (hears != nullptr) hears(said);
}

void Pair::OnRevoked(Done done) {
  absl::Status already;
  {
    MutexLock lock(mutex_);
    already = revoked_;
    if (already.ok()) on_revoked_ = done;
  }
  if (!already.ok()) done(already);
}

absl::Status Pair::status() const {
  MutexLock lock(mutex_);
  if (!revoked_.ok()) return revoked_;
  if (link_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrFormat("%s: it is not connected", object()));
  }
  absl::Status link = link_->status();
  if (link.ok()) return link;
  return absl::Status(link.code(), absl::StrFormat("%s: %s", object(), link.message()));
}

absl::StatusOr<std::byte*> Pair::Region(std::int64_t window, std::int64_t offset,
                                        std::int64_t bytes, bool to_daemon) const {
  MUOND_RETURN_IF_ERROR(status());
  MUOND_RETURN_IF_ERROR(CheckRegion(object(), layout_, window, offset, bytes, to_daemon));
  return windows_->data + offset;
}

absl::Status Pair::CheckRegions(std::int64_t window, std::span<const nccl::Region> regions,
                                bool to_daemon) const {
  if (window < 0 || window >= std::ssize(layout_.windows)) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: it has no window %d", object(), window));
  }
  std::int64_t end = layout_.windows[window].offset;
  for (const nccl::Region& region : regions) {
    MUOND_RETURN_IF_ERROR(Region(window, region.offset, region.bytes, to_daemon).status());
    if (region.offset < end) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: window %d: the region at %d does not lie behind the one before", object(), window,
          region.offset));
    }
    end = region.offset + region.bytes;
  }
  return absl::OkStatus();
}

std::vector<nccl::Exchange> Pair::Groups(const std::vector<nccl::Region>& regions, bool to_daemon,
                                         absl::Time deadline, const Done& done) const {
  std::vector<nccl::Exchange> groups;
  for (const nccl::Transfer& transfer : nccl::PlanTransfers(regions)) {
    groups.resize(transfer.group + 1);
    nccl::Exchange& group = groups.back();
    (to_daemon ? group.receives : group.sends)
        .push_back({windows_->data + transfer.offset, static_cast<std::size_t>(transfer.bytes)});
  }
  for (nccl::Exchange& group : groups) {
    group.keep = windows_;
    group.deadline = deadline;
    group.done = [](const absl::Status&) {};
  }
  // What comes before has ended then, or the link has broken.
  if (!groups.empty()) groups.back().done = done;
  return groups;
}

absl::Status Pair::PostAll(std::vector<nccl::Exchange> groups) {
  if (!revoked_.ok()) return revoked_;
  for (nccl::Exchange& group : groups) MUOND_RETURN_IF_ERROR(link_->Post(std::move(group)));
  return absl::OkStatus();
}

absl::Status Pair::Receive(std::int64_t window, std::int64_t sequence,
                           const std::vector<nccl::Region>& regions, absl::Time deadline,
                           const Done& done) {
  MUOND_RETURN_IF_ERROR(CheckRegions(window, regions, true));
  std::vector<nccl::Exchange> groups = Groups(regions, true, deadline, done);
  const bool empty = groups.empty();
  {
    MutexLock lock(mutex_);
    changed_.wait_for(lock, absl::ToChronoNanoseconds(deadline - SteadyNow()),
                      [&]() MUOND_REQUIRES(mutex_) {
                        return sequence <= next_ || !revoked_.ok();
                      });
    if (revoked_.ok() && sequence != next_) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "%s: window %d: expected fill %d, got %d", object(), window, next_, sequence));
    }
    MUOND_RETURN_IF_ERROR(PostAll(std::move(groups)));
    ++next_;
    changed_.notify_all();
  }
  if (empty) done(absl::OkStatus());
  return absl::OkStatus();
}

absl::Status Pair::Send(std::int64_t window, const std::vector<nccl::Region>& regions,
                        absl::Time deadline, const Done& done) {
  MUOND_RETURN_IF_ERROR(CheckRegions(window, regions, false));
  // NCCL's thread must not be the one that ends a pair, and with it perhaps the thread.
  const auto ended = [weak = weak_from_this(), done](const absl::Status& status) {
    if (const auto self = weak.lock()) {
      MutexLock lock(self->mutex_);
      if (!self->sending_.empty()) self->sending_.pop_front();  // a link ends them in their order
      self->changed_.notify_all();
    }
    done(status);
  };
  std::vector<nccl::Exchange> groups = Groups(regions, false, deadline, ended);
  if (groups.empty()) {
    done(absl::OkStatus());
    return absl::OkStatus();
  }
  const std::int64_t first = regions.front().offset;
  const nccl::Region all{first, regions.back().offset + regions.back().bytes - first};
  MutexLock lock(mutex_);
  if (BeingSent(all)) {
    return absl::UnavailableError(
        absl::StrFormat("%s: what was sent before has not arrived yet", object()));
  }
  MUOND_RETURN_IF_ERROR(PostAll(std::move(groups)));
  sending_.push_back(all);
  return absl::OkStatus();
}

bool Pair::BeingSent(const nccl::Region& region) const {
  return std::any_of(sending_.begin(), sending_.end(), [&](const nccl::Region& sent) {
    return region.offset < sent.offset + sent.bytes && sent.offset < region.offset + region.bytes;
  });
}

absl::Status Pair::AwaitSent(const nccl::Region& region, absl::Time deadline) {
  MutexLock lock(mutex_);
  if (changed_.wait_for(lock, absl::ToChronoNanoseconds(deadline - SteadyNow()),
                        [&]() MUOND_REQUIRES(mutex_) {
                          return !BeingSent(region) || !revoked_.ok();
                        })) {
    return revoked_;
  }
  return absl::UnavailableError(
      absl::StrFormat("%s: what was sent before has not arrived yet", object()));
}

}  // namespace muond
