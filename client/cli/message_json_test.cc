#include "client/cli/message_json.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "muond/v1/optimizer.pb.h"

namespace muond::cli {
namespace {

TEST(MessageJson, HasEveryFieldWhateverItsValue) {
  const Json json = MessageToJson(v1::RunStatus());
  for (int i = 0; i < v1::RunStatus::descriptor()->field_count(); ++i) {
    EXPECT_TRUE(json.contains(v1::RunStatus::descriptor()->field(i)->name()));
  }
  EXPECT_EQ(json["steps_applied"], 0);
  EXPECT_EQ(json["position"], nullptr) << "a missing message is null";
  EXPECT_EQ(json["ranks_registered"], Json::array());
  EXPECT_EQ(json["steps_skipped"], Json::object());
  EXPECT_EQ(json["step_in_flight"], false);
}

TEST(MessageJson, KeepsIntegersAsNumbers) {
  v1::RunStatus run;
  run.set_elements(std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(MessageToJson(run)["elements"].dump(), "9223372036854775807");
}

TEST(MessageJson, NamesEnumeratorsShortly) {
  v1::RunStatus run;
  run.mutable_position()->set_state(v1::RUN_STATE_RUNNING);
  run.mutable_position()->mutable_last_outcome()->set_cause(v1::SKIP_CAUSE_OVERFLOW);
  const Json json = MessageToJson(run);
  EXPECT_EQ(json["position"]["state"], "running");
  EXPECT_EQ(json["position"]["last_outcome"]["cause"], "overflow");
}

TEST(MessageJson, WritesNullForWhatJsonHasNoNumberFor) {
  v1::RunStatus run;
  run.set_grad_norm(std::nan(""));
  run.set_loss_scale(INFINITY);
  const Json json = MessageToJson(run);
  EXPECT_EQ(json["grad_norm"], nullptr);
  EXPECT_EQ(json["loss_scale"], nullptr);
}

TEST(MessageJson, SortsMapsAndNestsMessages) {
  v1::StatusReply reply;
  auto& skipped = *reply.add_runs()->mutable_steps_skipped();
  skipped["overflow"] = 2;
  skipped["norm_threshold"] = 1;
  EXPECT_EQ(MessageToJson(reply)["runs"][0]["steps_skipped"].dump(),
            "{\"norm_threshold\":1,\"overflow\":2}");
}

}  // namespace
}  // namespace muond::cli
