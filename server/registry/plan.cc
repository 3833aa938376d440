#include "server/registry/plan.h"

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/registry/plan_cost.h"
#include "server/registry/plan_draft.h"
#include "xxhash.h"

namespace muond {
namespace {

constexpr auto kBlock = static_cast<std::int64_t>(kernels::kBlockElements);

absl::StatusOr<std::int64_t> CountOwners(const PlanOptions& options) {
  std::int64_t owners = 0;
  for (std::size_t daemon = 0; daemon < options.devices_per_daemon.size(); ++daemon) {
    const int devices = options.devices_per_daemon[daemon];
    if (devices < 1) {
      return absl::InvalidArgumentError(
          absl::StrFormat("plan: daemon %d: expected at least 1 device, got %d", daemon, devices));
    }
    owners += devices;
    if (owners > kOwnersMax) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("plan: more than %d devices of all daemons together", kOwnersMax));
    }
  }
  if (owners == 0) return absl::InvalidArgumentError("plan: no daemon to plan for");
  if (options.memory_max_bytes < 0 || options.iterate_bytes < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "plan: expected memory_max_bytes of 0 or more and iterate_bytes of 1 or more, got %d, %d",
        options.memory_max_bytes, options.iterate_bytes));
  }
  return owners;
}

// The matrix is one range of rows that starts and ends on borders of blocks.
bool Separable(const MatrixBlock& block) {
  return block.ranges.size() == 1 && block.rows * block.cols % kBlock == 0;
}

class Planner {
 public:
  Planner(const RunSpec& run, const Routing& routing, const PlanOptions& options)
      : run_(run), routing_(routing), options_(options), draft_{run, options, {}, {}, {}, {}} {}

  absl::StatusOr<Plan> Make() {
    MUOND_ASSIGN_OR_RETURN(const std::int64_t owners, CountOwners(options_));
    draft_.owners.resize(static_cast<std::size_t>(owners));
    ListOwners();
    for (const GroupSpec& group : run_.groups) groups_.emplace(group.name, &group);
    MUOND_RETURN_IF_ERROR(CountBytes());
    // What was added later finds the rest in its place.
    int begin = 0;
    for (const std::int64_t border : run_.additions) {
      MUOND_RETURN_IF_ERROR(Place(begin, static_cast<int>(border)));
      begin = static_cast<int>(border);
    }
    MUOND_RETURN_IF_ERROR(Place(begin, static_cast<int>(run_.parameters.size())));
    plan_.floor_flops = Floor();
    MergeShards();
    CountLoads();
    Compare();
    plan_.hash = Hash();
    return std::move(plan_);
  }

 private:
  void ListOwners() {
    std::vector<std::pair<int, int>> turns;  // device, owner
    for (std::size_t d = 0; d < options_.devices_per_daemon.size(); ++d) {
      for (int device = 0; device < options_.devices_per_daemon[d]; ++device) {
        turns.emplace_back(device, static_cast<int>(plan_.owners.size()));
        plan_.owners.push_back({.place = {static_cast<int>(d), device}});
      }
    }
    std::sort(turns.begin(), turns.end());
    draft_.turns.resize(turns.size());
    for (std::size_t turn = 0; turn < turns.size(); ++turn) {
      draft_.turns[turns[turn].second] = static_cast<int>(turn);
    }
  }

  // Bytes of each element of each state. A tied name that is a tensor of its own in the trainer
  // (TieReduction::kSum) brings a gradient of its own.
  absl::Status CountBytes() {
    draft_.bytes.resize(run_.parameters.size());
    double total = 0;
    for (std::size_t p = 0; p < run_.parameters.size(); ++p) {
      const ParameterSpec& spec = run_.parameters[p];
      const RoutedParameter& routed = routing_.parameters[p];
      const bool holder = routed.state == static_cast<int>(p);
      const auto width = static_cast<std::int64_t>(DtypeBytes(spec.dtype));
      const std::int64_t pushes = spec.replicated ? run_.world_size : 1;
      ElementBytes& bytes = draft_.bytes[routed.state];
      if (holder) {
        bytes.state += StateBytesPerElement(routed.algorithm, *groups_.at(spec.group));
        bytes.out += width;
        total += static_cast<double>(routed.elements) * (12 + 2 * width);
      }
      if (holder || spec.tie_reduction == TieReduction::kSum) {
        bytes.staging = options_.device_memory ? 4 : bytes.staging + width;
        bytes.in += width * pushes;
        total += static_cast<double>(routed.elements) * static_cast<double>(width * (1 + pushes));
      }
    }
    // Scratch is at most six times the elements, of 4 bytes.
    constexpr double kBytesMax = 4.6e18 / 4;
    if (total < kBytesMax) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrFormat(
        "run \"%s\": plan: %.3g bytes of state and traffic are more than can be counted", run_.name,
        total));
  }

  // Gives parameters [begin, end) their owners, with what these have taken on before.
  absl::Status Place(int begin, int end) {
    std::vector<MatrixItem> items;
    std::vector<int> adamw;
    std::vector<std::int64_t> adamw_elements;
    for (int p = begin; p < end; ++p) {
      const RoutedParameter& routed = routing_.parameters[p];
      if (routed.state != p) continue;
      if (routed.elements == 0) {
        draft_.shards.push_back({p, 0, 0, 0});
      } else if (routed.algorithm == Algorithm::kMuon) {
        const std::string& group = run_.parameters[p].group;
        if (steps_.count(group) == 0) {
          MUOND_ASSIGN_OR_RETURN(steps_[group], NewtonSchulzSteps(*groups_.at(group)));
        }
        AppendItems(p, routed.matrices, steps_[group], items);
      } else {
        adamw.push_back(p);
        adamw_elements.push_back(routed.elements);
      }
    }
    MUOND_RETURN_IF_ERROR(PlaceMatrices(items, draft_));
    for (const MatrixItem& item : items) costs_.push_back(item.flops);
    return FillAdamW(adamw, adamw_elements, draft_);
  }

  void AppendItems(int parameter, const std::vector<MatrixBlock>& matrices, std::int64_t steps,
                   std::vector<MatrixItem>& items) {
    const bool separable = std::all_of(matrices.begin(), matrices.end(), Separable);
    MatrixItem whole{.parameter = parameter, .matrices = 0};
    for (const MatrixBlock& block : matrices) {
      const std::int64_t low = std::min(block.rows, block.cols);
      MatrixItem item{.parameter = parameter,
                      .first = block.ranges[0].begin * block.cols,
                      .elements = block.rows * block.cols,
                      .flops = NewtonSchulzFlops(block.rows, block.cols, steps),
                      .workspace = block.rows * block.cols + 4 * low * low,
                      .group = GroupShare(block.rows, block.cols)};
      NoteLargest(block, item.flops);
      if (separable) {
        items.push_back(item);
        continue;
      }
      whole.elements += item.elements;
      whole.flops += item.flops;
      whole.matrices += 1;
      whole.workspace = std::max(whole.workspace, item.workspace);
      whole.group += item.group;
      whole.gathered = whole.gathered || block.ranges.size() > 1;
    }
    if (!separable) items.push_back(whole);
  }

  void NoteLargest(const MatrixBlock& block, Flops flops) {
    if (flops > largest_matrix_) {
      largest_matrix_ = flops;
      plan_.split.rows = block.rows;
      plan_.split.cols = block.cols;
      plan_.split.count = 0;
    }
    if (flops == largest_matrix_) ++plan_.split.count;
  }

  double Floor() {
    std::sort(costs_.begin(), costs_.end(), std::greater<>());
    return static_cast<double>(SingleOwnershipFloor(costs_, draft_.count()));
  }

  // Neighbours with one owner become one shard.
  void MergeShards() {
    std::vector<Shard>& shards = draft_.shards;
    std::sort(shards.begin(), shards.end(), [](const Shard& a, const Shard& b) {
      return std::tie(a.parameter, a.first) < std::tie(b.parameter, b.first);
    });
    for (const Shard& shard : shards) {
      Shard* last = plan_.shards.empty() ? nullptr : &plan_.shards.back();
      if (last != nullptr && last->parameter == shard.parameter && last->owner == shard.owner) {
        MUOND_CHECK(last->first + last->elements == shard.first, "shards must adjoin");
        last->elements += shard.elements;
      } else {
        plan_.shards.push_back(shard);
      }
    }
  }

  void CountLoads() {
    Flops total = 0, largest = 0;
    for (int owner = 0; owner < draft_.count(); ++owner) {
      const OwnerUse& use = draft_.owners[owner];
      OwnerLoad& load = plan_.owners[owner];
      load.flops = static_cast<double>(use.flops);
      load.matrices = use.matrices;
      load.elements = use.elements;
      load.matrix_elements = use.matrix_elements;
      load.state_bytes = use.state_bytes;
      load.staging_bytes = use.staging_bytes;
      load.scratch_bytes = use.ScratchBytes(options_);
      load.bytes_in = use.bytes_in;
      load.bytes_out = use.bytes_out;
      total += use.flops;
      largest = std::max(largest, use.flops);
    }
    // An owner may hold several runs of one stack.
    std::vector<int> last(plan_.owners.size(), -1);
    for (const Shard& shard : plan_.shards) {
      if (std::exchange(last[shard.owner], shard.parameter) != shard.parameter) {
        ++plan_.owners[shard.owner].parameters;
      }
    }
    plan_.total_flops = static_cast<double>(total);
    plan_.largest_flops = static_cast<double>(largest);
    plan_.largest_matrix_flops = static_cast<double>(largest_matrix_);
  }

  void Compare() {
    if (plan_.floor_flops > 0) {
      plan_.imbalance_over_floor = plan_.largest_flops / plan_.floor_flops;
    }
    Advise(plan_);
  }

  static void Advise(Plan& plan);

  // Everything in little-endian 64-bit numbers, whatever the machine.
  std::string Hash() const {
    std::string text = "muond plan 1";
    const auto append = [&text](std::int64_t value) {
      for (int byte = 0; byte < 8; ++byte) text.push_back(static_cast<char>(value >> (8 * byte)));
    };
    append(static_cast<std::int64_t>(options_.devices_per_daemon.size()));
    for (const int devices : options_.devices_per_daemon) append(devices);
    append(static_cast<std::int64_t>(plan_.shards.size()));
    for (const Shard& shard : plan_.shards) {
      append(shard.parameter);
      append(shard.first);
      append(shard.elements);
      append(shard.owner);
    }
    const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
    return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
  }

  const RunSpec& run_;
  const Routing& routing_;
  const PlanOptions& options_;
  Draft draft_;
  std::map<std::string, const GroupSpec*> groups_;
  std::map<std::string, std::int64_t> steps_;  // of Newton-Schulz, by group
  std::vector<Flops> costs_;                   // of all that was placed
  Flops largest_matrix_ = 0;
  Plan plan_;
};

// Splitting pays where one matrix is more than an owner's share: owners then idle and nothing else
// can fill them. Otherwise only where the Gram matrix to be exchanged is small beside the matrix.
void Planner::Advise(Plan& plan) {
  constexpr double kWorthwhile = 0.05;
  SplitAdvice& advice = plan.split;
  const auto owners = static_cast<std::int64_t>(plan.owners.size());
  if (advice.rows == 0) {
    advice.reason = "there is no matrix";
    return;
  }
  if (owners == 1) {
    advice.reason = "there is one owner";
    return;
  }
  const std::int64_t low = std::min(advice.rows, advice.cols);
  const std::int64_t sides = std::max(advice.rows, advice.cols) / low;
  advice.gain = 1 - plan.MeanFlops() / plan.largest_flops;
  advice.gram_bytes = 2 * (2 * low * low * 4 / owners) * (owners - 1);
  const bool too_large = plan.largest_matrix_flops > plan.MeanFlops();
  const bool long_sided = sides > 4 * owners;
  advice.helps = advice.gain > kWorthwhile && (too_large || long_sided);
  std::string why;
  if (advice.gain <= kWorthwhile) {
    why = "the work is level enough";
  } else if (too_large) {
    why = "one of them is more than an owner's share";
  } else if (long_sided) {
    why = absl::StrFormat("their sides are 1 : %d, so that little has to be exchanged", sides);
  } else {
    why = absl::StrFormat(
        "none is more than an owner's share, and with sides of 1 : %d the exchange costs more "
        "(beyond 1 : %d it would not)",
        sides, 4 * owners);
  }
  advice.reason = absl::StrFormat(
      "%d %s of %d x %d, %.4g TFLOP each, for %d owners; split evenly, the largest load would fall "
      "by %.1f%% to %.4g TFLOP; %s",
      advice.count, advice.count == 1 ? "matrix" : "matrices", advice.rows, advice.cols,
      plan.largest_matrix_flops / 1e12, owners, 100 * advice.gain, plan.MeanFlops() / 1e12, why);
}

}  // namespace

absl::StatusOr<Plan> MakePlan(const RunSpec& run, const Routing& routing,
                              const PlanOptions& options) {
  return Planner(run, routing, options).Make();
}

std::span<const Shard> Plan::ShardsOf(int parameter) const {
  const auto [begin, end] =
      std::equal_range(shards.begin(), shards.end(), Shard{.parameter = parameter},
                       [](const Shard& a, const Shard& b) { return a.parameter < b.parameter; });
  return {begin, end};
}

std::vector<MatrixBlock> MatricesIn(const RoutedParameter& routed, const Shard& shard) {
  std::vector<MatrixBlock> inside;
  for (const MatrixBlock& block : routed.matrices) {
    const std::int64_t first = block.ranges[0].begin * block.cols;
    if (first < shard.first || first >= shard.first + shard.elements) continue;
    inside.push_back(block);
    for (RowRange& range : inside.back().ranges) range.begin -= shard.first / block.cols;
  }
  return inside;
}

}  // namespace muond
