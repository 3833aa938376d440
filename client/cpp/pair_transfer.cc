// What goes over a pair: slices out of gradients and into parameters.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/cpp/pair.h"
#include "proto/check.h"
#include "proto/convert.h"

namespace muond::client {
namespace {

constexpr std::int64_t kPlaceBytes = 64;  // regions begin at multiples

template <typename Part>
std::int64_t ElementsOf(const Part& part) {
  std::int64_t elements = 0;
  for (const ElementRange& range : part.ranges) elements += range.count;
  return elements;
}

std::int64_t UpTo(std::int64_t bytes) {
  return (bytes + kPlaceBytes - 1) / kPlaceBytes * kPlaceBytes;
}

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

// Of the pack that all other transfers need.
template <typename Part>
std::int64_t PackedBytes(const std::vector<nccl::Transfer>& plan,
                         const std::vector<const Part*>& parts) {
  std::int64_t packed = 0;
  for (const nccl::Transfer& transfer : plan) {
    if (!Direct(transfer, parts)) packed += UpTo(transfer.bytes);
  }
  return packed;
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

std::size_t PairLink::CountThatFit(std::span<const SlicePart> parts) const {
  std::int64_t used = 0;
  std::size_t count = 0;
  for (const SlicePart& part : parts) {
    const std::int64_t bytes =
        ElementsOf(part) * static_cast<std::int64_t>(DtypeBytes(part.source->dtype));
    if (bytes > window_bytes() - used) break;
    used = UpTo(used + bytes);
    ++count;
  }
  return count;
}

absl::StatusOr<std::size_t> PairLink::Send(std::span<const SlicePart> parts, absl::Time deadline,
                                           v1::ArenaFill* fill) {
  fill->Clear();
  Outgoing& outgoing = outgoing_[static_cast<std::size_t>(sequence_ % windows())];
  MUOND_RETURN_IF_ERROR(AwaitSent(outgoing, deadline));
  const v1::ArenaWindow& window = outgoing.place;
  std::int64_t used = 0;
  for (const SlicePart& part : parts.first(CountThatFit(parts))) {
    const SliceSource& source = *part.source;
    const std::int64_t bytes =
        ElementsOf(part) * static_cast<std::int64_t>(DtypeBytes(source.dtype));
    v1::Chunk* chunk = fill->add_chunks();
    chunk->set_parameter(source.parameter);
    chunk->set_slice(source.slice);
    chunk->set_micro_batch(source.micro_batch);
    chunk->set_dtype(ToProto(source.dtype));
    chunk->set_offset(part.ranges[0].first);
    chunk->mutable_region()->set_offset(window.offset() + used);
    chunk->mutable_region()->set_bytes(bytes);
    used = UpTo(used + bytes);
  }
  if (fill->chunks().empty() && !parts.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "parameter \"%s\": slice %d: it is larger than the NCCL pair's windows of %d bytes: set "
        "gpu_gradient_dtype",
        parts[0].source->parameter, parts[0].source->slice, window.bytes()));
  }
  const std::span<const SlicePart> taken =
      parts.first(static_cast<std::size_t>(fill->chunks_size()));
  MUOND_RETURN_IF_ERROR(Sum(taken, fill));
  MUOND_ASSIGN_OR_RETURN(std::vector<nccl::Exchange> groups, MakeSends(outgoing, taken, *fill));
  fill->set_arena(handle_);
  fill->set_window(outgoing.index);
  fill->set_sequence(++sequence_);
  outgoing.sent = PostAll(std::move(groups), outgoing.pack, deadline);
  return taken.size();
}

// From where they lie, or by way of the window's pack.
absl::StatusOr<std::vector<nccl::Exchange>> PairLink::MakeSends(const Outgoing& window,
                                                                std::span<const SlicePart> parts,
                                                                const v1::ArenaFill& fill) const {
  std::vector<const SlicePart*> taken;
  for (const SlicePart& part : parts) taken.push_back(&part);
  const std::vector<nccl::Transfer> plan = nccl::PlanTransfers(RegionsOf(fill));
  MUOND_ASSIGN_OR_RETURN(std::byte* pack, window.pack->Reserve(PackedBytes(plan, taken)));
  std::vector<nccl::Exchange> groups;
  for (const nccl::Transfer& transfer : plan) {
    groups.resize(transfer.group + 1);
    nccl::Exchange& group = groups.back();
    std::byte* from = pack;
    if (Direct(transfer, taken)) {
      from = Begin(*taken[transfer.first]);
    } else {
      for (std::size_t i = transfer.first; i < transfer.first + transfer.count; ++i) {
        const std::int64_t offset = fill.chunks(static_cast<int>(i)).region().offset();
        std::byte* to = pack + (offset - transfer.offset);
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
  return groups;
}

std::shared_ptr<PairWaiting> PairLink::PostAll(std::vector<nccl::Exchange> groups,
                                               std::shared_ptr<const void> keep,
                                               absl::Time deadline) {
  auto waiting = std::make_shared<PairWaiting>();
  const std::shared_ptr<void> both(nullptr, [a = std::move(keep), b = waiting](void*) {});
  for (nccl::Exchange& group : groups) {
    group.keep = both;
    group.deadline = deadline;
    group.done = waiting->One();
  }
  for (nccl::Exchange& group : groups) {
    if (const absl::Status posted = link_->Post(std::move(group)); !posted.ok()) {
      waiting->Never(posted);
    }
  }
  return waiting;
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

absl::Status PairLink::AwaitSent(Outgoing& window, absl::Time deadline) {
  if (window.sent == nullptr) return link_->status();
  if (!window.sent->Wait(deadline)) {
    link_->Abort(absl::DeadlineExceededError("NCCL: push: the daemon did not take it in time"));
    window.sent->Wait(absl::InfiniteFuture());
  }
  return std::exchange(window.sent, nullptr)->status();
}

absl::Status PairLink::AwaitSent(absl::Time deadline) {
  absl::Status first;
  for (Outgoing& window : outgoing_) {
    const absl::Status sent = AwaitSent(window, deadline);
    if (first.ok()) first = sent;
  }
  return first;
}

absl::Status PairLink::Place(std::span<const SinkPart> sinks, std::int64_t* used,
                             v1::ExchangePull* pull) {
  for (int i = 0; i < pull->regions_size(); ++i) {
    v1::ArenaRegion* const region = pull->mutable_regions(i);
    region->set_offset(incoming_.offset() + *used);
    *used = UpTo(*used + region->bytes());
  }
  if (*used > UpTo(incoming_.bytes())) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "NCCL pair: with a pull of %d slices %d bytes are taken, its window has %d", sinks.size(),
        *used, incoming_.bytes()));
  }
  pull->set_arena(handle_);
  pull->set_window(incoming_index_);
  return absl::OkStatus();
}

absl::StatusOr<PairLink::Arrival> PairLink::Receive(std::span<const SinkPart> sinks,
                                                    const v1::ExchangePull& pull,
                                                    const v1::ExchangeReply& reply,
                                                    absl::Time deadline) {
  Arrival arrival{.sinks = InOrder(sinks), .sums = {reply.sums().begin(), reply.sums().end()}};
  const std::vector<const SinkPart*>& parts = arrival.sinks;
  std::vector<nccl::Region> regions;
  for (const v1::ArenaRegion& region : pull.regions()) {
    regions.push_back({region.offset(), region.bytes()});
  }
  if (regions.size() != parts.size() || reply.sums_size() != pull.regions_size()) {
    return absl::InternalError(absl::StrFormat("NCCL: pull: %d sums for %d regions",
                                               reply.sums_size(), pull.regions_size()));
  }
  const std::vector<nccl::Transfer> plan = nccl::PlanTransfers(regions);
  const std::shared_ptr<PairPack>& in_pack = in_packs_[arrivals_++ % in_packs_.size()];
  MUOND_ASSIGN_OR_RETURN(std::byte* pack, in_pack->Reserve(PackedBytes(plan, parts)));
  std::vector<nccl::Exchange> groups;
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
          arrival.copies.push_back(
              {static_cast<std::byte*>(sink.data) + range.first * size, from, bytes});
          from += bytes;
        }
      }
      pack += UpTo(transfer.bytes);
    }
    groups.back().receives.push_back({to, static_cast<std::size_t>(transfer.bytes)});
  }
  arrival.waiting = PostAll(std::move(groups), in_pack, deadline);
  return arrival;
}

absl::Status PairLink::Settle(const Arrival& arrival) {
  arrival.waiting->Wait(absl::InfiniteFuture());  // the link keeps the deadline
  MUOND_RETURN_IF_ERROR(arrival.waiting->status());
  nccl::Device& device = worker_->device();
  for (const nccl::DeviceCopy& copy : arrival.copies) {
    MUOND_RETURN_IF_ERROR(device.Copy(copy.to, copy.from, copy.bytes, stream_));
  }
  return CheckSums(arrival);
}

absl::Status PairLink::CheckSums(const Arrival& arrival) {
  const std::vector<const SinkPart*>& sinks = arrival.sinks;
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
    const std::uint64_t announced = arrival.sums[i];
    if (got[i] == announced) continue;
    return absl::DataLossError(absl::StrFormat(
        "parameter \"%s\": pull of slice %d: what arrived has sum %016x, announced %016x",
        sinks[i]->sink->parameter, sinks[i]->sink->slice, got[i], announced));
  }
  return absl::OkStatus();
}

}  // namespace muond::client
