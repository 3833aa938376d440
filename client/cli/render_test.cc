#include "client/cli/render.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

v1::StatusReply OneRun() {
  v1::StatusReply status;
  status.set_version("0.1.0");
  status.set_pid(42);
  status.set_uptime_seconds(192);
  status.set_backend("cpu");
  status.set_backend_description("cpu: OpenBLAS, 2 threads");
  v1::RunStatus& run = *status.add_runs();
  run.set_run("demo");
  run.mutable_position()->set_state(v1::RUN_STATE_RUNNING);
  run.mutable_position()->set_next_step(120);
  run.set_world_size(2);
  run.add_ranks_registered(0);
  run.add_ranks_registered(1);
  run.set_steps_applied(118);
  (*run.mutable_steps_skipped())["overflow"] = 2;
  run.set_loss_scale(65536);
  run.set_grad_norm(1.2345678);
  run.set_muon_parameters(4);
  run.set_adamw_parameters(3);
  run.set_muon_matrices(6);
  run.set_newton_schulz_calls(708);
  run.set_elements(1000);
  run.set_state_bytes(8000);
  return status;
}

TEST(RenderStatus, ShowsDaemonRunsAndCauses) {
  EXPECT_EQ(RenderStatus(OneRun(), false),
            "muond 0.1.0  pid 42  up 3m12s  backend cpu: OpenBLAS, 2 threads\n"
            "\n"
            "RUN   STATE    RANKS  NEXT STEP  APPLIED  SKIPPED  LOSS SCALE  GRAD NORM  MUON  ADAMW"
            "  MATRICES  NS CALLS  ELEMENTS   MEMORY\n"
            "demo  running    2/2        120      118        2       65536      1.235     4      3"
            "         6       708      1000  7.8 KiB\n"
            "\n"
            "run \"demo\": skipped by cause: overflow 2\n");
}

TEST(RenderStatus, SaysSoWhenThereIsNoRun) {
  v1::StatusReply status;
  status.set_version("0.1.0");
  EXPECT_THAT(RenderStatus(status, false), HasSubstr("\n\nno run\n"));
}

TEST(RenderStatus, ExplainsTroubleInSentences) {
  v1::StatusReply status = OneRun();
  v1::RunStatus& run = *status.mutable_runs(0);
  run.mutable_position()->set_state(v1::RUN_STATE_FAILED);
  run.set_failure("Newton-Schulz of \"w\" is not finite");
  run.set_momentum_nonfinite(3);
  run.set_step_in_flight(true);
  run.set_step_in_flight_seconds(12);
  run.add_waiting_ranks(1);
  run.add_waiting_ranks(3);
  run.set_waiting_slices(7);
  const std::string text = RenderStatus(status, true);
  EXPECT_THAT(text, HasSubstr("\x1b[31mfailed\x1b[0m"));
  EXPECT_THAT(text, HasSubstr("run \"demo\": failed: Newton-Schulz of \"w\" is not finite"));
  EXPECT_THAT(text, HasSubstr("3 state tensors hold non-finite elements"));
  EXPECT_THAT(text, HasSubstr("step 120 in flight for 12s, waiting for ranks 1, 3, 7 slices"));
  EXPECT_THAT(RenderStatus(status, false), Not(HasSubstr("\x1b")));
}

v1::DescribeParametersReply TwoParameters() {
  v1::DescribeParametersReply reply;
  v1::ParameterState& matrix = *reply.add_parameters();
  matrix.mutable_parameter()->set_name("h.0.w");
  matrix.mutable_parameter()->set_group("hidden");
  matrix.mutable_parameter()->mutable_shape()->add_dims(4);
  matrix.mutable_parameter()->mutable_shape()->add_dims(3);
  matrix.mutable_routed()->set_algorithm(v1::ALGORITHM_MUON);
  matrix.mutable_routed()->set_reason("hidden matrix");
  auto* view = matrix.mutable_routed()->add_matrices();
  view->set_rows(4);
  view->set_cols(3);
  view->set_count(1);
  matrix.set_t(10);
  matrix.set_momentum_norm(0.5);
  matrix.set_weight_norm(2);
  matrix.mutable_hyperparameters()->set_lr(0.02);
  v1::ParameterState& bias = *reply.add_parameters();
  bias.mutable_parameter()->set_name("h.0.b");
  bias.mutable_parameter()->set_group("rest");
  bias.mutable_parameter()->mutable_shape()->add_dims(3);
  bias.mutable_routed()->set_algorithm(v1::ALGORITHM_ADAMW);
  bias.mutable_routed()->set_reason("vector");
  bias.set_t(10);
  return reply;
}

TEST(RenderParameters, ShowsWhereEachParameterWentAndWhy) {
  EXPECT_EQ(RenderParameters(TwoParameters(), false),
            "NAME   SHAPE   GROUP   ALGORITHM  REASON         MATRICES   T    LR  MOMENTUM NORM"
            "  WEIGHT NORM\n"
            "h.0.w  [4, 3]  hidden  muon       hidden matrix  4x3       10  0.02            0.5"
            "            2\n"
            "h.0.b  [3]     rest    adamw      vector         -         10     0              0"
            "            0\n"
            "\n"
            "Muon 1 (matrices 1), AdamW 1\n");
}

TEST(RenderParameters, ShowsNonFiniteStateOnlyWhereThereIsSome) {
  v1::DescribeParametersReply reply = TwoParameters();
  EXPECT_THAT(RenderParameters(reply, false), Not(HasSubstr("NON-FINITE")));
  reply.mutable_parameters(0)->set_nonfinite_elements(7);
  EXPECT_THAT(RenderParameters(reply, true), HasSubstr("\x1b[31m7\x1b[0m"));
}

TEST(RenderParameters, CountsATiedStateOnce) {
  v1::DescribeParametersReply reply = TwoParameters();
  *reply.add_parameters() = reply.parameters(0);
  reply.mutable_parameters(2)->mutable_routed()->set_tied_to("h.0.w");
  const std::string text = RenderParameters(reply, false);
  EXPECT_THAT(text, HasSubstr("hidden matrix, tied to h.0.w"));
  EXPECT_THAT(text, HasSubstr("Muon 1 (matrices 1), AdamW 1"));
}

}  // namespace
}  // namespace muond::cli
