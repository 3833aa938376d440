#include "server/transport/pair_table.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/check.h"

namespace muond {

struct PairTable::Books {
  std::atomic<std::int64_t> pairs{0}, bytes{0};
  Observer changed;

  void Tell() const {
    if (changed != nullptr) changed(pairs, bytes);
  }
};

PairTable::PairTable(absl::StatusOr<NcclPlatform> platform, const PairLimits& limits,
                     Observer changed)
    : platform_(std::move(platform)), limits_(limits), books_(std::make_shared<Books>()) {
  books_->changed = std::move(changed);
}

PairTable::~PairTable() { CloseAll(absl::UnavailableError("the daemon stops")); }

int PairTable::nccl_version() const { return platform_.ok() ? platform_->library->version : 0; }

std::string PairTable::gpu() const { return platform_.ok() ? platform_->device->uuid() : ""; }

absl::Status PairTable::Check(const PairTrainer& trainer) const {
  if (trainer.gpu.empty()) {
    return absl::FailedPreconditionError("NCCL: the trainer's values are not on a GPU");
  }
  MUOND_RETURN_IF_ERROR(platform_.status());
  if (trainer.gpu == platform_->device->uuid()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "NCCL: trainer and daemon are on one GPU (%s): NCCL refuses two ranks there; share its "
        "memory instead (transport \"cuda-ipc\")",
        trainer.gpu));
  }
  return nccl::CheckVersions(platform_->library->version, trainer.nccl_version);
}

std::shared_ptr<nccl::Worker> PairTable::TheWorker() {
  if (worker_ == nullptr) {
    worker_ = std::make_shared<nccl::Worker>(platform_->library->api, platform_->device);
  }
  return worker_;
}

absl::StatusOr<std::shared_ptr<Pair>> PairTable::Open(const ArenaOwner& owner,
                                                      const PairTrainer& trainer,
                                                      const PairSize& size, nccl::UniqueId* id) {
  MUOND_RETURN_IF_ERROR(Check(trainer));
  MUOND_ASSIGN_OR_RETURN(ArenaLayout layout, LayOutPair(size));
  Close(owner, absl::FailedPreconditionError("the rank has opened another"));
  MutexLock lock(mutex_);
  MUOND_RETURN_IF_ERROR(closed_);
  if (std::ssize(pairs_) >= limits_.count_max) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("run \"%s\": NCCL pair of rank %d: the daemon has %d (--max-arenas)",
                        owner.run, owner.rank, limits_.count_max));
  }
  const std::int64_t bytes = layout.gpu_bytes;
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<Pair> pair,
                         Pair::Create(owner, std::move(layout), TheWorker(),
                                      [books = books_](std::int64_t freed) {
                                        books->bytes -= freed;
                                        books->Tell();
                                      }));
  books_->bytes += bytes;
  const nccl::Result result = platform_->library->api.get_unique_id(id);
  if (result != nccl::Result::kSuccess) {
    return absl::UnavailableError(
        absl::StrFormat("%s: ncclGetUniqueId: %s", pair->object(), nccl::ResultName(result)));
  }
  pairs_[owner] = pair;
  ++books_->pairs;
  books_->Tell();
  return pair;
}

absl::StatusOr<std::shared_ptr<Pair>> PairTable::Find(const std::string& handle,
                                                      const ArenaOwner& owner) const {
  MutexLock lock(mutex_);
  const auto found = pairs_.find(owner);
  if (found != pairs_.end() && found->second->handle() == handle) return found->second;
  return absl::FailedPreconditionError(absl::StrFormat(
      "run \"%s\": NCCL pair of rank %d: it has none with this handle: open one", owner.run,
      owner.rank));
}

std::shared_ptr<Pair> PairTable::Erase(
    std::map<ArenaOwner, std::shared_ptr<Pair>>::iterator entry) {
  std::shared_ptr<Pair> pair = std::move(entry->second);
  pairs_.erase(entry);
  --books_->pairs;
  books_->Tell();
  return pair;
}

void PairTable::Close(const ArenaOwner& owner, const absl::Status& why) {
  std::shared_ptr<Pair> pair;
  {
    MutexLock lock(mutex_);
    if (const auto found = pairs_.find(owner); found != pairs_.end()) pair = Erase(found);
  }
  if (pair != nullptr) pair->Revoke(why);
}

void PairTable::CloseHandle(const std::string& handle, const ArenaOwner& owner,
                            const absl::Status& why) {
  std::shared_ptr<Pair> pair;
  {
    MutexLock lock(mutex_);
    const auto found = pairs_.find(owner);
    if (found != pairs_.end() && found->second->handle() == handle) pair = Erase(found);
  }
  if (pair != nullptr) pair->Revoke(why);
}

void PairTable::CloseAll(const absl::Status& why) {
  std::vector<std::shared_ptr<Pair>> all;
  {
    MutexLock lock(mutex_);
    closed_ = why;
    while (!pairs_.empty()) all.push_back(Erase(pairs_.begin()));
  }
  for (const auto& pair : all) pair->Revoke(why);
}

std::int64_t PairTable::pairs() const { return books_->pairs; }

std::int64_t PairTable::bytes() const { return books_->bytes; }

}  // namespace muond
