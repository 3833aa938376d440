// Calls that a trainer can't mean, from Begin to Close: a clear error, nothing lost, and the step
// goes on.
#include <limits>
#include <string>
#include <vector>

#include "tests/cluster/bad_input.h"

namespace muond::cluster {
namespace {

using absl::StatusCode;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

const std::vector<Case> kBeginCases = {
    {"BeginAhead",
     StatusCode::kFailedPrecondition,
     {"step 7: begin by rank 0", "the step is ahead: expected step 1 of generation 1"},
     [](Bench& bench) { return bench.trainer.Begin(7); }},
    {"BeginNegativeStep",
     StatusCode::kInvalidArgument,
     {"step", "got -1"},
     [](Bench& bench) { return bench.trainer.Begin(-1); }},
    {"BeginUnknownRun",
     StatusCode::kNotFound,
     {"run \"typo\""},
     [](Bench& bench) { return RawTrainer(*bench.service, "typo").Begin(1); }},
    {"BeginUnknownRank",
     StatusCode::kNotFound,
     {"step 1: begin by rank 5", "world size is 1"},
     [](Bench& bench) { return RawTrainer(*bench.service, "run", 5).Begin(1); }},
    {"BeginNegativeRank",
     StatusCode::kNotFound,
     {"begin by rank -1"},
     [](Bench& bench) { return RawTrainer(*bench.service, "run", -1).Begin(1); }},
    {"BeginNanLr",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "lr", "nan"},
     [](Bench& bench) { return bench.BeginMuon([](auto& values) { values.set_lr(kNan); }); }},
    {"BeginNegativeLr",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "lr", "-0.1"},
     [](Bench& bench) { return bench.BeginMuon([](auto& values) { values.set_lr(-.1); }); }},
    {"BeginInfiniteDecay",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "weight_decay", "inf"},
     [](Bench& bench) {
       return bench.BeginMuon([](auto& values) { values.set_weight_decay(kInf); });
     }},
    {"BeginMomentumOfOne",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "momentum", "1"},
     [](Bench& bench) { return bench.BeginMuon([](auto& values) { values.set_momentum(1); }); }},
    {"BeginZeroEps",
     StatusCode::kInvalidArgument,
     {"group \"adamw\"", "eps", "0"},
     [](Bench& bench) {
       return bench.Begin(
           [](v1::BeginRequest& request) { (*request.mutable_adamw())["adamw"].set_lr(.1); });
     }},
    {"BeginUnknownGroup",
     StatusCode::kNotFound,
     {"group \"typo\": no such group"},
     [](Bench& bench) {
       return bench.Begin(
           [](v1::BeginRequest& request) { (*request.mutable_muon())["typo"].set_lr(.1); });
     }},
    {"BeginNegativeLossScale",
     StatusCode::kInvalidArgument,
     {"loss_scale", "-1"},
     [](Bench& bench) { return bench.trainer.Begin(1, -1); }},
    {"BeginNanLossScale",
     StatusCode::kInvalidArgument,
     {"loss_scale", "nan"},
     [](Bench& bench) { return bench.trainer.Begin(1, kNan); }},
    {"BeginLossScaleBeyondFp32",
     StatusCode::kInvalidArgument,
     {"loss scale", "normal fp32 number"},
     [](Bench& bench) { return bench.trainer.Begin(1, 1e300); }},
    {"BeginNegativeMicroBatches",
     StatusCode::kInvalidArgument,
     {"micro_batches", "-1"},
     [](Bench& bench) {
       return bench.Begin([](auto& request) { request.set_micro_batches(-1); });
     }},
    {"BeginHugeMicroBatches",
     StatusCode::kInvalidArgument,
     {"micro-batches", "1000000000000"},
     [](Bench& bench) {
       return bench.Begin([](auto& request) { request.set_micro_batches(1'000'000'000'000); });
     }},
};

const std::vector<Case> kEndingCases = {
    {"FinishBeforeBegin",
     StatusCode::kFailedPrecondition,
     {"step 1: finish by rank 0", "has not begun"},
     [](Bench& bench) { return bench.trainer.Finish(1).status(); }},
    {"FinishAhead",
     StatusCode::kFailedPrecondition,
     {"step 3: finish by rank 0", "expected step 1"},
     [](Bench& bench) { return bench.trainer.Finish(3).status(); }},
    {"FinishUnknownAbsent",
     StatusCode::kNotFound,
     {"absent parameter \"w_typo\""},
     [](Bench& bench) {
       Must(bench.trainer.Begin(1));
       return bench.trainer.Finish(1, {"w_typo"}).status();
     }},
    {"FinishAbsentButPushed",
     StatusCode::kInvalidArgument,
     {"parameter \"p\": finish of step 1", "named absent by rank 0"},
     [](Bench& bench) {
       Must(bench.Push({bench.Good("p", 0)}));
       return bench.trainer.Finish(1, {"p"}).status();
     }},
    {"FinishNegativeWait",
     StatusCode::kInvalidArgument,
     {"run \"run\"", "wait_ms", "-5"},
     [](Bench& bench) { return bench.trainer.Finish(1, {}, -5).status(); }},
    {"FinishWithoutSlices",
     StatusCode::kDeadlineExceeded,
     {"missing: parameter \"w\": slices [0, 1]", "parameter \"p\": slices [1]"},
     [](Bench& bench) {
       Must(bench.Push({bench.Good("p", 0)}));
       return bench.trainer.Finish(1, {}, 20).status();
     }},
    {"SkipWithoutCause",
     StatusCode::kInvalidArgument,
     {"step 1: skip by rank 0", "expected overflow or trainer"},
     [](Bench& bench) { return bench.trainer.Skip(1, v1::SKIP_CAUSE_NONE).status(); }},
    {"SkipWithTheServicesCause",
     StatusCode::kInvalidArgument,
     {"step 1: skip by rank 0", "norm_threshold"},
     [](Bench& bench) { return bench.trainer.Skip(1, v1::SKIP_CAUSE_NORM_THRESHOLD).status(); }},
    {"SkipUnknownCause",
     StatusCode::kInvalidArgument,
     {"cause", "77"},
     [](Bench& bench) { return bench.trainer.Skip(1, static_cast<v1::SkipCause>(77)).status(); }},
    {"SkipNanLossScale",
     StatusCode::kInvalidArgument,
     {"step 1: skip by rank 0", "nan"},
     [](Bench& bench) { return bench.trainer.Skip(1, v1::SKIP_CAUSE_OVERFLOW, kNan).status(); }},
    {"SkipNegativeLossScale",
     StatusCode::kInvalidArgument,
     {"step 1: skip by rank 0", "-2"},
     [](Bench& bench) { return bench.trainer.Skip(1, v1::SKIP_CAUSE_OVERFLOW, -2).status(); }},
    {"SkipAhead",
     StatusCode::kFailedPrecondition,
     {"step 4: skip by rank 0", "expected step 1"},
     [](Bench& bench) { return bench.trainer.Skip(4, v1::SKIP_CAUSE_TRAINER).status(); }},
    {"PullOldVersion",
     StatusCode::kFailedPrecondition,
     {"run \"run\": pull of version 0", "at version 1"},
     [](Bench& bench) { return bench.Pull([](auto& request) { request.set_version(0); }); }},
    {"PullFutureVersion",
     StatusCode::kFailedPrecondition,
     {"run \"run\": pull of version 2", "at version 1"},
     [](Bench& bench) { return bench.Pull([](auto& request) { request.set_version(2); }); }},
    {"PullUnregisteredRank",
     StatusCode::kNotFound,
     {"run \"run\"", "rank 7"},
     [](Bench& bench) { return bench.Pull([](auto& request) { request.set_rank(7); }); }},
    {"PullUnknownParameter",
     StatusCode::kNotFound,
     {"parameter \"typo\""},
     [](Bench& bench) {
       return bench.Pull([](auto& request) { request.add_slices()->set_parameter("typo"); });
     }},
    {"PullOutside",
     StatusCode::kInvalidArgument,
     {"parameter \"p\": pull"},
     [](Bench& bench) { return bench.PullBox(4, 3); }},
    {"PullOverflowingBox",
     StatusCode::kInvalidArgument,
     {"parameter \"p\""},
     [](Bench& bench) {
       return bench.PullBox(std::numeric_limits<std::int64_t>::max(),
                            std::numeric_limits<std::int64_t>::max());
     }},
    {"PullNegativeChunk",
     StatusCode::kInvalidArgument,
     {"run \"run\": pull: chunk_bytes", "-4"},
     [](Bench& bench) { return bench.Pull([](auto& request) { request.set_chunk_bytes(-4); }); }},
    {"InitializeAfterAStep",
     StatusCode::kFailedPrecondition,
     {"run \"run\": initial values are refused once a step was consumed"},
     [](Bench& bench) { return bench.trainer.Initialize({bench.Good("p", 0)}).status(); }},
    {"AnotherGenerationBegins",
     StatusCode::kFailedPrecondition,
     {"generation 9", "expected step 1 of generation 1"},
     [](Bench& bench) { return RawTrainer(*bench.service, "run", 0, 9).Begin(1); }},
    {"AnotherGenerationPushes",
     StatusCode::kFailedPrecondition,
     {"generation 9"},
     [](Bench& bench) {
       Must(bench.trainer.Begin(1));
       return RawTrainer(*bench.service, "run", 0, 9).Push(1, {bench.Good("p", 0)}).status();
     }},
    {"AnotherGenerationFinishes",
     StatusCode::kFailedPrecondition,
     {"generation 0"},
     [](Bench& bench) { return RawTrainer(*bench.service, "run", 0, 0).Finish(1).status(); }},
    {"AnotherGenerationCloses",
     StatusCode::kFailedPrecondition,
     {"run \"run\": generation 9"},
     [](Bench& bench) { return RawTrainer(*bench.service, "run", 0, 9).Close().status(); }},
    {"AnotherRankCloses",
     StatusCode::kNotFound,
     {"run \"run\": rank 3"},
     [](Bench& bench) { return RawTrainer(*bench.service, "run", 3).Close().status(); }},
};
class BadCall : public ::testing::TestWithParam<Case> {};

TEST_P(BadCall, IsAClearErrorAndChangesNothing) { ExpectHarmless(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Begin, BadCall, ::testing::ValuesIn(kBeginCases), CaseName);
INSTANTIATE_TEST_SUITE_P(Ending, BadCall, ::testing::ValuesIn(kEndingCases), CaseName);

}  // namespace
}  // namespace muond::cluster
