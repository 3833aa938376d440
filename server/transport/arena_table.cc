#include "server/transport/arena_table.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/transport/gpu_arena.h"

namespace muond {

struct ArenaTable::Books {
  std::atomic<std::int64_t> bytes{0}, attached{0}, gpu_bytes{0}, gpu_attached{0};
  Observer changed, gpu_changed;

  void Tell() const {
    if (changed != nullptr) changed(attached, bytes);
    if (gpu_changed != nullptr) gpu_changed(gpu_attached, gpu_bytes);
  }
  std::atomic<std::int64_t>& AttachedOf(const Arena& arena) {
    return arena.gpu() == nullptr ? attached : gpu_attached;
  }
};

ArenaTable::ArenaTable(const ArenaLimits& limits, Observer changed, Observer gpu_changed)
    : limits_(limits), books_(std::make_shared<Books>()) {
  books_->changed = std::move(changed);
  books_->gpu_changed = std::move(gpu_changed);
}

void ArenaTable::Tell() const { books_->Tell(); }

absl::StatusOr<std::shared_ptr<Arena>> ArenaTable::Open(const ArenaOwner& owner,
                                                        const ArenaSize& size, absl::Time now) {
  MutexLock lock(mutex_);
  if (const auto former = entries_.find(owner); former != entries_.end()) Erase(former);
  if (std::ssize(entries_) >= limits_.count_max) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("run \"%s\": arena of rank %d: the daemon has %d already (--max-arenas)",
                        owner.run, owner.rank, limits_.count_max));
  }
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena, Make(owner, size));
  entries_[owner] = {.arena = arena, .attach_until = now + limits_.attach_within};
  Tell();
  return arena;
}

absl::StatusOr<std::shared_ptr<Arena>> ArenaTable::Make(const ArenaOwner& owner,
                                                        const ArenaSize& size) {
  std::unique_ptr<GpuBlock> block;
  ArenaLayout layout;
  if (size.gpu != nullptr) {
    MUOND_ASSIGN_OR_RETURN(layout, LayOutGpuArena(size));
    MUOND_ASSIGN_OR_RETURN(block, GpuBlock::Allocate(*size.gpu, layout.gpu_bytes));
  } else {
    MUOND_ASSIGN_OR_RETURN(layout, LayOutArena(size, limits_.bytes_max - books_->bytes));
  }
  const std::int64_t bytes = layout.bytes, gpu_bytes = layout.gpu_bytes;
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena,
                         Arena::Create(
                             owner, std::move(layout),
                             [books = books_, gpu_bytes](std::int64_t n) {
                               books->bytes -= n;
                               books->gpu_bytes -= gpu_bytes;
                               books->Tell();
                             },
                             std::move(block)));
  books_->bytes += bytes;
  books_->gpu_bytes += gpu_bytes;
  return arena;
}

void ArenaTable::Erase(std::map<ArenaOwner, Entry>::iterator entry) {
  entry->second.arena->Revoke();
  if (entry->second.attached) --books_->AttachedOf(*entry->second.arena);
  entries_.erase(entry);
  Tell();
}

ArenaTable::Entry* ArenaTable::Lookup(const std::string& handle) {
  for (auto& [owner, entry] : entries_) {
    if (entry.arena->handle() == handle) return &entry;
  }
  return nullptr;
}

absl::StatusOr<std::shared_ptr<Arena>> ArenaTable::Find(const std::string& handle,
                                                        const ArenaOwner& owner) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(owner);
  if (found != entries_.end() && found->second.attached &&
      found->second.arena->handle() == handle) {
    return found->second.arena;
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "run \"%s\": arena of rank %d: it has none with this handle: open one", owner.run,
      owner.rank));
}

void ArenaTable::Close(const ArenaOwner& owner) {
  MutexLock lock(mutex_);
  if (const auto found = entries_.find(owner); found != entries_.end()) Erase(found);
}

void ArenaTable::CloseHandle(const std::string& handle, const ArenaOwner& owner) {
  MutexLock lock(mutex_);
  const auto found = entries_.find(owner);
  if (found != entries_.end() && found->second.arena->handle() == handle) Erase(found);
}

absl::StatusOr<std::shared_ptr<Arena>> ArenaTable::Attach(const std::string& handle) {
  MutexLock lock(mutex_);
  Entry* const entry = Lookup(handle);
  if (entry == nullptr || entry->attached) {
    return absl::PermissionDeniedError("no arena waits for this handle");
  }
  entry->attached = true;
  ++books_->AttachedOf(*entry->arena);
  Tell();
  return entry->arena;
}

void ArenaTable::Detach(const std::shared_ptr<Arena>& arena) {
  MutexLock lock(mutex_);
  const auto found = entries_.find(arena->owner());
  if (found != entries_.end() && found->second.arena == arena) Erase(found);
}

void ArenaTable::Sweep(absl::Time now) {
  MutexLock lock(mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (!entry->second.attached && entry->second.attach_until <= now) Erase(entry);
    entry = next;
  }
}

std::int64_t ArenaTable::attached() const { return books_->attached; }

std::int64_t ArenaTable::bytes() const { return books_->bytes; }

std::int64_t ArenaTable::gpu_bytes() const { return books_->gpu_bytes; }

}  // namespace muond
