#include "client/cpp/pair.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/cpp/call_scope.h"
#include "nccl/library.h"
#include "nccl/warm_up.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/status.h"

namespace muond::client {
namespace {

constexpr std::int64_t kPlaceBytes = 64;  // regions begin at multiples

template <typename Part>
std::int64_t ElementsOf(const Part& part) {
  std::int64_t elements = 0;
  for (const ElementRange& range : part.ranges) elements += range.count;
  return elements;
}

std::int64_t UpTo(std::int64_t bytes) { return (bytes + kPlaceBytes - 1) / kPlaceBytes * kPlaceBytes; }

std::vector<nccl::Region> RegionsOf(const v1::ArenaFill& fill) {
  std::vector<nccl::Region> regions;
  for (const v1::Chunk& chunk : fill.chunks()) {
    regions.push_back({chunk.region().offset(), chunk.region().bytes()});
  }
  return regions;
}

// What can be sent from where it lies: all of a transfer, in one range.
template <typename Part>
bool Direct(const nccl::Transfer& transfer, const std::vector<const Part*>& parts) {
  return transfer.count == 1 && transfer.bytes >= nccl::kAloneBytes &&
         parts[transfer.first]->ranges.size() == 1;
}

std::byte* Begin(const SlicePart& part) {
  const SliceSource& source = *part.source;
  return const_cast<std::byte*>(static_cast<const std::byte*>(source.data)) +
         part.ranges[0].first * static_cast<std::int64_t>(DtypeBytes(source.dtype));
}
std::byte* Begin(const SinkPart& part) {
  const SliceSink& sink = *part.sink;
  return static_cast<std::byte*>(sink.data) +
         part.ranges[0].first * static_cast<std::int64_t>(DtypeBytes(sink.dtype));
}

}  // namespace

struct PairLink::Waiting {
  std::mutex mutex;
  std::condition_variable changed;
  int left = 0;
  absl::Status status;

  nccl::Done One() {
    ++left;  // before it is posted
    return [this](const absl::Status& ended) {
      std::lock_guard lock(mutex);
      if (status.ok()) status = ended;
      --left;
      changed.notify_all();
    };
  }
  // What was not posted does not come.
  void Never(const absl::Status& why) {
    std::lock_guard lock(mutex);
    if (status.ok()) status = why;
    --left;
  }
  bool Wait(absl::Time deadline) {
    std::unique_lock lock(mutex);
    return changed.wait_until(lock, absl::ToChronoTime(deadline), [this] { return left == 0; });
  }
};

PairLink::Pack::~Pack() {
  if (data_ != nullptr) device_->Free(data_);
}

absl::StatusOr<std::byte*> PairLink::Pack::Reserve(std::int64_t bytes) {
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
  std::shared_ptr<PairLink> link(new PairLink(opened.handle(), worker));
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
  if (sent_ != nullptr) sent_->Wait(absl::InfiniteFuture());
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
      outgoing_.push_back(window);
      indices_.push_back(i);
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
  out_pack_ = std::make_shared<Pack>(worker_->shared_device());
  in_pack_ = std::make_shared<Pack>(worker_->shared_device());
  const auto warm = static_cast<std::int64_t>(nccl::kWarmUpBytes);
  MUOND_ASSIGN_OR_RETURN(std::byte* const out, out_pack_->Reserve(warm));
  MUOND_ASSIGN_OR_RETURN(std::byte* const in, in_pack_->Reserve(warm));
  link_ = worker_->Connect(id, 1, deadline, [](const absl::Status&) {});
  sent_ = std::make_shared<Waiting>();
  const std::shared_ptr<void> keep(nullptr, [a = out_pack_, b = in_pack_, c = sent_](void*) {});
  nccl::WarmUp(worker_->shared_device(), *link_, handle_, 1,
               {out, static_cast<std::size_t>(outgoing_[0].bytes())},
               {in, static_cast<std::size_t>(incoming_.bytes())}, keep, deadline, sent_->One());
  sent_->Wait(absl::InfiniteFuture());  // the link keeps the deadline
  const absl::Status met = sent_->status;
  sent_ = nullptr;
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

absl::StatusOr<std::size_t> PairLink::Send(std::span<const SlicePart> parts, absl::Time deadline,
                                           v1::ArenaFill* fill) {
  MUOND_RETURN_IF_ERROR(AwaitSent(deadline));
  fill->Clear();
  const auto next = static_cast<std::size_t>(sequence_ % windows());
  const v1::ArenaWindow& window = outgoing_[next];
  std::vector<const SlicePart*> taken;
  std::int64_t used = 0;
  for (const SlicePart& part : parts) {
    const SliceSource& source = *part.source;
    const std::int64_t bytes =
        ElementsOf(part) * static_cast<std::int64_t>(DtypeBytes(source.dtype));
    if (bytes > window.bytes() - used) break;
    v1::Chunk* chunk = fill->add_chunks();
    chunk->set_parameter(source.parameter);
    chunk->set_slice(source.slice);
    chunk->set_micro_batch(source.micro_batch);
    chunk->set_dtype(ToProto(source.dtype));
    chunk->set_offset(part.ranges[0].first);
    chunk->mutable_region()->set_offset(window.offset() + used);
    chunk->mutable_region()->set_bytes(bytes);
    taken.push_back(&part);
    used = UpTo(used + bytes);
  }
  if (taken.empty() && !parts.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "parameter \"%s\": slice %d: it is larger than the NCCL pair's windows of %d bytes: set "
        "gpu_gradient_dtype",
        parts[0].source->parameter, parts[0].source->slice, window.bytes()));
  }
  MUOND_RETURN_IF_ERROR(Sum(parts.first(taken.size()), fill));

  const std::vector<nccl::Transfer> plan = nccl::PlanTransfers(RegionsOf(*fill));
  std::int64_t packed = 0;
  for (const nccl::Transfer& transfer : plan) {
    if (!Direct(transfer, taken)) packed += UpTo(transfer.bytes);
  }
  MUOND_ASSIGN_OR_RETURN(std::byte* pack, out_pack_->Reserve(packed));
  std::vector<nccl::Exchange> groups;
  for (const nccl::Transfer& transfer : plan) {
    groups.resize(transfer.group + 1);
    nccl::Exchange& group = groups.back();
    std::byte* from = pack;
    if (Direct(transfer, taken)) {
      from = Begin(*taken[transfer.first]);
    } else {
      for (std::size_t i = transfer.first; i < transfer.first + transfer.count; ++i) {
        std::byte* to = pack + (fill->chunks(static_cast<int>(i)).region().offset() -
                                transfer.offset);
        const auto size = static_cast<std::int64_t>(DtypeBytes(taken[i]->source->dtype));
        const auto* const data = static_cast<const std::byte*>(taken[i]->source->data);
        for (const ElementRange& range : taken[i]->ranges) {
          const auto bytes = static_cast<std::size_t>(range.count * size);
          group.copies.push_back({to, data + range.first * size, bytes});
          to += bytes;
        }
      }
      pack += UpTo(transfer.bytes);
    }
    group.sends.push_back({from, static_cast<std::size_t>(transfer.bytes)});
  }
  fill->set_arena(handle_);
  fill->set_window(indices_[next]);
  fill->set_sequence(++sequence_);
  sent_ = std::make_shared<Waiting>();
  const std::shared_ptr<void> keep(nullptr, [a = out_pack_, b = sent_](void*) {});
  for (nccl::Exchange& group : groups) {
    group.keep = keep;
    group.deadline = deadline;
    group.done = sent_->One();
  }
  for (nccl::Exchange& group : groups) {
    if (const absl::Status posted = link_->Post(std::move(group)); !posted.ok()) {
      sent_->Never(posted);
    }
  }
  return taken.size();
}

absl::Status PairLink::Sum(std::span<const SlicePart> parts, v1::ArenaFill* fill) {
  std::vector<nccl::SumJob> jobs;
  std::vector<int> chunks;  // of each job
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const SliceSource& source = *parts[i].source;
    const auto size = static_cast<std::int64_t>(DtypeBytes(source.dtype));
    std::uint64_t first = 0;
    for (const ElementRange& range : parts[i].ranges) {
      jobs.push_back({static_cast<const std::byte*>(source.data) + range.first * size,
                      static_cast<std::uint64_t>(range.count), first,
                      static_cast<std::uint64_t>(size)});
      chunks.push_back(static_cast<int>(i));
      first += static_cast<std::uint64_t>(range.count);
    }
  }
  std::vector<std::uint64_t> sums(jobs.size(), 0);
  MUOND_RETURN_IF_ERROR(worker_->device().Sum(jobs, sums, stream_));
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    v1::Chunk* const chunk = fill->mutable_chunks(chunks[i]);
    chunk->set_sum(chunk->sum() + sums[i]);
  }
  return absl::OkStatus();
}

absl::Status PairLink::AwaitSent(absl::Time deadline) {
  if (sent_ == nullptr) return link_->status();
  if (!sent_->Wait(deadline)) {
    link_->Abort(absl::DeadlineExceededError("NCCL: push: the daemon did not take it in time"));
    sent_->Wait(absl::InfiniteFuture());
  }
  const absl::Status status = sent_->status;
  sent_ = nullptr;
  return status;
}

absl::Status PairLink::Place(std::span<const SinkPart> sinks, v1::ExchangePull* pull) {
  std::int64_t used = 0;
  for (int i = 0; i < pull->regions_size(); ++i) {
    v1::ArenaRegion* const region = pull->mutable_regions(i);
    region->set_offset(incoming_.offset() + used);
    used = UpTo(used + region->bytes());
  }
  if (used > UpTo(incoming_.bytes())) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "NCCL pair: a pull of %d slices takes %d bytes, its window has %d", sinks.size(), used,
        incoming_.bytes()));
  }
  pull->set_arena(handle_);
  pull->set_window(incoming_index_);
  return absl::OkStatus();
}

namespace {

// The sinks in the order of a pull's regions: by name, then as they were listed.
std::vector<const SinkPart*> InOrder(std::span<const SinkPart> sinks) {
  std::vector<const SinkPart*> ordered;
  for (const SinkPart& sink : sinks) ordered.push_back(&sink);
  std::stable_sort(ordered.begin(), ordered.end(), [](const SinkPart* a, const SinkPart* b) {
    return a->sink->parameter < b->sink->parameter;
  });
  return ordered;
}

}  // namespace

absl::Status PairLink::Receive(std::span<const SinkPart> sinks, const v1::ExchangePull& pull,
                               const v1::ExchangeReply& reply, absl::Time deadline) {
  const std::vector<const SinkPart*> parts = InOrder(sinks);
  std::vector<nccl::Region> regions;
  for (const v1::ArenaRegion& region : pull.regions()) {
    regions.push_back({region.offset(), region.bytes()});
  }
  if (regions.size() != parts.size() || reply.sums_size() != pull.regions_size()) {
    return absl::InternalError(absl::StrFormat("NCCL: pull: %d sums for %d regions",
                                               reply.sums_size(), pull.regions_size()));
  }
  const std::vector<nccl::Transfer> plan = nccl::PlanTransfers(regions);
  std::int64_t packed = 0;
  for (const nccl::Transfer& transfer : plan) {
    if (!Direct(transfer, parts)) packed += UpTo(transfer.bytes);
  }
  MUOND_ASSIGN_OR_RETURN(std::byte* pack, in_pack_->Reserve(packed));
  std::vector<nccl::Exchange> groups;
  std::vector<nccl::DeviceCopy> copies;  // out of the pack, afterwards
  for (const nccl::Transfer& transfer : plan) {
    groups.resize(transfer.group + 1);
    std::byte* to = pack;
    if (Direct(transfer, parts)) {
      to = Begin(*parts[transfer.first]);
    } else {
      for (std::size_t i = transfer.first; i < transfer.first + transfer.count; ++i) {
        const std::byte* from = pack + (regions[i].offset - transfer.offset);
        const SliceSink& sink = *parts[i]->sink;
        const auto size = static_cast<std::int64_t>(DtypeBytes(sink.dtype));
        for (const ElementRange& range : parts[i]->ranges) {
          const auto bytes = static_cast<std::size_t>(range.count * size);
          copies.push_back(
              {static_cast<std::byte*>(sink.data) + range.first * size, from, bytes});
          from += bytes;
        }
      }
      pack += UpTo(transfer.bytes);
    }
    groups.back().receives.push_back({to, static_cast<std::size_t>(transfer.bytes)});
  }
  const auto waiting = std::make_shared<Waiting>();
  const std::shared_ptr<void> keep(nullptr, [a = in_pack_, b = waiting](void*) {});
  for (nccl::Exchange& group : groups) {
    group.keep = keep;
    group.deadline = deadline;
    group.done = waiting->One();
  }
  for (nccl::Exchange& group : groups) {
    if (const absl::Status posted = link_->Post(std::move(group)); !posted.ok()) {
      waiting->Never(posted);
    }
  }
  waiting->Wait(absl::InfiniteFuture());  // the link keeps the deadline
  MUOND_RETURN_IF_ERROR(waiting->status);
  nccl::Device& device = worker_->device();
  for (const nccl::DeviceCopy& copy : copies) {
    MUOND_RETURN_IF_ERROR(device.Copy(copy.to, copy.from, copy.bytes, stream_));
  }
  return CheckSums(parts, reply);
}

absl::Status PairLink::CheckSums(std::span<const SinkPart* const> sinks,
                                 const v1::ExchangeReply& reply) {
  std::vector<nccl::SumJob> jobs;
  std::vector<std::size_t> owners;
  for (std::size_t i = 0; i < sinks.size(); ++i) {
    const SliceSink& sink = *sinks[i]->sink;
    const auto size = static_cast<std::int64_t>(DtypeBytes(sink.dtype));
    std::uint64_t first = 0;  // in halves, as the daemon takes them
    for (const ElementRange& range : sinks[i]->ranges) {
      const auto halves = static_cast<std::uint64_t>(range.count * size / 2);
      jobs.push_back({static_cast<const std::byte*>(sink.data) + range.first * size, halves, first,
                      2});
      owners.push_back(i);
      first += halves;
    }
  }
  std::vector<std::uint64_t> sums(jobs.size(), 0), got(sinks.size(), 0);
  MUOND_RETURN_IF_ERROR(worker_->device().Sum(jobs, sums, stream_));
  for (std::size_t i = 0; i < jobs.size(); ++i) got[owners[i]] += sums[i];
  for (std::size_t i = 0; i < sinks.size(); ++i) {
    const std::uint64_t announced = reply.sums(static_cast<int>(i));
    if (got[i] == announced) continue;
    return absl::DataLossError(absl::StrFormat(
        "parameter \"%s\": pull of slice %d: what arrived has sum %016x, announced %016x",
        sinks[i]->sink->parameter, sinks[i]->sink->slice, got[i], announced));
  }
  return absl::OkStatus();
}

}  // namespace muond::client
