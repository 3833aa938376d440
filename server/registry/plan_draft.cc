#include "server/registry/plan_draft.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "absl/strings/str_format.h"

namespace muond {
namespace {

// Elements of matrices that share one batch of Newton-Schulz, unless a single one is larger.
constexpr std::int64_t kBatchElements = std::int64_t{32} << 20;
constexpr std::int64_t kDeviceBatchElements = std::int64_t{256} << 20;
// A GPU cuts a batch into groups of at most this much, about equal ones.
constexpr std::int64_t kGroupArea = std::int64_t{1200} * 2 * 128 * 256;
constexpr std::int64_t kGroupBytes = std::int64_t{2} << 30;

std::int64_t CeilOf(double value) {
  const auto whole = static_cast<std::int64_t>(value);
  return whole + (static_cast<double>(whole) < value ? 1 : 0);
}

}  // namespace

// A spare copy of X, and two squares in the standard form, which square matrices have, else five.
GroupShare::GroupShare(std::int64_t rows, std::int64_t cols)
    : elements(rows * cols), area(std::min(rows, cols) * std::min(rows, cols)) {
  elements += (rows == cols ? 2 : 5) * area;
}

GroupShare& GroupShare::operator+=(const GroupShare& more) {
  elements += more.elements;
  area += more.area;
  return *this;
}

void OwnerUse::Add(std::int64_t count, const ElementBytes& bytes) {
  elements += count;
  state_bytes += count * bytes.state;
  staging_bytes += count * bytes.staging;
  bytes_in += count * bytes.in;
  bytes_out += count * bytes.out;
}

void OwnerUse::Add(const MatrixItem& item, const ElementBytes& bytes) {
  Add(item.elements, bytes);
  flops += item.flops;
  matrices += item.matrices;
  matrix_elements += item.elements;
  largest_item = std::max(largest_item, item.elements);
  workspace = std::max(workspace, item.workspace);
  group += item.group;
  gathered = gathered || item.gathered;
}

std::int64_t OwnerUse::ScratchBytes(const PlanOptions& options) const {
  const std::int64_t most = options.device_memory ? kDeviceBatchElements : kBatchElements;
  const std::int64_t batch = std::max(largest_item, std::min(matrix_elements, most));
  const std::int64_t results = options.overlap ? matrix_elements : batch;
  const std::int64_t packed = gathered ? batch : 0;
  const std::int64_t products = options.device_memory ? GroupElements(options, batch) : workspace;
  return options.iterate_bytes * (batch + results + packed + products);
}

std::int64_t OwnerUse::GroupElements(const PlanOptions& options, std::int64_t batch) const {
  if (matrix_elements == 0) return 0;
  const double share = static_cast<double>(batch) / static_cast<double>(matrix_elements);
  const double all = share * static_cast<double>(group.elements);
  const double groups = std::max(share * static_cast<double>(group.area) / kGroupArea,
                                 all * static_cast<double>(options.iterate_bytes) / kGroupBytes);
  const double count = static_cast<double>(std::max<std::int64_t>(1, CeilOf(groups)));
  return std::max(workspace, static_cast<std::int64_t>(all / count));
}

std::int64_t Draft::FreeBytes(int owner) const {
  if (options.memory_max_bytes == 0) return std::numeric_limits<std::int64_t>::max();
  return options.memory_max_bytes - owners[owner].MemoryBytes(options);
}

void OwnerQueue::Push(Flops load, int owner) { Push({load, draft_.turns[owner], owner}); }

void OwnerQueue::Push(const Entry& entry) {
  heap_.push_back(entry);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

OwnerQueue::Entry OwnerQueue::Pop() {
  std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
  const Entry entry = heap_.back();
  heap_.pop_back();
  return entry;
}

absl::Status NoOwner(const Draft& draft, int parameter, std::int64_t bytes, const char* what) {
  std::int64_t most = 0;
  for (int owner = 0; owner < draft.count(); ++owner) {
    most = std::max(most, draft.FreeBytes(owner));
  }
  return absl::ResourceExhaustedError(absl::StrFormat(
      "parameter \"%s\": plan: %s needs %d bytes, the memory limit is %d bytes for each of %d "
      "owners and at most %d are left on one: add daemons or raise the limit",
      draft.run.parameters[parameter].name, what, bytes, draft.options.memory_max_bytes,
      draft.count(), most));
}

}  // namespace muond
