// Buffers that a caller lends to a service of its own process: for as long as one call lasts, and
// not a moment longer, however the call ends.
//
// A call that is cancelled returns at once, while the service may still read and write what it was
// told of. The caller therefore opens a lease and sends its number with its addresses; the service
// holds the lease while it touches them; and the lease's end waits for that. A number from another
// process names no lease here.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>

namespace muond {

class PointerLease {
 public:
  PointerLease();
  // Waits for those who hold it; nobody can from then on.
  ~PointerLease();
  PointerLease(const PointerLease&) = delete;
  PointerLease& operator=(const PointerLease&) = delete;

  std::int64_t number() const { return number_; }  // positive, never used twice

  // Keeps the lease from ending while the result lives. Null when there is none of that number, or
  // it is ending.
  static std::shared_ptr<void> Hold(std::int64_t number);

 private:
  struct State;
  const std::int64_t number_;
  const std::shared_ptr<State> state_;
};

}  // namespace muond
