#include "nccl/transfer_plan.h"

namespace muond::nccl {

std::vector<Transfer> PlanTransfers(std::span<const Region> regions) {
  std::vector<Transfer> plan;
  bool open = false;  // the last transfer takes more
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const Region& region = regions[i];
    if (region.bytes == 0) continue;
    const bool alone = region.bytes >= kAloneBytes;
    if (alone || !open) {
      plan.push_back({region.offset, region.bytes, i, 1, 0});
    } else {
      plan.back().bytes = region.offset + region.bytes - plan.back().offset;
      plan.back().count = i + 1 - plan.back().first;
    }
    open = !alone;
  }
  std::int64_t in_group = 0;
  for (std::size_t i = 1; i < plan.size(); ++i) {
    in_group += plan[i - 1].bytes;
    const bool full = in_group + plan[i].bytes > kGroupBytes;
    plan[i].group = plan[i - 1].group + (full ? 1 : 0);
    if (full) in_group = 0;
  }
  return plan;
}

}  // namespace muond::nccl
