// The NCCL pairs of a daemon: with whom it may make one, who has which, and how many there may be.
//
// A pair is opened for a rank by OpenPair and closed when that call ends, when the rank opens
// another or leaves its run. NCCL and the GPU are looked for when the table is made: without them
// it says why there are no pairs.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "nccl/library.h"
#include "nccl/link.h"
#include "proto/mutex.h"
#include "server/transport/pair.h"

namespace muond {

// NCCL, and the GPU whose pairs these are.
struct NcclPlatform {
  const nccl::Library* library = nullptr;
  std::shared_ptr<nccl::Device> device;
};

struct PairLimits {
  std::int64_t count_max = 256;
  // Within which a trainer must have joined, and every exchange have ended.
  absl::Duration patience = absl::Seconds(20);
};

// What a trainer says of itself.
struct PairTrainer {
  int nccl_version = 0;
  std::string gpu;  // UUID
};

class PairTable {
 public:
  // `changed` hears of every change: how many pairs there are, and their windows' bytes.
  using Observer = std::function<void(std::int64_t pairs, std::int64_t bytes)>;
  // A status instead of the platform: why there are no pairs.
  PairTable(absl::StatusOr<NcclPlatform> platform, const PairLimits& limits,
            Observer changed = nullptr);
  ~PairTable();

  // 0: there is no NCCL here.
  int nccl_version() const;
  std::string gpu() const;  // UUID; empty: none
  absl::Duration patience() const { return limits_.patience; }

  // OK iff a pair with this trainer is possible. INVALID_ARGUMENT for a trainer on the daemon's own
  // GPU, which NCCL does not join; FAILED_PRECONDITION for another version, a trainer without NCCL
  // or without a GPU, or a daemon without.
  absl::Status Check(const PairTrainer& trainer) const;

  // Replaces the owner's former pair. Errors: those of Check and LayOutPair; RESOURCE_EXHAUSTED
  // when the limit is reached or the GPU's memory is out; UNAVAILABLE when NCCL gives no id. `id`
  // is for the trainer, which has `patience` to join.
  absl::StatusOr<std::shared_ptr<Pair>> Open(const ArenaOwner& owner, const PairTrainer& trainer,
                                             const PairSize& size, nccl::UniqueId* id);
  // FAILED_PRECONDITION when there is no such pair (it was let go of), or it is another owner's.
  absl::StatusOr<std::shared_ptr<Pair>> Find(const std::string& handle,
                                             const ArenaOwner& owner) const;
  // Ends what is under way with `why`.
  void Close(const ArenaOwner& owner, const absl::Status& why);
  // Only if the owner's pair has this handle.
  void CloseHandle(const std::string& handle, const ArenaOwner& owner, const absl::Status& why);

  // The daemon goes away: all of them, and no more are made.
  void CloseAll(const absl::Status& why);

  std::int64_t pairs() const;
  std::int64_t bytes() const;  // of all that are not freed yet

 private:
  struct Books;  // outlives the table, for memory that NCCL still has
  std::shared_ptr<nccl::Worker> TheWorker() MUOND_REQUIRES(mutex_);
  // Takes it out of the table; it is revoked by the caller, without the lock.
  std::shared_ptr<Pair> Erase(std::map<ArenaOwner, std::shared_ptr<Pair>>::iterator entry)
      MUOND_REQUIRES(mutex_);

  const absl::StatusOr<NcclPlatform> platform_;
  const PairLimits limits_;
  const std::shared_ptr<Books> books_;
  mutable Mutex mutex_;
  std::shared_ptr<nccl::Worker> worker_ MUOND_GUARDED_BY(mutex_);  // from the first pair on
  std::map<ArenaOwner, std::shared_ptr<Pair>> pairs_ MUOND_GUARDED_BY(mutex_);
  absl::Status closed_ MUOND_GUARDED_BY(mutex_);
};

}  // namespace muond
