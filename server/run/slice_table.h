// The slices of one phase of a run that are on their way in or complete: the initial values, or the
// gradients of the step in flight. Hands out receivers so that one stream at a time writes a slice.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "server/step/step_machine.h"
#include "server/transport/slice_receiver.h"

namespace muond {

class SliceTable {
 public:
  // A new stream starts this slice: an unfinished receiver of an older one is replaced.
  void Open(const SliceId& id, std::shared_ptr<SliceReceiver> receiver) {
    std::shared_ptr<SliceReceiver>& slot = receivers_[id];
    if (slot != nullptr) {
      slot->Revoke(absl::AbortedError("a newer stream sends this slice again"));
    }
    slot = std::move(receiver);
  }
  // The slice is complete, or its stream gave up: forget the receiver if it is still this one.
  void Drop(const SliceId& id, const SliceReceiver* receiver) {
    const auto found = receivers_.find(id);
    if (found != receivers_.end() && found->second.get() == receiver) receivers_.erase(found);
  }
  // The phase is over: no stream may write any more, and each is told why.
  void Clear(const absl::Status& why) {
    for (auto& [id, receiver] : receivers_) receiver->Revoke(why);
    receivers_.clear();
  }

 private:
  std::map<SliceId, std::shared_ptr<SliceReceiver>> receivers_;
};

}  // namespace muond
