#include "proto/pointer_lease.h"

#include <map>

#include "proto/mutex.h"

namespace muond {

struct PointerLease::State {
  Mutex mutex;
  CondVar released;
  int holders MUOND_GUARDED_BY(mutex) = 0;
  bool ending MUOND_GUARDED_BY(mutex) = false;
};

namespace {

struct Leases {
  Mutex mutex;
  std::int64_t last MUOND_GUARDED_BY(mutex) = 0;
};

Leases& All() {
  static auto* const leases = new Leases();
  return *leases;
}

template <typename State>
std::map<std::int64_t, std::shared_ptr<State>>& Table() MUOND_REQUIRES(All().mutex) {
  static auto* const table = new std::map<std::int64_t, std::shared_ptr<State>>();
  return *table;
}

std::int64_t NextNumber() {
  MutexLock lock(All().mutex);
  return ++All().last;
}

}  // namespace

PointerLease::PointerLease() : number_(NextNumber()), state_(std::make_shared<State>()) {
  MutexLock lock(All().mutex);
  Table<State>()[number_] = state_;
}

PointerLease::~PointerLease() {
  {
    MutexLock lock(All().mutex);
    Table<State>().erase(number_);
  }
  MutexLock lock(state_->mutex);
  state_->ending = true;
  state_->released.wait(lock, [this]() MUOND_REQUIRES(state_->mutex) {
    return state_->holders == 0;
  });
}

std::shared_ptr<void> PointerLease::Hold(std::int64_t number) {
  std::shared_ptr<State> state;
  {
    MutexLock lock(All().mutex);
    const auto found = Table<State>().find(number);
    if (found == Table<State>().end()) return nullptr;
    state = found->second;
  }
  MutexLock lock(state->mutex);
  if (state->ending) return nullptr;
  ++state->holders;
  State* const held = state.get();
  return {held, [state](void*) {
            MutexLock release(state->mutex);
            --state->holders;
            state->released.notify_all();
          }};
}

}  // namespace muond
