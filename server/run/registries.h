// The registry of a run, and those that parameters were added to since. None of them changes once
// all ranks have joined, and none goes before the run does: what a caller has looked up in one
// stays where it is, and what an index means there it means in every later one.
//
// Thread rule: `newest` from any thread; everything else under the run's mutex.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "server/registry/registry.h"

namespace muond {

class Registries {
 public:
  explicit Registries(Registry first) { Replace(std::make_unique<Registry>(std::move(first))); }

  Registry& newest() const { return *newest_.load(std::memory_order_acquire); }
  // The one before the newest; null when there is none.
  const Registry* former() const { return all_.size() < 2 ? nullptr : all_[all_.size() - 2].get(); }
  // `next` has every parameter of the newest, in the same places.
  void Replace(std::unique_ptr<Registry> next) {
    all_.push_back(std::move(next));
    newest_.store(all_.back().get(), std::memory_order_release);
  }

 private:
  std::vector<std::unique_ptr<Registry>> all_;
  std::atomic<Registry*> newest_{nullptr};
};

}  // namespace muond
