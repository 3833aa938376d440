// A running run that is sent what it must refuse, and the check that it only refuses: for the
// tables of bad input.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/raw_trainer.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {

inline RunSpec BenchSpec() {
  RunSpec spec = SpecOf({Matrix("w", 4, 4), Vector("p", 6)});
  spec.loss_scale = {.mode = LossScaleMode::kExternal, .initial = 1};
  return spec;
}

// A run that has applied one step and waits for step 1; both parameters lie in two flat slices.
struct Bench {
  std::unique_ptr<Service> service = StartService();
  TestRun run{*service, BenchSpec(), {.cut = {Cut::kFlat, 2}}};
  RawTrainer trainer{*service, "run"};
  Tensors good = NoiseFor(BenchSpec(), 2);

  Bench() { MUOND_CHECK(run.Step(NoiseFor(BenchSpec(), 1)).applied, "a good step"); }

  v1::Chunk Good(const std::string& name, std::int64_t slice) {
    const std::string bytes = BoxBytes(run.slices(0).at(name)[slice], *run.parameter(name).shape,
                                       good.at(name), Dtype::kF32);
    return ChunkOf(name, slice, 0, bytes);
  }
  absl::Status Push(const std::vector<v1::Chunk>& chunks) {
    Must(trainer.Begin(1));
    return trainer.Push(1, chunks).status();
  }
  absl::Status Begin(const std::function<void(v1::BeginRequest&)>& change) {
    v1::BeginRequest request = trainer.BeginRequestOf(1);
    change(request);
    return trainer.Begin(request);
  }
  absl::Status BeginMuon(const std::function<void(v1::Hyperparameters&)>& change) {
    return Begin([&](v1::BeginRequest& request) {
      v1::Hyperparameters& values = (*request.mutable_muon())["muon"];
      values.set_lr(.1);
      values.set_momentum(.9);
      change(values);
    });
  }
  absl::Status Pull(const std::function<void(v1::PullRequest&)>& change) {
    v1::PullRequest request;
    *request.mutable_id() = trainer.id();
    request.set_version(1);
    change(request);
    return trainer.Pull(request).status();
  }
  absl::Status PullBox(std::int64_t offset, std::int64_t size) {
    return Pull([&](v1::PullRequest& request) {
      v1::ParameterSlices* slices = request.add_slices();
      slices->set_parameter("p");
      slices->add_boxes()->add_offset(offset);
      slices->mutable_boxes(0)->add_size(size);
      slices->mutable_boxes(0)->set_flat(true);
    });
  }
};

struct Case {
  const char* name;
  absl::StatusCode code;
  std::vector<std::string> says;  // the object and the cause
  std::function<absl::Status(Bench&)> act;
};

inline void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

// One bad request: its error has the case's code and says what the case says, no digest changes,
// and a correct step is taken afterwards.
inline void ExpectHarmless(const Case& one) {
  Bench bench;
  const v1::DigestReply before = bench.run.Digest();
  const absl::Status status = one.act(bench);
  EXPECT_EQ(status.code(), one.code) << status;
  for (const std::string& part : one.says) {
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(part));
  }
  EXPECT_EQ(bench.run.Digest().tensor_digest(), before.tensor_digest());
  EXPECT_EQ(bench.run.Digest().control_digest(), before.control_digest());
  EXPECT_TRUE(Must(bench.run.TryStep({.gradients = {{bench.good}}})[0]).applied);
  EXPECT_NE(bench.run.Digest().tensor_digest(), before.tensor_digest());
}

inline std::string CaseName(const ::testing::TestParamInfo<Case>& info) { return info.param.name; }

}  // namespace muond::cluster
