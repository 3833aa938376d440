// The slices that streams send to a run and read from it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/values.h"
#include "server/engine/engines.h"
#include "server/run/slice_table.h"
#include "server/transport/slice_receiver.h"

namespace muond {

// Which slice a stream sends, as the trainer names it.
struct SliceAddress {
  std::int64_t rank = 0;
  std::string parameter;
  std::int64_t slice = 0;
  std::int64_t micro_batch = 0;
};

// A slice that a stream is sending.
struct OpenSlice {
  SliceId id;
  std::int64_t generation = 0;
  std::int64_t step = 0;     // -1: initial values
  std::int64_t attempt = 0;  // at the step, when the slice was opened
  // Initial values: the slice itself. Gradients: the whole tensor; null when only verified.
  std::shared_ptr<StagingBuffer> memory;
  std::shared_ptr<SliceReceiver> receiver;
};

enum class SliceArrival : std::uint8_t { kAccepted, kDuplicate };
using ArrivalCallback = std::function<void(const absl::StatusOr<SliceArrival>&)>;

// What a Pull reads of one box of one parameter: elements that this daemon owns.
struct PullSlice {
  int parameter = 0;  // that holds the state
  Box box;
  ElementRange range;
  Dtype dtype = Dtype::kF32;
  std::int64_t slice = 0;  // position in the request
  std::string name;
  bool covers = false;  // the box is the whole parameter
};

}  // namespace muond
