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
      plan.push_back({region.offset, region.bytes, i, 1});
    } else {
      plan.back().bytes = region.offset + region.bytes - plan.back().offset;
      plan.back().count = i + 1 - plan.back().first;
    }
    open = !alone;
  }
  return plan;
}

}  // namespace muond::nccl
