#include "proto/pointer_lease.h"

#include <condition_variable>
#include <map>
#include <mutex>

namespace muond {

struct PointerLease::State {
  std::mutex mutex;
  std::condition_variable released;
  int holders = 0;
  bool ending = false;
};

namespace {

struct Leases {
  std::mutex mutex;
  std::int64_t last = 0;
};

Leases& All() {
  static auto* const leases = new Leases();
  return *leases;
}

template <typename State>
std::map<std::int64_t, std::shared_ptr<State>>& Table() {
  static auto* const table = new std::map<std::int64_t, std::shared_ptr<State>>();
  return *table;
}

std::int64_t NextNumber() {
  std::lock_guard lock(All().mutex);
  return ++All().last;
}

}  // namespace

PointerLease::PointerLease() : number_(NextNumber()), state_(std::make_shared<State>()) {
  std::lock_guard lock(All().mutex);
  Table<State>()[number_] = state_;
}

PointerLease::~PointerLease() {
  {
    std::lock_guard lock(All().mutex);
    Table<State>().erase(number_);
  }
  std::unique_lock lock(state_->mutex);
  state_->ending = true;
  state_->released.wait(lock, [this] { return state_->holders == 0; });
}

std::shared_ptr<void> PointerLease::Hold(std::int64_t number) {
  std::shared_ptr<State> state;
  {
    std::lock_guard lock(All().mutex);
    const auto found = Table<State>().find(number);
    if (found == Table<State>().end()) return nullptr;
    state = found->second;
  }
  std::lock_guard lock(state->mutex);
  if (state->ending) return nullptr;
  ++state->holders;
  State* const held = state.get();
  return {held, [state](void*) {
            std::lock_guard release(state->mutex);
            --state->holders;
            state->released.notify_all();
          }};
}

}  // namespace muond
