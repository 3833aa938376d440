#include "server/rpc/exchange_windows.h"

#include <future>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "proto/check.h"
#include "proto/pointer_lease.h"
#include "proto/steady_time.h"
#include "server/rpc/transport_choice.h"
#include "server/transport/gpu_arena.h"

namespace muond {
namespace {

class ArenaWindows final : public ExchangeWindows {
 public:
  explicit ArenaWindows(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  TransportPath path() const override { return TransportPath::kCudaIpc; }
  kernels::DeviceMemory& MemoryOf(const std::byte*) override { return arena_->gpu()->memory(); }
  absl::Status Fetch(const v1::ArenaFill& fill) override {
    return arena_->CheckFilled(fill.window(), fill.sequence());
  }
  absl::StatusOr<std::byte*> Region(std::int64_t window, const v1::ArenaRegion& region,
                                    bool to_daemon) override {
    return arena_->GpuRegion(window, region.offset(), region.bytes(), to_daemon);
  }
  void Release(const v1::ArenaFill& fill) override {
    arena_->SetDrained(fill.window(), fill.sequence());
  }
  absl::Status Deliver(const v1::ExchangePull& pull, v1::ExchangeReply*) override {
    const auto& windows = arena_->layout().windows;
    const std::int64_t index = pull.window();
    const std::int64_t start =
        index >= 0 && index < std::ssize(windows) ? windows[index].offset : 0;
    MUOND_RETURN_IF_ERROR(arena_->GpuRegion(index, start, 0, /*to_daemon=*/false).status());
    arena_->SetFilled(pull.window(), pull.sequence());
    return absl::OkStatus();
  }
  std::shared_ptr<void> keepalive() const override { return arena_; }

 private:
  const std::shared_ptr<Arena> arena_;
};

// What NCCL brings to windows of the daemon's own, and takes from there.
class PairWindows final : public ExchangeWindows {
 public:
  PairWindows(const RpcContext& rpc, std::shared_ptr<Pair> pair)
      : rpc_(rpc), pair_(std::move(pair)) {}

  TransportPath path() const override { return TransportPath::kNccl; }
  kernels::DeviceMemory& MemoryOf(const std::byte*) override {
    for (kernels::DeviceMemory* const gpu : rpc_.gpus) {
      if (gpu->uuid() == rpc_.pairs->gpu()) return *gpu;
    }
    return *rpc_.host_memory;
  }
  // Waits for the transfer: a trainer that is gone ends it, by its call or by the deadline.
  absl::Status Fetch(const v1::ArenaFill& fill) override {
    std::vector<nccl::Region> regions;
    for (const v1::Chunk& chunk : fill.chunks()) {
      regions.push_back({chunk.region().offset(), chunk.region().bytes()});
    }
    const auto arrived = std::make_shared<std::promise<absl::Status>>();
    MUOND_RETURN_IF_ERROR(
        pair_->Receive(fill.window(), fill.sequence(), regions, Deadline(),
                       [arrived](const absl::Status& status) { arrived->set_value(status); }));
    absl::Status status = arrived->get_future().get();
    if (status.ok()) return status;
    // What is left of the exchange on the trainer's side can't be told.
    rpc_.metrics->OnTransportError(TransportPath::kNccl, absl::IsDeadlineExceeded(status)
                                                             ? TransportError::kTimeout
                                                             : TransportError::kReset);
    pair_->Revoke(status);
    return absl::UnavailableError(
        absl::StrFormat("%s: push: %s", pair_->object(), status.message()));
  }
  absl::StatusOr<std::byte*> Region(std::int64_t window, const v1::ArenaRegion& region,
                                    bool to_daemon) override {
    if (!to_daemon) {
      MUOND_RETURN_IF_ERROR(pair_->AwaitSent({region.offset(), region.bytes()}, Deadline()));
    }
    return pair_->Region(window, region.offset(), region.bytes(), to_daemon);
  }
  void Release(const v1::ArenaFill&) override {}
  absl::Status Deliver(const v1::ExchangePull& pull, v1::ExchangeReply* reply) override {
    std::vector<nccl::Region> regions;
    std::vector<kernels::MoveJob> moves;
    for (const v1::ArenaRegion& region : pull.regions()) {
      MUOND_ASSIGN_OR_RETURN(const std::byte* const at, Region(pull.window(), region, false));
      regions.push_back({region.offset(), region.bytes()});
      // By halves, whatever the elements are: it is the same sum on both ends.
      moves.push_back({.src = at,
                       .elements = static_cast<std::size_t>(region.bytes()) / 2,
                       .element_bytes = 2,
                       .sum = static_cast<std::uint32_t>(moves.size())});
    }
    std::vector<std::uint64_t> sums(moves.size(), 0);
    if (!moves.empty()) {
      if (auto error = MemoryOf(static_cast<const std::byte*>(moves[0].src)).MoveAll(moves, sums)) {
        return absl::InternalError(absl::StrFormat("%s: %s", pair_->object(), error.message()));
      }
    }
    for (const std::uint64_t sum : sums) reply->add_sums(sum);
    return pair_->Send(pull.window(), regions, Deadline(), [](const absl::Status&) {});
  }
  bool announced() const override { return true; }
  std::shared_ptr<void> keepalive() const override { return pair_; }

 private:
  absl::Time Deadline() const { return SteadyNow() + rpc_.pairs->patience(); }

  const RpcContext& rpc_;
  const std::shared_ptr<Pair> pair_;
};

// The trainer is in this process.
class PointerWindows final : public ExchangeWindows {
 public:
  PointerWindows(const RpcContext& rpc, std::shared_ptr<void> lease)
      : rpc_(rpc), lease_(std::move(lease)) {}

  TransportPath path() const override { return TransportPath::kPointer; }
  kernels::DeviceMemory& MemoryOf(const std::byte* region) override {
    for (kernels::DeviceMemory* const gpu : rpc_.gpus) {
      if (gpu->Reaches(region, 0)) return *gpu;
    }
    return *rpc_.host_memory;
  }
  absl::Status Fetch(const v1::ArenaFill&) override { return absl::OkStatus(); }
  absl::StatusOr<std::byte*> Region(std::int64_t, const v1::ArenaRegion& region, bool) override {
    auto* const first = reinterpret_cast<std::byte*>(region.offset());
    const bool sane = region.bytes() >= 0 && (first != nullptr || region.bytes() == 0);
    if (sane && MemoryOf(first).Reaches(first, static_cast<std::size_t>(region.bytes()))) {
      return first;
    }
    return absl::InvalidArgumentError(absl::StrFormat(
        "pointer: %d bytes at %p are no memory that the daemon reaches", region.bytes(),
        static_cast<const void*>(first)));
  }
  void Release(const v1::ArenaFill&) override {}
  absl::Status Deliver(const v1::ExchangePull&, v1::ExchangeReply*) override {
    return absl::OkStatus();
  }
  std::shared_ptr<void> keepalive() const override { return lease_; }

 private:
  const RpcContext& rpc_;
  const std::shared_ptr<void> lease_;  // the buffers stay where they are for as long as this
};

}  // namespace

absl::StatusOr<std::unique_ptr<ExchangeWindows>> FindWindows(const RpcContext& rpc,
                                                             const std::string& peer,
                                                             const std::string& handle,
                                                             std::int64_t lease,
                                                             const std::string& run,
                                                             std::int64_t rank) {
  if (handle.empty()) {
    std::shared_ptr<void> held = IsInProcess(peer) ? PointerLease::Hold(lease) : nullptr;
    if (held != nullptr) return std::make_unique<PointerWindows>(rpc, std::move(held));
    return absl::PermissionDeniedError(absl::StrFormat(
        "run \"%s\": exchange of rank %d: pointers mean nothing from another process, or when "
        "their call has ended",
        run, rank));
  }
  if (auto pair = rpc.pairs->Find(handle, {run, rank}); pair.ok()) {
    return std::make_unique<PairWindows>(rpc, *std::move(pair));
  }
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena, rpc.arenas->Find(handle, {run, rank}));
  if (arena->gpu() != nullptr) return std::make_unique<ArenaWindows>(std::move(arena));
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: it is of host memory, which takes no part in Exchange",
                      arena->object()));
}

}  // namespace muond
