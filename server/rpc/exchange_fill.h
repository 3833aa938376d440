// Takes slices out of windows: opened, moved together, digested while they move.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "muond/v1/optimizer.pb.h"
#include "server/rpc/exchange_windows.h"
#include "server/run/run.h"

namespace muond {

// The slices of a fill, complete and in its order; the caller closes them. On an error none is left
// open: that of the opener, those of ExchangeWindows and SliceReceiver, DATA_LOSS for a slice that
// does not have the sum that was announced, INTERNAL from the device.
// `open` is asked for memory where the windows' device moves best. Blocks until all is moved.
absl::StatusOr<std::vector<OpenSlice>> TakeFill(
    Run& run, std::int64_t rank, const v1::ArenaFill& fill, ExchangeWindows& windows,
    const std::function<absl::StatusOr<OpenSlice>(const SliceAddress&, Dtype, StagingPlace)>& open);

// Of all its regions.
std::int64_t BytesOf(const v1::ArenaFill& fill);

}  // namespace muond
