#include "server/buddy/held_state.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/crc32c.h"

namespace muond {
namespace {

// Of steps before any snapshot is here: one that is on its way may begin before them.
constexpr std::int64_t kStepsKept = 1024;
constexpr std::int64_t kReadBytesMax = std::int64_t{2} << 20;

auto Rank(const v1::BuddyAttempt& attempt) {
  return std::make_tuple(attempt.generation(), attempt.number());
}

}  // namespace

bool HeldState::Snapshot::Whole() const {
  return std::all_of(items.begin(), items.end(),
                     [](const Item& item) { return item.filled == item.bytes; });
}

HeldState::HeldState(std::function<void(std::int64_t)> count_bytes)
    : count_bytes_(std::move(count_bytes)) {}

HeldState::~HeldState() { Clear(); }

absl::StatusOr<HeldState::Item> HeldState::MakeItem(std::int64_t bytes) {
  std::shared_ptr<char[]> data;
  if (bytes >= 0) data.reset(new (std::nothrow) char[static_cast<std::size_t>(bytes)]);
  if (data == nullptr) {
    return absl::ResourceExhaustedError(
        bytes < 0 ? "buddy: an item of more bytes than there can be"
                  : absl::StrFormat("buddy: no memory for %d bytes", bytes));
  }
  bytes_ += bytes;
  count_bytes_(bytes);
  return Item{std::move(data), bytes, 0};
}

void HeldState::Drop(const Item& item) {
  bytes_ -= item.bytes;
  count_bytes_(-item.bytes);
}

void HeldState::Drop(const Snapshot& snapshot) {
  for (const Item& item : snapshot.items) Drop(item);
}

void HeldState::Drop(const Gradients& gradients) {
  for (const auto& [state, item] : gradients.items) Drop(item.second);
}

void HeldState::DropBefore(std::int64_t version) {
  while (!gradients_.empty() && gradients_.begin()->first < version) {
    Drop(gradients_.begin()->second);
    gradients_.erase(gradients_.begin());
  }
  steps_.erase(steps_.begin(), steps_.lower_bound(version));
}

void HeldState::Clear() {
  MutexLock lock(mutex_);
  ++life_;
  for (const auto* snapshot : {&whole_, &incoming_}) {
    if (*snapshot) Drop(**snapshot);
  }
  whole_.reset();
  incoming_.reset();
  for (const auto& [step, gradients] : gradients_) Drop(gradients);
  gradients_.clear();
  steps_.clear();
  index_.clear();
}

// Items are filled from front to back; a chunk that came before changes nothing.
absl::Status HeldState::Fill(const v1::BuddyChunk& chunk, Item& item) {
  const auto bytes = static_cast<std::int64_t>(chunk.data().size());
  if (chunk.offset() < 0 || chunk.offset() > item.bytes || bytes > item.bytes - chunk.offset()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("buddy: chunk at %d of %d bytes: the item has %d", chunk.offset(), bytes,
                        item.bytes));
  }
  if (Crc32c(chunk.data().data(), chunk.data().size()) != chunk.crc32c()) {
    return absl::DataLossError("buddy: chunk: crc32c differs: put it again");
  }
  if (chunk.offset() > item.filled) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "buddy: chunk at %d: the item is here up to %d", chunk.offset(), item.filled));
  }
  if (chunk.offset() + bytes <= item.filled) return absl::OkStatus();
  std::memcpy(item.data.get() + chunk.offset(), chunk.data().data(), chunk.data().size());
  item.filled = chunk.offset() + bytes;
  return absl::OkStatus();
}

absl::Status HeldState::PutSnapshot(const v1::BuddyPutRequest& request, v1::BuddyPutReply& reply) {
  const auto is = [&](const std::optional<Snapshot>& snapshot) {
    return snapshot && snapshot->version == request.snapshot();
  };
  if (is(whole_)) return absl::OkStatus();  // a repetition
  const bool same = is(incoming_) && request.tensors_size() == std::ssize(incoming_->tensors);
  if (request.start() && !same) {
    if (incoming_) Drop(*incoming_);
    incoming_ = Snapshot{.version = request.snapshot(), .tensors = {}, .items = {}};
    for (const v1::BuddyTensor& tensor : request.tensors()) {
      const absl::StatusOr<Dtype> dtype = FromProto(tensor.dtype());
      const auto size = static_cast<std::int64_t>(dtype.ok() ? DtypeBytes(*dtype) : 1);
      const bool countable = tensor.elements() <= std::numeric_limits<std::int64_t>::max() / size;
      auto item = dtype.ok() ? MakeItem(countable ? tensor.elements() * size : -1) : dtype.status();
      if (!item.ok()) {
        Drop(*incoming_);
        incoming_.reset();
        return item.status();
      }
      incoming_->tensors.push_back(tensor);
      incoming_->items.push_back(*std::move(item));
    }
  }
  if (!is(incoming_)) {
    reply.set_unknown(true);
    return absl::OkStatus();
  }
  for (const v1::BuddyChunk& chunk : request.chunks()) {
    if (chunk.item() < 0 || chunk.item() >= std::ssize(incoming_->items)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("buddy: snapshot of version %d has no item %d", request.snapshot(),
                          chunk.item()));
    }
    MUOND_RETURN_IF_ERROR(Fill(chunk, incoming_->items[chunk.item()]));
  }
  if (!incoming_->Whole()) return absl::OkStatus();
  if (whole_) Drop(*whole_);
  whole_ = std::exchange(incoming_, std::nullopt);
  index_.clear();  // an owner that sends has its state back, and reads no more
  DropBefore(whole_->version);
  return absl::OkStatus();
}

absl::Status HeldState::PutGradients(const v1::BuddyPutRequest& request,
                                     v1::BuddyPutReply& reply) {
  const v1::BuddyAttempt& attempt = request.attempt();
  if (whole_ && attempt.step() < whole_->version) return absl::OkStatus();
  Gradients& gradients = gradients_[attempt.step()];
  if (Rank(attempt) < Rank(gradients.attempt)) return absl::OkStatus();
  if (Rank(gradients.attempt) < Rank(attempt)) {
    Drop(gradients);
    gradients = {.attempt = attempt, .items = {}};
  }
  for (const v1::BuddyChunk& chunk : request.chunks()) {
    const v1::BuddyGradient& head = chunk.gradient();
    auto found = gradients.items.find(head.state());
    if (found == gradients.items.end()) {
      MUOND_ASSIGN_OR_RETURN(Item item, MakeItem(head.bytes()));
      found = gradients.items.emplace(head.state(), std::pair(head, std::move(item))).first;
    }
    MUOND_RETURN_IF_ERROR(Fill(chunk, found->second.second));
  }
  if (!request.seal()) return absl::OkStatus();
  const std::set<std::int64_t> states(request.states().begin(), request.states().end());
  gradients.sealed = gradients.items.size() == states.size() &&
                     std::all_of(gradients.items.begin(), gradients.items.end(),
                                 [&](const auto& entry) {
                                   const Item& item = entry.second.second;
                                   return states.contains(entry.first) && item.filled == item.bytes;
                                 });
  reply.set_sealed(gradients.sealed);
  return absl::OkStatus();
}

absl::StatusOr<v1::BuddyPutReply> HeldState::Put(const v1::BuddyPutRequest& request,
                                                 std::int64_t life) {
  MutexLock lock(mutex_);
  if (life != life_) return absl::AbortedError("buddy: the state was made anew: put it again");
  v1::BuddyPutReply reply;
  MUOND_RETURN_IF_ERROR(request.has_attempt() ? PutGradients(request, reply)
                                              : PutSnapshot(request, reply));
  reply.set_held(whole_ ? whole_->version : -1);
  return reply;
}

void HeldState::OnStep(v1::BuddyStep step) {
  MutexLock lock(mutex_);
  const std::int64_t number = step.step();
  steps_[number] = std::move(step);
  if (!whole_) steps_.erase(steps_.begin(), steps_.lower_bound(number - kStepsKept));
}

absl::Status HeldState::AddStep(std::int64_t step, v1::BuddyIndexReply& reply,
                                std::vector<Item>& items) const {
  const auto known = steps_.find(step);
  if (known == steps_.end()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("buddy: what became of step %d is not known here", step));
  }
  v1::BuddyStep& message = *reply.add_steps();
  message = known->second;
  if (!message.applied()) return absl::OkStatus();
  const auto found = gradients_.find(step);
  const bool there = found != gradients_.end() && found->second.sealed &&
                     found->second.attempt.generation() == message.generation();
  if (!there) {
    return absl::FailedPreconditionError(
        absl::StrFormat("buddy: the gradients of step %d, applied in generation %d, are not here",
                        step, message.generation()));
  }
  for (const auto& [state, item] : found->second.items) {
    *message.add_gradients() = item.first;
    items.push_back(item.second);
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::BuddyIndexReply> HeldState::Index(std::int64_t version) {
  MutexLock lock(mutex_);
  if (!whole_ || whole_->version > version) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "buddy: version %d can't be made: %s", version,
        whole_ ? absl::StrFormat("the snapshot is of version %d", whole_->version)
               : "no snapshot is here"));
  }
  v1::BuddyIndexReply reply;
  reply.set_snapshot(whole_->version);
  std::vector<Item> items = whole_->items;
  for (const v1::BuddyTensor& tensor : whole_->tensors) *reply.add_tensors() = tensor;
  for (std::int64_t step = whole_->version; step < version; ++step) {
    MUOND_RETURN_IF_ERROR(AddStep(step, reply, items));
  }
  index_ = std::move(items);
  return reply;
}

absl::StatusOr<v1::BuddyReadReply> HeldState::Read(const v1::BuddyReadRequest& request) const {
  MutexLock lock(mutex_);
  if (request.item() < 0 || request.item() >= std::ssize(index_) || request.offset() < 0) {
    return absl::OutOfRangeError(
        absl::StrFormat("buddy: item %d at %d: the index has %d items", request.item(),
                        request.offset(), index_.size()));
  }
  const Item& item = index_[request.item()];
  v1::BuddyReadReply reply;
  const std::int64_t rest = std::max<std::int64_t>(item.bytes - request.offset(), 0);
  const std::int64_t bytes = std::min({rest, request.bytes(), kReadBytesMax});
  if (bytes > 0) {
    reply.set_data(item.data.get() + request.offset(), static_cast<std::size_t>(bytes));
  }
  reply.set_crc32c(Crc32c(reply.data().data(), reply.data().size()));
  return reply;
}

std::int64_t HeldState::life() const {
  MutexLock lock(mutex_);
  return life_;
}

std::int64_t HeldState::bytes() const {
  MutexLock lock(mutex_);
  return bytes_;
}

}  // namespace muond
