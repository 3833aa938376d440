// The verbs that watch, diagnose and drain, against a daemon that is only a script of replies.
#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <sstream>

#include "client/cli/chrome_trace.h"
#include "client/cli/doctor.h"
#include "client/cli/message_json.h"
#include "client/cli/muonctl.h"
#include "client/cli/render.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "muond/v1/admin.grpc.pb.h"
#include "muond/v1/optimizer.grpc.pb.h"

namespace muond::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

v1::StepEvent Event(std::int64_t step, const std::string& daemon = "a:1") {
  v1::StepEvent event;
  event.set_run("demo");
  event.set_daemon(daemon);
  event.mutable_outcome()->set_step(step);
  event.mutable_outcome()->set_applied(true);
  event.mutable_outcome()->set_next_loss_scale(65536);
  event.set_begin_seconds(100 + static_cast<double>(step));
  event.set_end_seconds(100.5 + static_cast<double>(step));
  v1::PhaseSpan* wait = event.add_phases();
  wait->set_phase("receive");
  wait->set_device(-1);
  wait->set_start_seconds(event.begin_seconds());
  wait->set_seconds(.25);
  v1::PhaseSpan* span = event.add_phases();
  span->set_phase("newton_schulz");
  span->set_device(1);
  span->set_start_seconds(event.begin_seconds() + .25);
  span->set_seconds(.125);
  v1::Remarkable* worst = event.add_worst_residuals();
  worst->set_parameter("blk.0.wq");
  worst->set_value(.875);
  return event;
}

class ScriptedOptimizer final : public v1::Optimizer::Service {
 public:
  grpc::Status Status(grpc::ServerContext*, const v1::StatusRequest*,
                      v1::StatusReply* reply) override {
    v1::RunStatus* run = reply->add_runs();
    run->set_run("demo");
    run->mutable_position()->set_state(v1::RUN_STATE_RUNNING);
    return grpc::Status::OK;
  }
  grpc::Status DescribeParameters(grpc::ServerContext*, const v1::DescribeParametersRequest*,
                                  v1::DescribeParametersReply* reply) override {
    for (int i = 0; i < 12; ++i) {
      v1::ParameterState* state = reply->add_parameters();
      state->mutable_parameter()->set_name("p" + std::to_string(i));
      state->mutable_parameter()->set_group("g");
      state->mutable_parameter()->mutable_shape()->add_dims(4);
      state->mutable_routed()->set_algorithm(i < 2 && muon ? v1::ALGORITHM_MUON
                                                           : v1::ALGORITHM_ADAMW);
      state->mutable_routed()->set_reason("a vector of " + std::to_string(i + 4) + " elements");
      state->set_nonfinite_elements(i == 7 ? 3 : 0);
    }
    return grpc::Status::OK;
  }
  bool muon = true;
};

class ScriptedAdmin final : public v1::Admin::Service {
 public:
  grpc::Status Watch(grpc::ServerContext* context, const v1::WatchRequest*,
                     grpc::ServerWriter<v1::StepEvent>* writer) override {
    for (std::int64_t step = 0; !context->IsCancelled() && writer->Write(Event(step)); ++step) {
    }
    return grpc::Status::CANCELLED;
  }
  grpc::Status LastSteps(grpc::ServerContext*, const v1::LastStepsRequest*,
                         v1::LastStepsReply* reply) override {
    *reply->add_steps() = Event(41);
    return grpc::Status::OK;
  }
  grpc::Status Settings(grpc::ServerContext*, const v1::SettingsRequest*,
                        v1::SettingsReply* reply) override {
    v1::Setting* setting = reply->add_settings();
    setting->set_name("listen");
    setting->add_values("127.0.0.1:1");
    setting->add_values("unix:/run/m.sock");
    setting->set_source("flag --listen");
    return grpc::Status::OK;
  }
  grpc::Status Drain(grpc::ServerContext*, const v1::DrainRequest* request,
                     v1::DrainReply* reply) override {
    reply->set_draining(!request->cancel());
    if (++drains < closed_after) reply->add_open_runs("demo");
    return grpc::Status::OK;
  }
  int drains = 0, closed_after = 1000;
};

class OperatorVerbsTest : public testing::Test {
 protected:
  void SetUp() override {
    grpc::ServerBuilder builder;
    builder.RegisterService(&optimizer_);
    builder.RegisterService(&admin_);
    server_ = builder.BuildAndStart();
  }
  void TearDown() override { server_->Shutdown(); }

  int Run(const std::vector<std::string>& arguments) {
    out_.str("");
    err_.str("");
    return RunMuonctl(arguments, {.environment = {},
                                  .out = out_,
                                  .err = err_,
                                  .channel = server_->InProcessChannel({})});
  }
  std::string out() const { return out_.str(); }
  std::int64_t Lines() const {
    const std::string text = out();
    return std::count(text.begin(), text.end(), '\n');
  }

  ScriptedOptimizer optimizer_;
  ScriptedAdmin admin_;
  std::unique_ptr<grpc::Server> server_;
  std::ostringstream out_, err_;
};

TEST_F(OperatorVerbsTest, WatchEndsAfterAsManyStepsAsWereAskedFor) {
  ASSERT_EQ(Run({"watch", "--steps", "3"}), 0) << err_.str();
  EXPECT_EQ(Lines(), 3) << out();
  EXPECT_THAT(out(), HasSubstr("demo  step 2  applied  scale 65536"));
  EXPECT_THAT(out(), HasSubstr("500.0 ms  residual 0.875 (blk.0.wq)"));
  ASSERT_EQ(Run({"watch", "--steps", "1", "-o", "json"}), 0);
  EXPECT_EQ(Json::parse(out())["outcome"]["step"], 0);
}

TEST_F(OperatorVerbsTest, TopShowsStatusStepsAndTheWorst) {
  ASSERT_EQ(Run({"top", "--count", "1"}), 0) << err_.str();
  EXPECT_THAT(out(), HasSubstr("demo  running"));
  EXPECT_THAT(out(), HasSubstr("step 41"));
  EXPECT_THAT(out(), HasSubstr("newton-schulz residual     1  blk.0.wq   0.875"));
  EXPECT_THAT(out(), Not(HasSubstr("\x1b"))) << "not a terminal";
}

TEST_F(OperatorVerbsTest, WorstParametersHaveNames) {
  ASSERT_EQ(Run({"params", "--worst"}), 0) << err_.str();
  EXPECT_THAT(out(), HasSubstr("blk.0.wq"));
  EXPECT_THAT(out(), HasSubstr("non-finite elements"));
  EXPECT_THAT(out(), HasSubstr("p7"));
  ASSERT_EQ(Run({"params", "--worst", "-o", "csv"}), 0);
  EXPECT_THAT(out(), HasSubstr("measure,rank,parameter,value\n"
                               "newton-schulz residual,1,blk.0.wq,0.875\n"));
}

TEST_F(OperatorVerbsTest, RoutingGroupsWhatWentTheSameWay) {
  ASSERT_EQ(Run({"routing"}), 0) << err_.str();
  EXPECT_THAT(out(), HasSubstr("a vector of # elements"));
  EXPECT_EQ(Lines(), 3) << out();
  optimizer_.muon = false;
  EXPECT_EQ(Run({"routing"}), 3);
  EXPECT_THAT(out(), HasSubstr("nothing goes to Muon"));
}

TEST_F(OperatorVerbsTest, RunsAsCsv) {
  ASSERT_EQ(Run({"runs", "-o", "csv"}), 0) << err_.str();
  EXPECT_THAT(out(), HasSubstr("run,state,ranks,next_step,applied"));
  EXPECT_THAT(out(), HasSubstr("\ndemo,running,"));
}

TEST_F(OperatorVerbsTest, ConfigNamesSources) {
  ASSERT_EQ(Run({"config"}), 0) << err_.str();
  EXPECT_THAT(out(), HasSubstr("listen   127.0.0.1:1, unix:/run/m.sock  flag --listen"));
  ASSERT_EQ(Run({"config", "-o", "csv"}), 0);
  EXPECT_THAT(out(), HasSubstr("listen,\"127.0.0.1:1, unix:/run/m.sock\",flag --listen\n"));
}

TEST_F(OperatorVerbsTest, DrainWaitsForOpenRuns) {
  EXPECT_EQ(Run({"drain"}), 0) << err_.str();
  EXPECT_THAT(out(), HasSubstr("run \"demo\" is open"));
  EXPECT_EQ(Run({"drain", "--wait", "0.3"}), 3) << "it never closes";
  admin_.closed_after = admin_.drains + 2;
  EXPECT_EQ(Run({"drain", "--wait", "20"}), 0);
  EXPECT_EQ(Run({"drain", "--cancel"}), 0);
  EXPECT_THAT(out(), HasSubstr("new runs are taken"));
}

TEST_F(OperatorVerbsTest, TraceIsAChromeTrace) {
  ASSERT_EQ(Run({"trace", "--steps", "2", "--file", "-"}), 0) << err_.str();
  const Json events = Json::parse(out())["traceEvents"];
  int steps = 0, phases = 0;
  for (const Json& event : events) {
    steps += event.value("cat", "") == "step";
    phases += event.value("cat", "") == "phase";
  }
  EXPECT_EQ(steps, 2);
  EXPECT_EQ(phases, 4);
  EXPECT_EQ(Run({"trace", "--steps", "1", "--file", "/nowhere/t.json"}), 1);
}

TEST_F(OperatorVerbsTest, CompletionKnowsEveryVerb) {
  ASSERT_EQ(Run({"completion"}), 0);
  for (const char* word : {"top", "doctor", "drain", "--worst", "--endpoint", "complete -F"}) {
    EXPECT_THAT(out(), HasSubstr(word));
  }
  ASSERT_EQ(Run({"completion", "fish"}), 0);
  EXPECT_THAT(out(), HasSubstr("-a doctor"));
}

TEST(ChromeTrace, GivesEachDaemonAProcessAndEachDeviceALine) {
  const Json trace = ChromeTrace({Event(1, "a:1"), Event(1, "b:1")});
  std::set<int> processes;
  for (const Json& event : trace["traceEvents"]) {
    processes.insert(event["pid"].get<int>());
    if (event["name"] != "newton_schulz") continue;
    EXPECT_EQ(event["tid"], 3) << "device 1, behind the lines of steps and waiting";
    EXPECT_DOUBLE_EQ(event["ts"].get<double>(), 101.25e6);
    EXPECT_DOUBLE_EQ(event["dur"].get<double>(), .125e6);
  }
  EXPECT_EQ(processes.size(), 2u);
}

DoctorFacts Healthy() {
  DoctorFacts facts{.endpoint = "127.0.0.1:7070", .answers = true, .daemon_version = "1",
                    .client_version = "1", .backend = "cpu"};
  facts.open_files_max = 65536;
  facts.shm_bytes = facts.shm_free_bytes = facts.free_bytes = std::int64_t{8} << 30;
  facts.clock_synchronized = true;
  return facts;
}

// The findings that are not PASS, as "check GRADE".
std::vector<std::string> Complaints(const DoctorFacts& facts) {
  std::vector<std::string> complaints;
  for (const Finding& finding : Judge(facts)) {
    EXPECT_FALSE(finding.found.empty()) << finding.check;
    if (finding.grade == Grade::kPass) continue;
    EXPECT_FALSE(finding.remedy.empty()) << finding.check;
    complaints.push_back(finding.check + " " + GradeName(finding.grade));
  }
  return complaints;
}

TEST(Doctor, JudgesEachFactAlone) {
  using testing::ElementsAre;
  EXPECT_THAT(Complaints(Healthy()), ElementsAre());
  const auto with = [](const std::function<void(DoctorFacts&)>& change) {
    DoctorFacts facts = Healthy();
    change(facts);
    return Complaints(facts);
  };
  EXPECT_THAT(with([](auto& f) { f.answers = false; f.refusal = "x"; }),
              ElementsAre("daemon FAIL", "versions WARN"));
  EXPECT_THAT(with([](auto& f) { f.client_version = "2"; }), ElementsAre("versions WARN"));
  EXPECT_THAT(with([](auto& f) { f.other_versions = {"0"}; }), ElementsAre("versions FAIL"));
  EXPECT_THAT(with([](auto& f) { f.unreachable_peer = "b:1"; }), ElementsAre("versions WARN"));
  EXPECT_THAT(with([](auto& f) { f.socket = true; }), ElementsAre("socket FAIL"));
  EXPECT_THAT(with([](auto& f) { f.metrics_port_free = false; f.metrics_answer = false; }),
              ElementsAre("ports WARN"));
  EXPECT_THAT(with([](auto& f) { f.backend = "cuda"; }), ElementsAre("driver FAIL"));
  EXPECT_THAT(with([](auto& f) { f.driver = "550"; }), ElementsAre("gpu WARN"));
  EXPECT_THAT(with([](auto& f) { f.driver = "550"; f.gpus = 1; f.ecc_errors = 1; }),
              ElementsAre("gpu FAIL"));
  EXPECT_THAT(with([](auto& f) { f.driver = "550"; f.gpus = 2; f.p2p_missing = 1; }),
              ElementsAre("p2p WARN"));
  EXPECT_THAT(with([](auto& f) { f.memlock_bytes = 65536; }), ElementsAre("memlock WARN"));
  EXPECT_THAT(with([](auto& f) { f.shm_free_bytes = 64 << 20; }), ElementsAre("/dev/shm WARN"));
  EXPECT_THAT(with([](auto& f) { f.open_files_max = 1024; }), ElementsAre("open files WARN"));
  EXPECT_THAT(with([](auto& f) { f.free_bytes = 1; }), ElementsAre("memory WARN"));
  EXPECT_THAT(with([](auto& f) { f.clock_synchronized = false; }), ElementsAre("clock WARN"));
}

TEST(Doctor, WantsTheArenaSocketBesideTheUnixSocket) {
  DoctorFacts facts = Healthy();
  facts.socket = facts.socket_exists = facts.socket_usable = true;
  EXPECT_THAT(Complaints(facts), testing::ElementsAre("arena WARN"));
  facts.arena_exists = true;
  EXPECT_THAT(Complaints(facts), testing::ElementsAre("arena WARN"));
  facts.arena_usable = true;
  EXPECT_THAT(Complaints(facts), testing::ElementsAre());
}

TEST(Doctor, JudgesCertificatesByTheirTimeAndFit) {
  DoctorFacts facts = Healthy();
  facts.now = absl::FromUnixSeconds(1'800'000'000);
  // A certificate of so many hours, of which so many are left.
  const auto with = [&](double hours, double left) {
    const absl::Time end = facts.now + absl::Hours(left);
    facts.tls = CertificateFacts{.subject = "CN=rank 3", .not_before = end - absl::Hours(hours),
                                 .not_after = end};
    return Complaints(facts);
  };
  const double year = 365 * 24;
  EXPECT_THAT(with(year, 14.1 * 24), testing::ElementsAre());
  EXPECT_THAT(with(year, 13.9 * 24), testing::ElementsAre("tls WARN"));
  EXPECT_THAT(with(24, 2.5), testing::ElementsAre()) << "short-lived ones are renewed in time";
  EXPECT_THAT(with(24, 2.3), testing::ElementsAre("tls WARN"));
  facts.tls.reset();
  facts.daemon_tls = absl::FailedPreconditionError("not the key of \"a.pem\"");
  EXPECT_THAT(Complaints(facts), testing::ElementsAre("daemon tls FAIL"));
  facts.daemon_tls = absl::NotFoundError("cannot read it");
  EXPECT_THAT(Complaints(facts), testing::ElementsAre("daemon tls WARN"));
}

}  // namespace
}  // namespace muond::cli
