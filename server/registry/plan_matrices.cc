// Longest processing time first: the costliest matrix to the owner with the least to do.
#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

#include "proto/check.h"
#include "server/registry/plan_draft.h"

namespace muond {
namespace {

class Placement {
 public:
  Placement(const std::vector<MatrixItem>& items, bool by_memory, Draft& draft)
      : items_(items), by_memory_(by_memory), draft_(draft), queue_(draft) {}

  absl::Status Run() {
    Sort();
    for (int owner = 0; owner < draft_.count(); ++owner) queue_.Push(Load(owner), owner);
    for (std::size_t begin = 0, end; begin < order_.size(); begin = end) {
      end = begin + 1;
      while (end < order_.size() && Alike(Item(begin), Item(end))) ++end;
      MUOND_RETURN_IF_ERROR(Deal(begin, end));
    }
    return absl::OkStatus();
  }

 private:
  const MatrixItem& Item(std::size_t at) const { return items_[order_[at]]; }
  std::int64_t HeldBytes(const MatrixItem& item) const {
    return item.elements * draft_.bytes[item.parameter].Held();
  }
  Flops Cost(const MatrixItem& item) const {
    return by_memory_ ? static_cast<Flops>(HeldBytes(item)) : item.flops;
  }
  Flops Load(int owner) const {
    const OwnerUse& use = draft_.owners[owner];
    return by_memory_ ? static_cast<Flops>(use.MemoryBytes(draft_.options)) : use.flops;
  }

  void Sort() {
    order_.resize(items_.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::sort(order_.begin(), order_.end(), [this](std::size_t a, std::size_t b) {
      const MatrixItem& x = items_[a];
      const MatrixItem& y = items_[b];
      if (Cost(x) != Cost(y)) return Cost(x) > Cost(y);
      if (x.elements != y.elements) return x.elements > y.elements;
      return std::tie(x.parameter, x.first) < std::tie(y.parameter, y.first);
    });
    least_.resize(order_.size());
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for (std::size_t at = order_.size(); at-- > 0;) {
      least_[at] = least = std::min(least, HeldBytes(Item(at)));
    }
  }

  // Matrices of one shape in one parameter, which differ in their place alone.
  static bool Alike(const MatrixItem& x, const MatrixItem& y) {
    return x.parameter == y.parameter && x.elements == y.elements && x.flops == y.flops;
  }

  // Chooses owners for alike items one by one, then hands the items out in order, so that each
  // owner gets neighbours.
  absl::Status Deal(std::size_t begin, std::size_t end) {
    std::vector<int> chosen;
    for (std::size_t at = begin; at < end; ++at) {
      const MatrixItem& item = Item(at);
      const ElementBytes& bytes = draft_.bytes[item.parameter];
      const int owner = queue_.Take(least_[at], [&](int candidate) {
        if (draft_.options.memory_max_bytes == 0) return true;
        OwnerUse use = draft_.owners[candidate];
        use.Add(item, bytes);
        return use.MemoryBytes(draft_.options) <= draft_.options.memory_max_bytes;
      });
      if (owner < 0) {
        OwnerUse alone;
        alone.Add(item, bytes);
        return NoOwner(draft_, item.parameter, alone.MemoryBytes(draft_.options),
                       item.matrices == 1 ? "a matrix" : "all its matrices together");
      }
      draft_.owners[owner].Add(item, bytes);
      queue_.Push(Load(owner), owner);
      chosen.push_back(owner);
    }
    std::sort(chosen.begin(), chosen.end());
    for (std::size_t at = begin; at < end; ++at) {
      const MatrixItem& item = Item(at);
      draft_.shards.push_back({item.parameter, item.first, item.elements, chosen[at - begin]});
    }
    return absl::OkStatus();
  }

  const std::vector<MatrixItem>& items_;
  const bool by_memory_;
  Draft& draft_;
  OwnerQueue queue_;
  std::vector<std::size_t> order_;
  std::vector<std::int64_t> least_;  // by place in the order: least bytes of it and all after it
};

}  // namespace

absl::Status PlaceMatrices(const std::vector<MatrixItem>& items, Draft& draft) {
  const std::vector<OwnerUse> owners = draft.owners;
  const std::size_t shards = draft.shards.size();
  absl::Status status = Placement(items, false, draft).Run();
  if (status.ok()) return status;
  // Level memory, at the price of uneven work: what then finds no owner is too much.
  draft.owners = owners;
  draft.shards.resize(shards);
  return Placement(items, true, draft).Run();
}

}  // namespace muond
