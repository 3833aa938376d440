#include "tests/support/service_fixture.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "grpcpp/channel.h"
#include "proto/steady_time.h"
#include "tests/support/device_like_backend.h"

namespace muond::cluster {
namespace {

using client::SliceSink;
using client::SliceSource;

void AppendElement(std::string& bytes, float value, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return;
  }
  const std::uint16_t bits =
      dtype == Dtype::kF16 ? kernels::FloatToF16(value) : kernels::FloatToBF16(value);
  bytes.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
}

float ElementAt(const std::string& bytes, std::int64_t index, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    float value;
    std::memcpy(&value, bytes.data() + index * 4, sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, bytes.data() + index * 2, sizeof(bits));
  return dtype == Dtype::kF16 ? kernels::F16ToFloat(bits) : kernels::BF16ToFloat(bits);
}

// Part `part` of `parts` nearly equal ones of [0, size).
std::pair<std::int64_t, std::int64_t> PartOf(std::int64_t size, std::int64_t part,
                                             std::int64_t parts) {
  const std::int64_t begin = size * part / parts;
  return {begin, size * (part + 1) / parts - begin};
}

// Piece `piece` of `pieces` of a tensor.
Box PieceOf(const Dims& shape, std::int64_t elements, Cut::Kind kind, std::int64_t piece,
            std::int64_t pieces) {
  if (kind == Cut::kFlat || shape.empty()) {
    const auto [begin, size] = PartOf(elements, piece, pieces);
    return Box{{begin}, {size}, true};
  }
  Box box = WholeBox(shape);
  const std::size_t along = kind == Cut::kRows ? 0 : shape.size() - 1;
  std::tie(box.offset[along], box.size[along]) = PartOf(shape[along], piece, pieces);
  return box;
}

}  // namespace

void Eventually(const std::string& what, const std::function<bool()>& is_so) {
  const absl::Time deadline = SteadyNow() + absl::Minutes(1);
  while (!is_so()) {
    MUOND_CHECK(SteadyNow() < deadline, what + ": a minute has passed");
    absl::SleepFor(absl::Milliseconds(3));
  }
}

std::unique_ptr<Service> StartService(ServiceOptions options) {
  const char* devices = std::getenv("MUOND_TEST_DEVICES");
  if (devices != nullptr && options.make_backends == nullptr) {
    options.make_backends = [count = std::atoi(devices),
                             reference = options.backend ==
                                         "reference"](const kernels::BackendOptions& made) {
      std::vector<std::unique_ptr<kernels::Backend>> backends;
      for (int i = 0; i < count; ++i) {
        backends.push_back(muond::testing::MakeDeviceLikeBackend(
            reference ? kernels::MakeReferenceBackend() : kernels::MakeCpuBackend(made)));
      }
      return backends;
    };
  }
  return Must(Service::Start(options));
}

ParameterSpec Matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
  return {.name = name,
          .shape = Dims{rows, cols},
          .group = "muon",
          .kind = Kind::kMatrix,
          .role = Role::kHidden};
}

ParameterSpec Vector(const std::string& name, std::int64_t elements) {
  return {.name = name,
          .shape = Dims{elements},
          .group = "adamw",
          .kind = Kind::kVector,
          .role = Role::kNorm};
}

RunSpec SpecOf(std::vector<ParameterSpec> parameters, std::int64_t world_size) {
  RunSpec spec{.name = "run", .world_size = world_size, .parameters = std::move(parameters)};
  std::set<std::string> groups;
  for (const ParameterSpec& parameter : spec.parameters) groups.insert(parameter.group);
  for (const std::string& name : groups) {
    GroupSpec group{.name = name,
                    .algorithm = name == "adamw" ? Algorithm::kAdamW : Algorithm::kMuon};
    group.muon.lr = 0.1;
    group.adamw.lr = 0.1;
    spec.groups.push_back(group);
  }
  return spec;
}

GroupSpec& GroupOf(RunSpec& spec, const std::string& name) {
  const auto found = std::find_if(spec.groups.begin(), spec.groups.end(),
                                  [&](const GroupSpec& group) { return group.name == name; });
  MUOND_CHECK(found != spec.groups.end(), "the spec has that group");
  return *found;
}

Floats Noise(std::int64_t elements, std::uint64_t seed) {
  Floats values(static_cast<std::size_t>(elements));
  std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (float& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = static_cast<float>(static_cast<std::int64_t>(state) >> 40) / 8388608.0f;
  }
  return values;
}

Tensors NoiseFor(const RunSpec& spec, std::uint64_t seed) {
  Tensors tensors;
  for (const ParameterSpec& parameter : spec.parameters) {
    tensors[parameter.name] = Noise(Must(ElementCount(*parameter.shape)), seed++ * 7919);
  }
  return tensors;
}

RankSlices CutOf(const RunSpec& spec, Cut cut, std::int64_t rank) {
  RankSlices slices;
  std::set<std::string> ties;
  for (std::size_t i = 0; i < spec.parameters.size(); ++i) {
    const ParameterSpec& parameter = spec.parameters[i];
    const Dims& shape = *parameter.shape;
    const std::int64_t elements = Must(ElementCount(shape));
    const bool first = parameter.tie.empty() || ties.insert(parameter.tie).second;
    if (elements == 0 || (!first && parameter.tie_reduction == TieReduction::kSame)) continue;
    if (parameter.replicated) {
      slices[parameter.name] = {WholeBox(shape)};
      continue;
    }
    if (cut.kind == Cut::kWhole) {
      if (static_cast<std::int64_t>(i) % spec.world_size == rank) {
        slices[parameter.name] = {WholeBox(shape)};
      }
      continue;
    }
    const std::int64_t pieces = spec.world_size * cut.pieces;
    for (std::int64_t piece = rank; piece < pieces; piece += spec.world_size) {
      Box box = PieceOf(shape, elements, cut.kind, piece, pieces);
      if (box.Elements() > 0) slices[parameter.name].push_back(std::move(box));
    }
  }
  return slices;
}

std::string BoxBytes(const Box& box, const Dims& shape, const Floats& tensor, Dtype dtype,
                     double scale) {
  MUOND_CHECK(std::ssize(tensor) == Must(ElementCount(shape)), "a tensor of that shape");
  std::string bytes;
  ForEachRun(box, shape, 0, box.Elements(), [&](std::int64_t at, std::int64_t, std::int64_t n) {
    for (std::int64_t i = at; i < at + n; ++i) {
      AppendElement(bytes, static_cast<float>(tensor[i] * scale), dtype);
    }
  });
  return bytes;
}

TestRun::TestRun(const std::shared_ptr<grpc::Channel>& channel, RunSpec spec,
                 TestRunOptions options)
    : spec_(std::move(spec)), cut_(options.cut), admin_(channel, absl::Seconds(60)) {
  for (std::int64_t rank = 0; rank < spec_.world_size; ++rank) {
    slices_.push_back(CutOf(spec_, options.cut, rank));
    sessions_.push_back(Must(client::Session::Open(spec_, rank, slices_.back(),
                                                   {.channel = channel,
                                                    .call_timeout = options.call_timeout,
                                                    .step_timeout = options.step_timeout,
                                                    .recovery_timeout = options.recovery_timeout,
                                                    .chunk_bytes = options.chunk_bytes})));
  }
  if (options.resume) {
    for (auto& session : sessions_) Must(session->AwaitRestore(options.call_timeout));
    return;
  }
  Tensors initial = NoiseFor(spec_, 1);
  for (const auto& [name, values] : options.initial) initial.at(name) = values;
  for (std::int64_t rank = 0; rank < spec_.world_size; ++rank) {
    const bool complete = InitializeRank(rank, initial, false);
    MUOND_CHECK(complete == (rank + 1 == spec_.world_size) || slices_.back().empty(),
                "complete with the last values");
  }
}

void TestRun::Reinitialize(const Tensors& values) {
  bool complete = false;
  for (std::int64_t rank = 0; rank < spec_.world_size; ++rank) {
    complete = InitializeRank(rank, values, true);
  }
  MUOND_CHECK(complete, "complete with the last values");
}

std::vector<absl::Status> TestRun::TryAdd(const ParameterAddition& addition) {
  std::vector<absl::Status> told(sessions_.size());
  std::vector<std::thread> threads;
  for (std::int64_t rank = 0; rank < spec_.world_size; ++rank) {
    threads.emplace_back([&, rank] {
      RunSpec alone = spec_;
      alone.parameters = addition.parameters;
      told[rank] = session(rank).AddParameters(
          {addition.groups, addition.parameters, CutOf(alone, cut_, rank)});
    });
  }
  for (std::thread& thread : threads) thread.join();
  return told;
}

void TestRun::Add(const ParameterAddition& addition, const Tensors& initial) {
  for (const absl::Status& told : TryAdd(addition)) Must(told);
  const std::size_t first = spec_.parameters.size();
  RunSpec alone = spec_;
  alone.parameters = addition.parameters;
  spec_ = Extended(std::move(spec_), addition.groups, addition.parameters);
  Tensors values = NoiseFor(spec_, 1);
  for (const auto& [name, value] : initial) values.at(name) = value;
  bool complete = false;
  for (std::int64_t rank = 0; rank < spec_.world_size; ++rank) {
    slices_[rank].merge(CutOf(alone, cut_, rank));
    complete = InitializeRank(rank, values, false, first);
  }
  MUOND_CHECK(complete, "complete with the last values");
}

bool TestRun::InitializeRank(std::int64_t rank, const Tensors& values, bool anew,
                             std::size_t from) {
  std::vector<std::string> memory;
  std::vector<SliceSource> sources;
  std::set<std::string> ties;
  for (std::size_t p = from; p < spec_.parameters.size(); ++p) {
    const ParameterSpec& parameter = spec_.parameters[p];
    // Names that are tied share the values of the first.
    const bool first = parameter.tie.empty() || ties.insert(parameter.tie).second;
    if (!first || !slices_[rank].contains(parameter.name)) continue;
    const std::vector<Box>& boxes = slices_[rank].at(parameter.name);
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      memory.push_back(
          BoxBytes(boxes[i], *parameter.shape, values.at(parameter.name), Dtype::kF32));
      sources.push_back({.parameter = parameter.name,
                         .slice = static_cast<std::int64_t>(i),
                         .elements = boxes[i].Elements()});
    }
  }
  for (std::size_t i = 0; i < sources.size(); ++i) sources[i].data = memory[i].data();
  return Must(anew ? session(rank).Reinitialize(sources, "test")
                   : session(rank).Initialize(sources));
}

const ParameterSpec& TestRun::parameter(const std::string& name) const {
  const auto found =
      std::find_if(spec_.parameters.begin(), spec_.parameters.end(),
                   [&](const ParameterSpec& parameter) { return parameter.name == name; });
  MUOND_CHECK(found != spec_.parameters.end(), "the run has that parameter");
  return *found;
}

StepOutcome TestRun::Step(const Tensors& gradients) {
  return Step(StepInput{.gradients = {{gradients}}});
}

StepOutcome TestRun::Step(const StepInput& input) {
  std::vector<absl::StatusOr<StepOutcome>> outcomes = TryStep(input);
  const StepOutcome first = Must(outcomes[0]);
  for (const auto& outcome : outcomes) {
    MUOND_CHECK(Must(outcome) == first, "all ranks are told the same outcome");
  }
  return first;
}

std::vector<absl::StatusOr<StepOutcome>> TestRun::TryStep(const StepInput& input) {
  std::vector<absl::StatusOr<StepOutcome>> outcomes(
      sessions_.size(), absl::UnknownError("the rank has not been answered"));
  std::vector<std::thread> threads;
  for (std::int64_t rank = 1; rank < spec_.world_size; ++rank) {
    threads.emplace_back([&, rank] { outcomes[rank] = StepRank(rank, input); });
  }
  outcomes[0] = StepRank(0, input);
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

absl::StatusOr<StepOutcome> TestRun::StepRank(std::int64_t rank, const StepInput& input) {
  const std::vector<Tensors>& micro_batches =
      input.gradients[input.gradients.size() == 1 ? 0 : rank];
  StepBegin begin = input.begin;
  if (begin.micro_batches == 0) begin.micro_batches = std::ssize(micro_batches);
  if (begin.loss_scale == 0) begin.loss_scale = session(rank).loss_scale();
  const double scale = input.scaled ? 1.0 : begin.loss_scale;
  std::vector<std::string> memory, absent;
  std::vector<SliceSource> sources;
  for (const auto& [name, boxes] : slices_[rank]) {
    if (!micro_batches.at(0).contains(name)) absent.push_back(name);
    for (std::size_t micro = 0; micro < micro_batches.size(); ++micro) {
      const auto gradient = micro_batches[micro].find(name);
      if (gradient == micro_batches[micro].end()) continue;
      for (std::size_t i = 0; i < boxes.size(); ++i) {
        const ParameterSpec& spec = parameter(name);
        const Dtype dtype = input.dtype.value_or(spec.dtype);
        memory.push_back(BoxBytes(boxes[i], *spec.shape, gradient->second, dtype, scale));
        sources.push_back({.parameter = name,
                           .slice = static_cast<std::int64_t>(i),
                           .elements = boxes[i].Elements(),
                           .dtype = dtype,
                           .micro_batch = static_cast<std::int64_t>(micro)});
      }
    }
  }
  for (std::size_t i = 0; i < sources.size(); ++i) sources[i].data = memory[i].data();
  return session(rank).Step(begin, sources, absent);
}

Tensors TestRun::PullAll(bool master) {
  Tensors tensors;
  for (std::int64_t rank = 0; rank < spec_.world_size; ++rank) {
    std::vector<std::string> memory;
    std::vector<SliceSink> sinks;
    for (const auto& [name, boxes] : slices_[rank]) {
      for (std::size_t i = 0; i < boxes.size(); ++i) {
        const Dtype dtype = master ? Dtype::kF32 : parameter(name).dtype;
        memory.emplace_back(boxes[i].Elements() * DtypeBytes(dtype), '\xff');
        sinks.push_back({.parameter = name,
                         .slice = static_cast<std::int64_t>(i),
                         .elements = boxes[i].Elements(),
                         .dtype = dtype});
      }
    }
    for (std::size_t i = 0; i < sinks.size(); ++i) sinks[i].data = memory[i].data();
    Must(session(rank).Pull(session(rank).next_step(), sinks, master));
    for (std::size_t s = 0; s < sinks.size(); ++s) {
      const Dims& shape = *parameter(sinks[s].parameter).shape;
      const Box& box = slices_[rank].at(sinks[s].parameter)[sinks[s].slice];
      Floats& tensor = tensors[sinks[s].parameter];
      tensor.resize(Must(ElementCount(shape)));
      ForEachRun(box, shape, 0, box.Elements(),
                 [&](std::int64_t at, std::int64_t from, std::int64_t n) {
                   for (std::int64_t i = 0; i < n; ++i) {
                     tensor[at + i] = ElementAt(memory[s], from + i, sinks[s].dtype);
                   }
                 });
    }
  }
  return tensors;
}

v1::DigestReply TestRun::Digest(bool per_parameter) {
  return Must(admin_.Digest(spec_.name, per_parameter));
}

v1::RunStatus TestRun::Status() {
  const v1::StatusReply reply = Must(admin_.Status(spec_.name));
  MUOND_CHECK(reply.runs_size() == 1, "one run was asked for");
  return reply.runs(0);
}

v1::ParameterState TestRun::Describe(const std::string& name) {
  const v1::DescribeParametersReply reply = Must(admin_.DescribeParameters(spec_.name, {name}));
  MUOND_CHECK(reply.parameters_size() == 1, "one parameter was asked for");
  return reply.parameters(0);
}

}  // namespace muond::cluster
