// One end of a communicator of two ranks, and the thread through which a device's communicators are
// used.
//
// All NCCL calls about a device come from its Worker's one thread, link by link, each link's
// exchanges in the order in which they were posted; only the abort of a broken communicator, which
// may block, has a thread of its own. Communicators are nonblocking: the thread polls what it has
// started, so that a peer that is dead, slow or lying costs its own link and no other.
//
// A link never waits longer than it was told: an exchange that has not ended by its deadline breaks
// it, and so does any error. A broken link's communicator is aborted; its exchanges end with the
// reason once NCCL has let go of their memory. There is no repair: the peers make a new link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "nccl/api.h"
#include "nccl/device.h"

namespace muond::nccl {

class Worker;

// Called once, on the worker's thread or the one that aborted: must be short, and may post more.
using Done = std::function<void(const absl::Status&)>;

// Device memory that one send reads or one receive writes; pieces of no bytes are skipped, as the
// peer skips them.
struct Piece {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// Copied before the sends, on the device and in the link's order: small tensors into a pack.
struct DeviceCopy {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

// What goes over a link in one group: sends[i] meets the peer's i-th receive of the same exchange.
struct Exchange {
  std::vector<Stream> after;  // whose work so far makes what is sent, or reads what is overwritten
  std::vector<DeviceCopy> copies;
  std::vector<Piece> sends;
  std::vector<Piece> receives;
  std::shared_ptr<const void> keep;  // owns the memory; let go of when NCCL has done so
  absl::Time deadline;
  Done done;
};

// Thread-safe.
class Link : public std::enable_shared_from_this<Link> {
 public:
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Queues an exchange; both ends post theirs in the same order. `done` gets OK when all bytes have
  // gone and come, DEADLINE_EXCEEDED, or why the link broke. Not OK, the reason: the link is
  // broken, nothing was queued, and `done` is not called.
  absl::Status Post(Exchange exchange);
  // Breaks the link: what is under way ends with `why`.
  void Abort(const absl::Status& why);
  // OK, or why the link is broken.
  absl::Status status() const;

 private:
  friend class Worker;
  struct Shared;
  explicit Link(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  const std::shared_ptr<Shared> shared_;  // the worker's half outlives this object
};

// The thread of one device. Links may outlive it; they are broken then.
class Worker {
 public:
  // `api` and `device` outlive the worker and all its links' aborts.
  Worker(const Api& api, std::shared_ptr<Device> device);
  // Breaks what is left, and waits for the aborts, ten seconds at most.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  Device& device() const { return *device_; }
  const std::shared_ptr<Device>& shared_device() const { return device_; }
  const Api& api() const;

  // Begins to meet the other rank (0 or 1) under this id; `ready` hears when both are there, or why
  // not, by the deadline. Exchanges may be posted before.
  std::shared_ptr<Link> Connect(const UniqueId& id, int rank, absl::Time deadline, Done ready);

 private:
  friend class Link;
  struct State;
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace muond::nccl
