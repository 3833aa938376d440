// A plan in the making: what each owner has taken on so far, and what one more thing would cost it.
// Internal to server/registry/plan*.cc. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "proto/shard.h"
#include "proto/values.h"
#include "server/registry/plan.h"
#include "server/registry/plan_cost.h"

namespace muond {

// Bytes for each element of a parameter.
struct ElementBytes {
  std::int64_t state = 0;
  std::int64_t staging = 0;
  std::int64_t in = 0;
  std::int64_t out = 0;
  std::int64_t Held() const { return state + staging; }
  // What AdamW levels: memory that stays, and traffic of a step.
  std::int64_t Level() const { return state + in + out; }
};

// What matrices add to a group of those that a GPU takes side by side (kernels/cuda).
struct GroupShare {
  GroupShare() = default;
  GroupShare(std::int64_t rows, std::int64_t cols);
  GroupShare& operator+=(const GroupShare& more);

  std::int64_t elements = 0;  // Newton-Schulz's own
  std::int64_t area = 0;      // of the squares of the short side, elements
};

// One or several matrices that can't be parted.
struct MatrixItem {
  int parameter = 0;
  std::int64_t first = 0;  // in the flattened parameter
  std::int64_t elements = 0;
  Flops flops = 0;
  std::int64_t matrices = 1;
  std::int64_t workspace = 0;  // elements that Newton-Schulz works in, for the largest of them
  GroupShare group = {};       // of all of them
  bool gathered = false;       // a row split picks its rows: they are packed first
};

// What an owner has taken on.
struct OwnerUse {
  Flops flops = 0;
  std::int64_t matrices = 0;
  std::int64_t elements = 0;
  std::int64_t state_bytes = 0;
  std::int64_t staging_bytes = 0;
  std::int64_t bytes_in = 0;
  std::int64_t bytes_out = 0;
  std::int64_t matrix_elements = 0;
  std::int64_t largest_item = 0;  // elements
  std::int64_t workspace = 0;     // elements
  GroupShare group;
  bool gathered = false;

  void Add(std::int64_t count, const ElementBytes& bytes);
  void Add(const MatrixItem& item, const ElementBytes& bytes);
  std::int64_t LevelBytes() const { return state_bytes + bytes_in + bytes_out; }
  // The estimate of docs/planning.md.
  std::int64_t ScratchBytes(const PlanOptions& options) const;
  // Elements that Newton-Schulz works in on a GPU, of a batch of so many elements.
  std::int64_t GroupElements(const PlanOptions& options, std::int64_t batch) const;
  std::int64_t MemoryBytes(const PlanOptions& options) const {
    return state_bytes + staging_bytes + ScratchBytes(options);
  }
};

struct Draft {
  const RunSpec& run;
  const PlanOptions& options;
  std::vector<ElementBytes> bytes;  // by parameter
  std::vector<OwnerUse> owners;
  // By owner: its place among owners with equal load. First the first device of every daemon, then
  // the second ones: two matrices on two daemons of two devices use both networks.
  std::vector<int> turns;
  std::vector<Shard> shards;

  int count() const { return static_cast<int>(owners.size()); }
  // Bytes that the owner may still take, below 2^63 where there is no limit.
  std::int64_t FreeBytes(int owner) const;
};

// Owners by a growing load, least first; equal ones by turn.
class OwnerQueue {
 public:
  explicit OwnerQueue(const Draft& draft) : draft_(draft) {}
  void Push(Flops load, int owner);

  // Removes and returns the first owner for which `fits(owner)`, -1 when there is none. An owner
  // with less than `least` bytes free is dropped for ever: nothing to come is smaller.
  template <typename Fits>
  int Take(std::int64_t least, Fits&& fits) {
    std::vector<Entry> aside;
    int taken = -1;
    while (taken < 0 && !heap_.empty()) {
      const Entry entry = Pop();
      const int owner = std::get<2>(entry);
      if (fits(owner)) {
        taken = owner;
      } else if (draft_.FreeBytes(owner) >= least) {
        aside.push_back(entry);
      }
    }
    for (const Entry& entry : aside) Push(entry);
    return taken;
  }

 private:
  using Entry = std::tuple<Flops, int, int>;  // load, turn, owner
  void Push(const Entry& entry);
  Entry Pop();

  const Draft& draft_;
  std::vector<Entry> heap_;
};

// The error of a memory limit that can't be met: `bytes` of `parameter` find no owner.
absl::Status NoOwner(const Draft& draft, int parameter, std::int64_t bytes, const char* what);

// Gives each item an owner: LPT by FLOPs; where that fails under the memory limit, LPT by memory.
absl::Status PlaceMatrices(const std::vector<MatrixItem>& items, Draft& draft);

// Gives the elements of the AdamW parameters owners, so that LevelBytes level out. Comes last.
absl::Status FillAdamW(const std::vector<int>& parameters, const std::vector<std::int64_t>& sizes,
                       Draft& draft);

}  // namespace muond
