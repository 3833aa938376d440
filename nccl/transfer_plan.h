// Which sends and receives carry what a message names: a pure function of the places in it, so that
// both ends come to the same list without another word.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace muond::nccl {

// Bytes of a window.
struct Region {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

// Smaller pieces travel together: a transfer of its own costs tens of microseconds whatever its
// size.
inline constexpr std::int64_t kAloneBytes = std::int64_t{1} << 20;

// Of a group, or one larger transfer: large beside what a group costs, small beside a step's
// gradients.
inline constexpr std::int64_t kGroupBytes = std::int64_t{256} << 20;

// One send, and the receive of the same size: bytes [offset, offset + bytes) of the window, which
// hold regions [first, first + count), gaps between them included.
struct Transfer {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;  // never 0
  std::size_t first = 0;
  std::size_t count = 0;
  // Which NCCL group it belongs to, ascending from 0: what has arrived is looked at while the next
  // group comes.
  std::size_t group = 0;
};

// Regions must be inside the window, ascending, and not overlap. Empty ones are in no transfer's
// bytes; a list without any byte gives no transfer.
std::vector<Transfer> PlanTransfers(std::span<const Region> regions);

}  // namespace muond::nccl
