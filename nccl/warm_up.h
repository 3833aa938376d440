// The first exchange of a link: proof, before anything depends on it, that bytes go both ways and
// are the ones that were sent. It also makes NCCL set up what the first exchange needs.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "nccl/link.h"

namespace muond::nccl {

// Of each direction, at most.
inline constexpr std::size_t kWarmUpBytes = std::size_t{1} << 20;

// Sends a pattern that `secret`, which both ends know, and `rank` make, from `out`, and expects the
// other rank's in `in`; both hold `bytes` bytes of the device. `done` gets DATA_LOSS for another
// pattern, else as Link::Post. The memory is `keep`'s.
void WarmUp(const std::shared_ptr<Device>& device, Link& link, const std::string& secret, int rank,
            Piece out, Piece in, std::shared_ptr<const void> keep, absl::Time deadline,
            const Done& done);

}  // namespace muond::nccl
