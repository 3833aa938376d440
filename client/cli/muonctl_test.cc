// muonctl against a daemon that is only a script of replies, over gRPC's in-process channel.
#include "client/cli/muonctl.h"

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "client/cli/message_json.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "gtest/gtest.h"
#include "muond/v1/optimizer.grpc.pb.h"

namespace muond::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class ScriptedDaemon final : public v1::Optimizer::Service {
 public:
  grpc::Status Status(grpc::ServerContext*, const v1::StatusRequest* request,
                      v1::StatusReply* reply) override {
    reply->set_version("9.9.9");
    for (const v1::RunStatus& run : runs) {
      if (request->run().empty() || request->run() == run.run()) *reply->add_runs() = run;
    }
    if (!request->run().empty() && reply->runs_size() == 0) {
      return {grpc::StatusCode::NOT_FOUND, "run \"" + request->run() + "\": not open"};
    }
    return grpc::Status::OK;
  }
  grpc::Status DescribeParameters(grpc::ServerContext*,
                                  const v1::DescribeParametersRequest* request,
                                  v1::DescribeParametersReply* reply) override {
    reply->add_parameters()->mutable_parameter()->set_name("of-" + request->run());
    for (const std::string& name : request->names()) {
      reply->add_parameters()->mutable_parameter()->set_name(name);
    }
    return grpc::Status::OK;
  }
  grpc::Status Digest(grpc::ServerContext*, const v1::DigestRequest* request,
                      v1::DigestReply* reply) override {
    reply->set_tensor_digest("t0");
    reply->set_control_digest("c0");
    reply->set_version(5);
    if (request->per_parameter()) (*reply->mutable_parameters())["w"] = "d0";
    return grpc::Status::OK;
  }

  void AddRun(const std::string& name) {
    runs.emplace_back().set_run(name);
    runs.back().mutable_position()->set_state(v1::RUN_STATE_RUNNING);
  }
  std::vector<v1::RunStatus> runs;
};

class MuonctlTest : public testing::Test {
 protected:
  void SetUp() override {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    builder.RegisterService(&daemon_);
    server_ = builder.BuildAndStart();
    server_->GetHealthCheckService()->SetServingStatus(true);
    channel_ = server_->InProcessChannel({});
  }
  void TearDown() override { server_->Shutdown(); }

  int Run(const std::vector<std::string>& arguments) {
    out_.str("");
    err_.str("");
    return RunMuonctl(arguments, {.environment = environment_,
                                  .terminal = terminal_,
                                  .out = out_,
                                  .err = err_,
                                  .channel = channel_});
  }
  std::string out() const { return out_.str(); }
  std::string err() const { return err_.str(); }

  ScriptedDaemon daemon_;
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::map<std::string, std::string> environment_;
  bool terminal_ = false;
  std::ostringstream out_, err_;
};

TEST_F(MuonctlTest, ShowsStatusAsTableAndAsJson) {
  daemon_.AddRun("demo");
  EXPECT_EQ(Run({"status"}), 0);
  EXPECT_THAT(out(), HasSubstr("muond 9.9.9"));
  EXPECT_THAT(out(), HasSubstr("demo  running"));
  EXPECT_THAT(err(), IsEmpty());
  EXPECT_EQ(Run({"status", "-o", "json"}), 0);
  const Json json = Json::parse(out());
  EXPECT_EQ(json["runs"][0]["run"], "demo");
  EXPECT_EQ(json["runs"][0]["position"]["state"], "running");
}

TEST_F(MuonctlTest, GlobalOptionsStandBeforeOrAfterTheVerbOrInTheEnvironment) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {"-o", "json", "status"}, {"status", "--output", "json"}, {"status", "--output=json"}}) {
    EXPECT_EQ(Run(arguments), 0);
    EXPECT_TRUE(Json::accept(out()));
  }
  environment_["MUOND_OUTPUT"] = "json";
  EXPECT_EQ(Run({"status"}), 0);
  EXPECT_TRUE(Json::accept(out()));
  EXPECT_EQ(Run({"status", "-o", "table"}), 0);
  EXPECT_FALSE(Json::accept(out())) << "the flag wins over the variable";
}

TEST_F(MuonctlTest, TakesTheOnlyRunAndAsksWhereThereAreSeveral) {
  EXPECT_EQ(Run({"params"}), 1);
  EXPECT_THAT(err(), HasSubstr("muonctl: params: the daemon has no run"));
  daemon_.AddRun("first");
  EXPECT_EQ(Run({"params"}), 0);
  EXPECT_THAT(out(), HasSubstr("of-first"));
  daemon_.AddRun("second");
  EXPECT_EQ(Run({"params"}), 1);
  EXPECT_THAT(err(), HasSubstr("choose one with --run: \"first\", \"second\""));
  EXPECT_EQ(Run({"params", "--run", "second", "w1", "w2"}), 0);
  EXPECT_THAT(out(), HasSubstr("of-second"));
  EXPECT_THAT(out(), HasSubstr("w2"));
  environment_["MUOND_RUN"] = "second";
  EXPECT_EQ(Run({"params"}), 0);
  EXPECT_THAT(out(), HasSubstr("of-second"));
}

TEST_F(MuonctlTest, ShowsDigests) {
  daemon_.AddRun("demo");
  EXPECT_EQ(Run({"digest"}), 0);
  EXPECT_EQ(out(), "version  5\ntensor   t0\ncontrol  c0\n");
  EXPECT_EQ(Run({"digest", "--per-parameter"}), 0);
  EXPECT_THAT(out(), HasSubstr("w          d0\n"));
  EXPECT_EQ(Run({"digest", "-o", "json"}), 0);
  EXPECT_EQ(Json::parse(out())["tensor_digest"], "t0");
}

TEST_F(MuonctlTest, HealthIsAnExitCode) {
  EXPECT_EQ(Run({"health"}), 0);
  EXPECT_EQ(out(), "SERVING\n");
  EXPECT_EQ(Run({"health", "--service", "readiness"}), 3) << "a service that nobody set";
  server_->GetHealthCheckService()->SetServingStatus("readiness", true);
  EXPECT_EQ(Run({"health", "--service", "readiness"}), 0);
  server_->GetHealthCheckService()->SetServingStatus(false);
  EXPECT_EQ(Run({"health"}), 3);
  EXPECT_EQ(out(), "NOT_SERVING\n");
  EXPECT_EQ(Run({"health", "-o", "json"}), 3);
  EXPECT_EQ(Json::parse(out())["healthy"], false);
}

TEST_F(MuonctlTest, HealthOfARunThatFailed) {
  daemon_.AddRun("demo");
  EXPECT_EQ(Run({"health", "--run", "demo"}), 0);
  daemon_.runs[0].set_state_nonfinite(1);
  EXPECT_EQ(Run({"health", "--run", "demo"}), 3);
  EXPECT_THAT(out(), HasSubstr("run \"demo\": its state holds non-finite elements"));
  EXPECT_EQ(Run({"health", "--run", "other"}), 1);
  EXPECT_THAT(err(), HasSubstr("run \"other\": not open"));
}

TEST_F(MuonctlTest, TellsBothVersionsAndWhetherTheyDiffer) {
  EXPECT_EQ(Run({"version"}), 0);
  EXPECT_THAT(out(), HasSubstr("muonctl  0."));
  EXPECT_THAT(out(), HasSubstr("muond    9.9.9"));
  EXPECT_THAT(out(), HasSubstr("the versions differ"));
}

TEST_F(MuonctlTest, SaysWhereNoDaemonAnswers) {
  channel_ = nullptr;
  const std::vector<std::string> nowhere = {"--endpoint", "unix:///nonexistent/muond.sock"};
  EXPECT_EQ(Run({"status", nowhere[0], nowhere[1]}), 1);
  EXPECT_THAT(err(), HasSubstr("muonctl: status: no daemon answers at "
                               "\"unix:///nonexistent/muond.sock\""));
  EXPECT_THAT(err(), HasSubstr("--endpoint or MUOND_ENDPOINT"));
  EXPECT_THAT(out(), IsEmpty());
  EXPECT_EQ(Run({"health", nowhere[0], nowhere[1]}), 3);
  EXPECT_EQ(Run({"version", nowhere[0], nowhere[1]}), 0);
  EXPECT_THAT(out(), HasSubstr("none answers at"));
  environment_["MUOND_ENDPOINT"] = "unix:///also-nowhere.sock";
  EXPECT_EQ(Run({"status"}), 1);
  EXPECT_THAT(err(), HasSubstr("unix:///also-nowhere.sock"));
}

TEST_F(MuonctlTest, RefusesWhatItDoesNotUnderstand) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {}, {"nonsense"}, {"status", "--nonsense"}, {"status", "-o", "xml"},
           {"status", "--timeout", "5"}, {"status", "--timeout", "0s"}, {"status", "positional"},
           {"health", "--service", "other"}}) {
    EXPECT_EQ(Run(arguments), 2) << testing::PrintToString(arguments);
    EXPECT_THAT(err(), HasSubstr("muonctl --help"));
    EXPECT_THAT(out(), IsEmpty());
  }
}

TEST_F(MuonctlTest, HelpsWithAllAndWithOneVerb) {
  EXPECT_EQ(Run({"--help"}), 0);
  for (const char* word : {"status", "params", "health", "digest", "plan", "version",
                           "MUOND_ENDPOINT", "Exit codes"}) {
    EXPECT_THAT(out(), HasSubstr(word));
  }
  EXPECT_EQ(Run({"digest", "--help"}), 0);
  EXPECT_THAT(out(), HasSubstr("--per-parameter"));
  EXPECT_EQ(Run({"--version"}), 0);
  EXPECT_THAT(out(), testing::MatchesRegex("muonctl [0-9.]+\n"));
}

TEST_F(MuonctlTest, ColorsOnlyATerminalThatWantsThem) {
  EXPECT_EQ(Run({"health"}), 0);
  EXPECT_THAT(out(), Not(HasSubstr("\x1b")));
  terminal_ = true;
  EXPECT_EQ(Run({"health"}), 0);
  EXPECT_THAT(out(), HasSubstr("\x1b[32mSERVING"));
  environment_["NO_COLOR"] = "1";
  EXPECT_EQ(Run({"health"}), 0);
  EXPECT_THAT(out(), Not(HasSubstr("\x1b")));
}

}  // namespace
}  // namespace muond::cli
