#include "client/examples/embedded/trainer.h"

#include <limits>
#include <memory>
#include <utility>

#include "client/cpp/admin.h"
#include "proto/check.h"

namespace muond::embedded_example {
namespace {

constexpr char kRun[] = "embedded";

// The run: what all ranks of a trainer agree on. This one has a single rank.
RunSpec MakeRun() {
  ParameterSpec w;
  w.name = "w";
  w.shape = Dims{2, 2};
  w.role = Role::kHidden;  // a hidden matrix: Muon's
  w.group = "all";
  ParameterSpec b;
  b.name = "b";
  b.shape = Dims{2};  // a vector: AdamW's
  b.group = "all";
  RunSpec run;
  run.name = kRun;
  run.parameters = {w, b};
  run.groups.emplace_back().name = "all";
  run.loss_scale = {.mode = LossScaleMode::kDynamic, .initial = 1024};
  return run;
}

// One step whose gradients are g and -g, made with the loss scale that the service wants.
absl::StatusOr<StepOutcome> Step(client::Session& session, float g) {
  const auto scale = static_cast<float>(session.loss_scale());
  const std::vector<float> w = {g * scale, 0, 0, -g * scale};
  const std::vector<float> b = {g * scale, -g * scale};
  StepBegin begin;
  begin.step = session.next_step();
  begin.loss_scale = session.loss_scale();
  begin.muon["all"] = {.lr = 0.1};
  begin.adamw["all"] = {.lr = 0.1};
  return session.Step(
      begin, std::vector<client::SliceSource>{{.parameter = "w", .data = w.data(), .elements = 4},
                                              {.parameter = "b", .data = b.data(), .elements = 2}});
}

}  // namespace

absl::StatusOr<Training> Train(const client::SessionOptions& options) {
  // Which part of which parameter this rank holds: all of both.
  const RankSlices slices = {{"w", {WholeBox({2, 2})}}, {"b", {WholeBox({2})}}};
  MUOND_ASSIGN_OR_RETURN(const auto session, client::Session::Open(MakeRun(), 0, slices, options));

  const std::vector<float> w = {1, 0, 0, 1};
  const std::vector<float> b = {1, 1};
  MUOND_RETURN_IF_ERROR(session
                            ->Initialize(std::vector<client::SliceSource>{
                                {.parameter = "w", .data = w.data(), .elements = 4},
                                {.parameter = "b", .data = b.data(), .elements = 2}})
                            .status());

  // The third step overflows: it is skipped, no byte of the state changes, the loss scale halves.
  Training training;
  for (const float g : {1.0f, 2.0f, std::numeric_limits<float>::infinity(), 3.0f}) {
    MUOND_ASSIGN_OR_RETURN(StepOutcome outcome, Step(*session, g));
    training.outcomes.push_back(std::move(outcome));
  }

  training.weights.resize(4);
  MUOND_RETURN_IF_ERROR(
      session->Pull(session->next_step(),
                    std::vector<client::SliceSink>{
                        {.parameter = "w", .data = training.weights.data(), .elements = 4}}));
  client::Admin admin = options.channel != nullptr
                            ? client::Admin(options.channel, options.call_timeout)
                            : client::Admin(options.endpoint, options.call_timeout);
  MUOND_ASSIGN_OR_RETURN(const v1::DigestReply digest, admin.Digest(kRun));
  training.digest = digest.tensor_digest();
  MUOND_RETURN_IF_ERROR(session->Close().status());
  return training;
}

}  // namespace muond::embedded_example
