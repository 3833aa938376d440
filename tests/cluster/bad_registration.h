// A registration that would be accepted, what can be wrong with it, and the check that it is only
// refused: for the tables of bad registrations.
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/raw_trainer.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {

using Change = std::function<void(v1::RegisterRequest&)>;

struct Registration {
  const char* name;
  absl::StatusCode code;
  std::vector<std::string> says;
  Change change;  // of a registration that would be accepted
};

inline void PrintTo(const Registration& one, std::ostream* out) { *out << one.name; }

// Parameters w (4, 4) of group muon and p (12) of group adamw, of one rank.
inline RunSpec Good() {
  RunSpec spec = SpecOf({Matrix("w", 4, 4), Vector("p", 12)});
  spec.name = "new";
  return spec;
}

inline v1::Parameter& W(v1::RegisterRequest& request) {
  return *request.mutable_run()->mutable_parameters(0);
}
inline v1::Parameter& P(v1::RegisterRequest& request) {
  return *request.mutable_run()->mutable_parameters(1);
}
inline v1::Group& Muon(v1::RegisterRequest& request) {
  for (v1::Group& group : *request.mutable_run()->mutable_groups()) {
    if (group.name() == "muon") return group;
  }
  MUOND_CHECK(false, "the run has that group");
}

inline Change Shape(const Dims& dims) {
  return [dims](v1::RegisterRequest& request) {
    P(request).mutable_shape()->clear_dims();
    for (const std::int64_t dim : dims) P(request).mutable_shape()->add_dims(dim);
  };
}

// Flat ranges [begin, end) of p in place of the good one.
inline Change Ranges(const std::vector<std::pair<std::int64_t, std::int64_t>>& ranges) {
  return [ranges](v1::RegisterRequest& request) {
    for (v1::ParameterSlices& slices : *request.mutable_slices()) {
      if (slices.parameter() != "p") continue;
      slices.clear_boxes();
      for (const auto& [begin, end] : ranges) {
        v1::Box* box = slices.add_boxes();
        box->add_offset(begin);
        box->add_size(end - begin);
        box->set_flat(true);
      }
    }
  };
}

inline Change Coefficients(const std::string& name, std::int64_t steps) {
  return [=](v1::RegisterRequest& request) {
    Muon(request).set_coefficients(name);
    Muon(request).set_ns_steps(steps);
  };
}

// w and a second matrix "v" under one tie id; `other` makes v differ.
inline Change Tied(const std::function<void(v1::Parameter&)>& other) {
  return [other](v1::RegisterRequest& request) {
    W(request).set_tie("t");
    v1::Parameter v = W(request);
    v.set_name("v");
    other(v);
    *request.mutable_run()->add_parameters() = v;
  };
}

// One bad registration: its error has the case's code and says what the case says, the run that is
// there goes on, and the good registration is accepted afterwards.
inline void ExpectRefused(const Registration& one) {
  const auto service = StartService();
  RunSpec spec = Good();
  spec.name = "run";
  TestRun run(*service, spec);
  run.Step(NoiseFor(spec, 1));
  const v1::DigestReply before = run.Digest();

  RawTrainer trainer(*service, "new");
  const v1::RegisterRequest good = trainer.RegisterRequestOf(Good(), CutOf(Good(), {}, 0));
  v1::RegisterRequest bad = good;
  one.change(bad);
  const absl::Status status = trainer.Register(bad).status();
  EXPECT_EQ(status.code(), one.code) << status;
  for (const std::string& part : one.says) {
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(part));
  }
  EXPECT_EQ(Must(run.admin().Status()).runs_size(), 1);
  EXPECT_EQ(run.Digest().tensor_digest(), before.tensor_digest());
  EXPECT_EQ(run.Digest().control_digest(), before.control_digest());
  EXPECT_TRUE(run.Step(NoiseFor(spec, 2)).applied);
  EXPECT_TRUE(TestRun(*service, Good()).Step(NoiseFor(spec, 3)).applied) << "the name is free";
}

inline std::string RegistrationName(const ::testing::TestParamInfo<Registration>& info) {
  return info.param.name;
}

}  // namespace muond::cluster
