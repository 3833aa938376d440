// One pair of NCCL ranks, this daemon's end: staging windows on its GPU, what lies where in them,
// and the checks of everything that the trainer says about them.
//
// The contract is that of an arena in the memory of a GPU (gpu_arena.h), but nobody else maps the
// windows: what a trainer sends is received there, what it gets is sent from there. A message names
// window, sequence number and contents; both ends make the same list of transfers of it
// (nccl/transfer_plan.h) and hand it to NCCL in one group. What has arrived counts only if it has
// the sums that were announced: an end that moves nothing, or something else, is found out.
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "nccl/link.h"
#include "nccl/transfer_plan.h"
#include "proto/mutex.h"
#include "server/transport/arena.h"

namespace muond {

struct PairSize {
  std::int64_t window_bytes = 0;  // of each towards the daemon
  std::int64_t windows = 0;       // of those
  std::int64_t pull_bytes = 0;    // of the one towards the trainer
};

// The windows, those to the daemon first, and the GPU memory of them all. Slots are 0: there are
// none. INVALID_ARGUMENT for sizes that are no multiple of 256, not positive or too many.
absl::StatusOr<ArenaLayout> LayOutPair(const PairSize& size);

class Pair : public std::enable_shared_from_this<Pair> {
 public:
  using Done = std::function<void(const absl::Status&)>;
  // `freed` is called with the windows' bytes when they are. RESOURCE_EXHAUSTED when the GPU has no
  // memory left.
  static absl::StatusOr<std::shared_ptr<Pair>> Create(ArenaOwner owner, ArenaLayout layout,
                                                      std::shared_ptr<nccl::Worker> worker,
                                                      std::function<void(std::int64_t)> freed);
  ~Pair();

  const std::string& handle() const { return handle_; }  // random; a secret of the trainer
  const ArenaOwner& owner() const { return owner_; }
  const ArenaLayout& layout() const { return layout_; }
  std::string object() const;  // for messages: run "r": NCCL pair of rank 3

  // Meets the trainer under this id, and exchanges a pattern with it in both directions, by the
  // deadline. `ready` hears whether that went well; else the pair is revoked.
  void Connect(const nccl::UniqueId& id, absl::Time deadline, Done ready);

  // From here on every use is refused with `why`, and what is under way ends with it.
  void Revoke(const absl::Status& why);
  // Hears of the first Revoke, once, with the pair's name in the reason; at once if it has been.
  void OnRevoked(Done done);
  // OK, or why no use is left in it.
  absl::Status status() const;

  // Where a region of a window lies on the GPU. INVALID_ARGUMENT when it is not inside, or the
  // window is one of the other direction; FAILED_PRECONDITION when the pair is revoked.
  absl::StatusOr<std::byte*> Region(std::int64_t window, std::int64_t offset, std::int64_t bytes,
                                    bool to_daemon) const;

  // Takes what the trainer sends into a window for the sequence-th time; fills are taken in the
  // order 1, 2, ...: one that comes early waits for its turn, until `deadline`. `regions` are
  // inside the window and ascend. `done` hears when all is there, or why not, on NCCL's thread: it
  // must be short. Not OK, which `done` does not hear: INVALID_ARGUMENT for regions or a window
  // that make no sense, FAILED_PRECONDITION for a fill that was there before, or why the pair is
  // broken.
  absl::Status Receive(std::int64_t window, std::int64_t sequence,
                       const std::vector<nccl::Region>& regions, absl::Time deadline,
                       const Done& done);
  // Sends regions of the window towards the trainer, behind what is being sent; nobody may write
  // there until `done` is called. Not OK: it was not begun; UNAVAILABLE while one of them is still
  // on its way for another list.
  absl::Status Send(std::int64_t window, const std::vector<nccl::Region>& regions,
                    absl::Time deadline, const Done& done);
  // Returns when no byte of the region is being sent. UNAVAILABLE after `deadline`.
  absl::Status AwaitSent(const nccl::Region& region, absl::Time deadline);

 private:
  struct Windows;
  Pair(ArenaOwner owner, ArenaLayout layout, std::shared_ptr<nccl::Worker> worker,
       std::string handle, std::shared_ptr<Windows> windows);
  absl::Status CheckRegions(std::int64_t window, std::span<const nccl::Region> regions,
                            bool to_daemon) const;
  // One group of transfers behind the other; `done` is the last one's.
  std::vector<nccl::Exchange> Groups(const std::vector<nccl::Region>& regions, bool to_daemon,
                                     absl::Time deadline, const Done& done) const;
  // The lock is held all along: two threads that bring two fills must not mix their groups.
  absl::Status PostAll(std::vector<nccl::Exchange> groups) MUOND_REQUIRES(mutex_);
  bool BeingSent(const nccl::Region& region) const MUOND_REQUIRES(mutex_);

  const ArenaOwner owner_;
  const ArenaLayout layout_;
  const std::shared_ptr<nccl::Worker> worker_;
  const std::string handle_;
  const std::shared_ptr<Windows> windows_;

  mutable Mutex mutex_;
  std::shared_ptr<nccl::Link> link_ MUOND_GUARDED_BY(mutex_);
  absl::Status revoked_ MUOND_GUARDED_BY(mutex_);
  std::int64_t next_ MUOND_GUARDED_BY(mutex_) = 1;  // fill that is received next
  // From each list's first byte to its last, in order.
  std::deque<nccl::Region> sending_ MUOND_GUARDED_BY(mutex_);
  Done on_revoked_ MUOND_GUARDED_BY(mutex_);
  CondVar changed_;  // next_, sending_, revoked_
};

}  // namespace muond
