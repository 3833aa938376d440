// What a daemon holds for the one before it in the list, of one run: a snapshot of that daemon's
// state, the reduced gradients of every step since, and what became of those steps.
//
// A snapshot comes in pieces and counts once it is whole; then the one before, and all that is
// older than it, goes. What a dead owner left is enough to bring its state to any version from the
// snapshot's to the one after the last sealed step.
//
// Thread rule: any thread; one mutex, held while a chunk is copied.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "muond/v1/buddy.pb.h"
#include "proto/mutex.h"

namespace muond {

class HeldState {
 public:
  // `count_bytes` is told by how much the memory held here has changed.
  explicit HeldState(std::function<void(std::int64_t)> count_bytes);
  ~HeldState();

  // DATA_LOSS when a chunk is not what was sent; INVALID_ARGUMENT for one outside of its item.
  // Chunks of what was overtaken are ignored. ABORTED when all was cleared since `life` was asked
  // for: whoever checked the request's lineage then must check again.
  absl::StatusOr<v1::BuddyPutReply> Put(const v1::BuddyPutRequest& request, std::int64_t life);
  std::int64_t life() const;
  // What became of a step on this daemon, and so on all.
  void OnStep(v1::BuddyStep step);
  // The run's state was made anew: nothing of before has a meaning.
  void Clear();

  // All that brings the owner to `version`, but the control. FAILED_PRECONDITION that says what is
  // missing. What it names can be read until the next call.
  absl::StatusOr<v1::BuddyIndexReply> Index(std::int64_t version);
  // OUT_OF_RANGE for an item that the last Index did not name.
  absl::StatusOr<v1::BuddyReadReply> Read(const v1::BuddyReadRequest& request) const;

  std::int64_t bytes() const;

 private:
  // Uninitialized: every byte is written by a chunk.
  struct Item {
    std::shared_ptr<char[]> data;
    std::int64_t bytes = 0, filled = 0;
  };
  struct Snapshot {
    std::int64_t version = -1;
    std::vector<v1::BuddyTensor> tensors;
    std::vector<Item> items;
    bool Whole() const;
  };
  struct Gradients {
    v1::BuddyAttempt attempt;
    std::map<std::int64_t, std::pair<v1::BuddyGradient, Item>> items;  // by state
    bool sealed = false;
  };

  absl::StatusOr<Item> MakeItem(std::int64_t bytes) MUOND_REQUIRES(mutex_);
  void Drop(const Item& item) MUOND_REQUIRES(mutex_);
  void Drop(const Snapshot& snapshot) MUOND_REQUIRES(mutex_);
  void Drop(const Gradients& gradients) MUOND_REQUIRES(mutex_);
  void DropBefore(std::int64_t version) MUOND_REQUIRES(mutex_);
  absl::Status Fill(const v1::BuddyChunk& chunk, Item& item);
  absl::Status PutSnapshot(const v1::BuddyPutRequest& request, v1::BuddyPutReply& reply)
      MUOND_REQUIRES(mutex_);
  absl::Status PutGradients(const v1::BuddyPutRequest& request, v1::BuddyPutReply& reply)
      MUOND_REQUIRES(mutex_);
  absl::Status AddStep(std::int64_t step, v1::BuddyIndexReply& reply,
                       std::vector<Item>& items) const MUOND_REQUIRES(mutex_);

  const std::function<void(std::int64_t)> count_bytes_;
  mutable Mutex mutex_;
  std::int64_t life_ MUOND_GUARDED_BY(mutex_) = 0;  // how often all was cleared
  std::int64_t bytes_ MUOND_GUARDED_BY(mutex_) = 0;
  std::optional<Snapshot> whole_ MUOND_GUARDED_BY(mutex_);
  std::optional<Snapshot> incoming_ MUOND_GUARDED_BY(mutex_);
  std::map<std::int64_t, Gradients> gradients_ MUOND_GUARDED_BY(mutex_);  // by step
  std::map<std::int64_t, v1::BuddyStep> steps_ MUOND_GUARDED_BY(mutex_);
  std::vector<Item> index_ MUOND_GUARDED_BY(mutex_);
};

}  // namespace muond
