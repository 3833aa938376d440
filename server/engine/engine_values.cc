// Values in and out: initial values to the weights, weights to those who pull.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/engine/engine.h"

namespace muond {
namespace {

absl::Status FromKernel(const ShardState& state, const char* what, const kernels::Error& error) {
  return absl::InternalError(
      absl::StrFormat("parameter \"%s\": %s: %s", state.spec->name, what, error.message()));
}

}  // namespace

// The elements of one shard of a slice of initial values, widened.
struct Engine::Incoming {
  ShardState* state = nullptr;
  ElementRange range;  // of the box
  Buffer own;          // behind `values`, unless that is memory of the shard's
  float* values = nullptr;
};

absl::Status Engine::WriteInitial(int parameter, const Box& box, const void* values, Dtype dtype) {
  const Dims& shape = *spec_.parameters[parameter].shape;
  const auto* from = static_cast<const char*>(values);
  std::vector<Incoming> incoming;
  auto state = ShardsOf(parameter).begin();
  for (const Shard& shard : shards_[parameter]) {
    const ElementRange range = RangeInShard(box, shape, shard);
    if (shard.owner == device_) {
      if (range.count > 0) {
        incoming.push_back({.state = &*state, .range = range});
        MUOND_RETURN_IF_ERROR(Widen(incoming.back(), box, from, dtype));
      }
      ++state;
    }
    from += range.count * DtypeBytes(dtype);
  }
  // Nothing is written unless all of it is good.
  for (Incoming& part : incoming) MUOND_RETURN_IF_ERROR(PutInitial(part, box));
  return absl::OkStatus();
}

absl::Status Engine::Widen(Incoming& part, const Box& box, const void* values, Dtype dtype) {
  ShardState& state = *part.state;
  const std::int64_t count = part.range.count;
  // On a device there is no gradient yet where the gradient will be.
  part.values = state.gradient_memory;
  if (part.values == nullptr) {
    part.own = Buffer(backend_, count * sizeof(float));
    if (!part.own.ok()) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("parameter \"%s\": initial values: no memory for %d bytes",
                          state.spec->name, count * sizeof(float)));
    }
    part.values = part.own.floats();
  }
  const kernels::StateView view{part.values, static_cast<std::size_t>(count)};
  kernels::StateScan scan;
  kernels::Error error = backend_.Accumulate(part.values, values, dtype, count, true);
  if (!error) error = backend_.ScanState({&view, 1}, {&scan, 1});
  if (error) return FromKernel(state, "initial values", error);
  if (scan.nonfinite > 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("parameter \"%s\": initial values of %s: %d non-finite elements",
                        state.spec->name, box.ToString(), scan.nonfinite));
  }
  if (!state.spec->replicated) return absl::OkStatus();
  state.initialized.resize(state.elements);
  return CheckReplicas(part, box);
}

// What another rank sent of these elements must be the same.
absl::Status Engine::CheckReplicas(const Incoming& part, const Box& box) const {
  constexpr std::int64_t kPiece = kernels::kBlockElements;
  const ShardState& state = *part.state;
  std::vector<float> master(kPiece), sent(kPiece);
  kernels::Error error;
  bool same = true;
  // Piece by piece: neither has to be host memory.
  auto compare = [&](std::int64_t at, std::int64_t from, std::int64_t n) {
    if (!error) error = backend_.Download(master.data(), state.weight + at, n * sizeof(float));
    if (!error) error = backend_.Download(sent.data(), part.values + from, n * sizeof(float));
    for (std::int64_t i = 0; i < n && !error; ++i) {
      if (!state.initialized[at + i]) continue;
      same = same && std::memcmp(&master[i], &sent[i], sizeof(float)) == 0;
    }
  };
  ForEachRun(box, *state.spec->shape, part.range.first, part.range.count,
             [&](std::int64_t at, std::int64_t from, std::int64_t n) {
               for (std::int64_t i = 0; i < n; i += kPiece) {
                 compare(at - state.first + i, from - part.range.first + i,
                         std::min(kPiece, n - i));
               }
             });
  if (error) return FromKernel(state, "initial values", error);
  if (same) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("parameter \"%s\": initial values of %s: replicas disagree: another rank "
                      "sent other values",
                      state.spec->name, box.ToString()));
}

absl::Status Engine::PutInitial(Incoming& part, const Box& box) {
  ShardState& state = *part.state;
  std::vector<kernels::CopyJob> jobs;
  ForEachRun(box, *state.spec->shape, part.range.first, part.range.count,
             [&](std::int64_t at, std::int64_t from, std::int64_t n) {
               at -= state.first;
               jobs.push_back(
                   {state.weight + at, part.values + (from - part.range.first), n * sizeof(float)});
               if (!state.initialized.empty()) std::fill_n(state.initialized.begin() + at, n, true);
             });
  if (auto error = backend_.Copy(jobs)) return FromKernel(state, "initial values", error);
  return absl::OkStatus();
}

absl::Status Engine::FinishInitial() {
  std::vector<kernels::StateView> views;
  for (const ShardState& state : states_) {
    views.push_back({state.weight, static_cast<std::size_t>(state.elements)});
  }
  std::vector<kernels::StateScan> scans(views.size());
  if (auto error = backend_.ScanState(views, scans)) {
    return absl::InternalError(absl::StrFormat("scan weights: %s", error.message()));
  }
  auto scan = scans.begin();
  for (ShardState& state : states_) {
    state.weight_scan = *scan++;
    state.initialized = {};
  }
  return absl::OkStatus();
}

absl::Status Engine::Read(int parameter, const Box& box, std::int64_t first, std::int64_t count,
                          Dtype dtype, void* out) {
  auto* to = static_cast<char*>(out);
  // On a device a piece is gathered before it leaves: one transfer, not one for every row.
  const std::int64_t piece =
      backend_.host_memory() ? count : static_cast<std::int64_t>(scratch_.bytes() / sizeof(float));
  for (const ShardState& state : ShardsOf(parameter)) {
    const ElementRange here =
        RangeInShard(box, *state.spec->shape, {.first = state.first, .elements = state.elements});
    const std::int64_t end = std::min(first + count, here.first + here.count);
    for (std::int64_t at = std::max(first, here.first); at < end; at += piece) {
      const ElementRange range{at, std::min(piece, end - at)};
      if (auto error = Gather(state, box, range, dtype, to + (at - first) * DtypeBytes(dtype))) {
        return FromKernel(state, "read", error);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Engine::ReadAll(std::span<const ReadJob> jobs) {
  std::vector<kernels::RoundJob> rounds;
  for (const ReadJob& job : jobs) {
    const std::size_t size = DtypeBytes(job.dtype);
    for (const ShardState& state : ShardsOf(job.state)) {
      const ElementRange here = RangeInShard(job.box, *state.spec->shape,
                                             {.first = state.first, .elements = state.elements});
      const std::int64_t begin = std::max(job.range.first, here.first);
      const std::int64_t end =
          std::min(job.range.first + job.range.count, here.first + here.count);
      if (begin >= end) continue;
      ForEachRun(job.box, *state.spec->shape, begin, end - begin,
                 [&](std::int64_t at, std::int64_t from, std::int64_t n) {
                   rounds.push_back(
                       {.dst = static_cast<char*>(job.out) + (from - job.range.first) * size,
                        .dtype = job.dtype,
                        .src = state.weight + (at - state.first),
                        .elements = static_cast<std::size_t>(n)});
                 });
    }
  }
  auto error = backend_.RoundAll(rounds);
  return error ? absl::InternalError(absl::StrFormat("read parameters: %s", error.message()))
               : absl::OkStatus();
}

kernels::RoundedCopy ParameterTargets::At(const ShardState& state, std::int64_t element) const {
  const auto found = by_state.find(state.parameter);
  if (found == by_state.end()) return {};
  const std::size_t at =
      static_cast<std::size_t>(state.packed + element) * DtypeBytes(found->second.dtype);
  return {static_cast<char*>(found->second.data) + at, found->second.dtype};
}

kernels::Error Engine::Gather(const ShardState& state, const Box& box, const ElementRange& range,
                              Dtype dtype, char* out) {
  struct Run {
    const float* values;
    std::int64_t begin, elements;  // place in the piece
  };
  std::vector<Run> runs;
  ForEachRun(box, *state.spec->shape, range.first, range.count,
             [&](std::int64_t at, std::int64_t from, std::int64_t n) {
               runs.push_back({state.weight + (at - state.first), from - range.first, n});
             });
  if (!backend_.host_memory() && runs.size() > 1) {
    std::vector<kernels::CopyJob> jobs;
    for (const Run& run : runs) {
      jobs.push_back({scratch_.floats() + run.begin, run.values, run.elements * sizeof(float)});
    }
    if (auto error = backend_.Copy(jobs)) return error;
    runs = {{scratch_.floats(), 0, range.count}};
  }
  for (const Run& run : runs) {
    if (auto error =
            backend_.Round(out + run.begin * DtypeBytes(dtype), dtype, run.values, run.elements)) {
      return error;
    }
  }
  return {};
}

}  // namespace muond
