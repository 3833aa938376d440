// AdamW parameters have no work worth counting but bytes: they are poured over the owners until all
// hold and move the same, like water over uneven ground.
#include <algorithm>
#include <limits>
#include <tuple>

#include "proto/check.h"
#include "server/registry/plan_draft.h"

namespace muond {
namespace {

constexpr auto kBlock = static_cast<std::int64_t>(kernels::kBlockElements);
constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

struct Body {
  int parameter;
  std::int64_t elements;
  std::int64_t placed = 0;  // of its first elements
};

class Fill {
 public:
  Fill(const std::vector<int>& parameters, const std::vector<std::int64_t>& sizes, Draft& draft)
      : draft_(draft) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const Body body{parameters[i], sizes[i]};
      (sizes[i] < 2 * kShardElementsMin ? small_ : large_).push_back(body);
    }
  }

  absl::Status Run() {
    PlaceSmall();
    Pour();
    return PlaceRest();
  }

 private:
  const ElementBytes& BytesOf(const Body& body) const { return draft_.bytes[body.parameter]; }

  void Give(Body& body, int owner, std::int64_t elements) {
    draft_.shards.push_back({body.parameter, body.placed, elements, owner});
    draft_.owners[owner].Add(elements, BytesOf(body));
    body.placed += elements;
  }

  // Whole, the largest first, each to the owner with the least so far. One that finds no room under
  // the limit is left to PlaceRest.
  void PlaceSmall() {
    const auto level = [this](const Body& body) { return body.elements * BytesOf(body).Level(); };
    std::sort(small_.begin(), small_.end(), [&](const Body& a, const Body& b) {
      return std::make_tuple(-level(a), a.parameter) < std::make_tuple(-level(b), b.parameter);
    });
    OwnerQueue queue(draft_);
    const auto push = [&](int owner) {
      queue.Push(static_cast<Flops>(draft_.owners[owner].LevelBytes()), owner);
    };
    for (int owner = 0; owner < draft_.count(); ++owner) push(owner);
    for (Body& body : small_) {
      const std::int64_t held = body.elements * BytesOf(body).Held();
      const int owner = queue.Take(1, [&](int o) { return draft_.FreeBytes(o) >= held; });
      if (owner < 0) continue;
      Give(body, owner, body.elements);
      push(owner);
    }
  }

  // How much of `total`, in level bytes, each owner should get: all up to one common level, but no
  // more than its free memory.
  std::vector<std::int64_t> Quotas(std::int64_t total, std::int64_t held) const {
    std::vector<std::int64_t> room(draft_.owners.size(), kNoLimit);
    std::int64_t low = kNoLimit, high = 0;
    for (int owner = 0; owner < draft_.count(); ++owner) {
      if (draft_.options.memory_max_bytes > 0) {
        const double share = static_cast<double>(draft_.FreeBytes(owner)) / held;
        room[owner] = share >= 1 ? total : static_cast<std::int64_t>(share * total);
      }
      low = std::min(low, draft_.owners[owner].LevelBytes());
      high = std::max(high, draft_.owners[owner].LevelBytes() + total);
    }
    const auto quota = [&](int owner, std::int64_t level) {
      return std::clamp<std::int64_t>(level - draft_.owners[owner].LevelBytes(), 0, room[owner]);
    };
    while (low < high) {
      const std::int64_t level = low + (high - low) / 2;
      std::int64_t sum = 0;
      for (int owner = 0; owner < draft_.count() && sum < total; ++owner) {
        sum += std::min(quota(owner, level), total);
      }
      (sum < total ? low : high) = sum < total ? level + 1 : level;
    }
    std::vector<std::int64_t> quotas;
    quotas.reserve(draft_.count());
    for (int owner = 0; owner < draft_.count(); ++owner) quotas.push_back(quota(owner, low));
    return quotas;
  }

  // The large parameters stand in a row; an owner's part ends where the quotas up to its own add up
  // to, moved to a border of blocks and away from the ends of parameters. All are counted from the
  // beginning of the row, so that roundings don't add up.
  void Pour() {
    std::int64_t total = 0, held = 0;
    for (const Body& body : large_) {
      total += body.elements * BytesOf(body).Level();
      held += body.elements * BytesOf(body).Held();
    }
    if (total == 0) return;
    const std::vector<std::int64_t> quotas = Quotas(total, held);
    std::size_t at = 0;
    std::int64_t before = 0;  // level bytes of the parameters before large_[at]
    std::int64_t border = 0;
    for (int owner = 0; owner < draft_.count(); ++owner) {
      if (quotas[owner] == 0) continue;
      border = std::min(total, border + quotas[owner]);
      while (at < large_.size()) {
        Body& body = large_[at];
        const std::int64_t end = Cut(body, border - before, owner);
        if (end > body.placed) Give(body, owner, end - body.placed);
        if (body.placed < body.elements) break;
        before += body.elements * BytesOf(body).Level();
        ++at;
      }
    }
  }

  // Where in `body` the owner's piece is to end, for a border `level` bytes after its beginning:
  // body.placed for no piece, and never so that a piece or what is left is smaller than the least.
  std::int64_t Cut(const Body& body, std::int64_t level, int owner) const {
    const std::int64_t wanted = level / BytesOf(body).Level();
    std::int64_t end = body.elements;
    if (wanted < body.elements) end = (wanted + kBlock / 2) / kBlock * kBlock;
    if (end - body.placed < std::min(kShardElementsMin, body.elements - body.placed)) {
      return body.placed;
    }
    if (body.elements - end < kShardElementsMin) end = body.elements;
    const std::int64_t fits = draft_.FreeBytes(owner) / BytesOf(body).Held();
    if (end - body.placed <= fits) return end;
    end = std::min(body.placed + fits, body.elements - kShardElementsMin) / kBlock * kBlock;
    return end - body.placed < kShardElementsMin ? body.placed : end;
  }

  // What the memory limit left over: block by block wherever there is room.
  absl::Status PlaceRest() {
    for (std::vector<Body>* bodies : {&large_, &small_}) {
      for (Body& body : *bodies) {
        const std::int64_t held = BytesOf(body).Held();
        for (int owner = 0; body.placed < body.elements && owner < draft_.count(); ++owner) {
          const std::int64_t left = body.elements - body.placed;
          std::int64_t piece = std::min(left, draft_.FreeBytes(owner) / held);
          if (piece < left) piece = piece / kBlock * kBlock;
          if (piece > 0) Give(body, owner, piece);
        }
        if (body.placed < body.elements) {
          return NoOwner(draft_, body.parameter, (body.elements - body.placed) * held,
                         "what is left of it");
        }
      }
    }
    return absl::OkStatus();
  }

  Draft& draft_;
  std::vector<Body> small_;
  std::vector<Body> large_;
};

}  // namespace

absl::Status FillAdamW(const std::vector<int>& parameters, const std::vector<std::int64_t>& sizes,
                       Draft& draft) {
  return Fill(parameters, sizes, draft).Run();
}

}  // namespace muond
