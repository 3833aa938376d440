#include "client/examples/char_lm/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <vector>

namespace muond::char_lm {
namespace {

using ::testing::HasSubstr;

class ReportTest : public testing::Test {
 protected:
  ReportTest() {
    corpus_.validation_books = {"Ruth", "Mark"};
    report_.corpus = &corpus_;
    report_.text_path = "kjv.txt";
    report_.muon_lr = 0.004;
    report_.adamw_lr = 0.002;
    v1::RoutedParameter& matrix = *report_.muon.routing.add_parameters();
    matrix.set_name("hidden.0");
    matrix.set_algorithm(v1::ALGORITHM_MUON);
    matrix.set_reason("hidden matrix");
    v1::RoutedParameter& bias = *report_.muon.routing.add_parameters();
    bias.set_name("bias.0");
    bias.set_algorithm(v1::ALGORITHM_ADAMW);
    bias.set_reason("role bias");
    report_.muon.status.set_muon_matrices(2);
    report_.muon.status.set_steps_applied(3);
    report_.muon.status.set_newton_schulz_calls(6);
    (*report_.muon.status.mutable_steps_skipped())["overflow"] = 1;
    report_.muon.loss_scale = {1024, 512, 512, 512};
    report_.muon.curve = {{0, 4.5, 4.4}, {2, 3, 2.5}, {4, 2.3, 2.0}};
    report_.adamw.curve = {{0, 4.5, 4.4}, {2, 3, 2.9}, {4, 2.6, 2.5}};
    report_.muon.tensor_digest = "abcd";
  }
  Corpus corpus_;
  Report report_;
};

TEST_F(ReportTest, SummaryHasTheKeysThatOthersRead) {
  const nlohmann::json summary = Summary(report_);
  EXPECT_EQ(summary["parameters"][0],
            (nlohmann::json{
                {"name", "hidden.0"}, {"algorithm", "muon"}, {"reason", "hidden matrix"}}));
  EXPECT_EQ(summary["parameters"][1]["algorithm"], "adamw");
  EXPECT_EQ(summary["muon_matrices"], 2);
  EXPECT_EQ(summary["newton_schulz_calls"], 6);
  EXPECT_EQ(summary["steps_applied"], 3);
  EXPECT_EQ(summary["steps_skipped"], 1);
  EXPECT_EQ(summary["loss_scale"], (nlohmann::json{1024.0, 512.0, 512.0, 512.0}));
  EXPECT_EQ(summary["momentum_nonfinite"], 0);
  EXPECT_EQ(summary["validation_loss"]["muon"],
            (nlohmann::json::array({{0, 4.4}, {2, 2.5}, {4, 2.0}})));
  EXPECT_EQ(summary["validation_loss"]["adamw"][2], (nlohmann::json::array({4, 2.5})));
  EXPECT_EQ(summary["state_digest"], "abcd");
  EXPECT_EQ(summary["books_held_out"], (nlohmann::json{"Ruth", "Mark"}));
}

TEST_F(ReportTest, TableSaysWhatHappenedAndWhoIsAhead) {
  const std::string table = Table(report_);
  EXPECT_THAT(table, HasSubstr("hidden.0      muon   hidden matrix"));
  EXPECT_THAT(table, HasSubstr("applied 3, skipped 1 (overflow 1)"));
  EXPECT_THAT(table, HasSubstr("Newton-Schulz calls 6 = 2 matrices x 3 applied steps"));
  EXPECT_THAT(table, HasSubstr("loss scale 1024 x1, 512 x3"));
  EXPECT_THAT(table, HasSubstr("muon with adamw is ahead by 0.5000 nats/char: at step 2 of 4 it "
                               "had what adamw alone ended with (2 steps fewer, 50 %; seed 1)"));
}

TEST_F(ReportTest, CsvHasALineForEachPoint) {
  EXPECT_EQ(LossCsv(report_),
            "optimizer,step,train_loss,validation_loss\n"
            "muon,0,4.500000,4.400000\nmuon,2,3.000000,2.500000\nmuon,4,2.300000,2.000000\n"
            "adamw,0,4.500000,4.400000\nadamw,2,3.000000,2.900000\nadamw,4,2.600000,2.500000\n");
}

TEST_F(ReportTest, FilesAreWrittenOrTheErrorNamesTheFile) {
  ASSERT_TRUE(WriteFiles(report_, testing::TempDir()).ok());
  std::ifstream file(testing::TempDir() + "/summary.json");
  EXPECT_EQ(nlohmann::json::parse(file), Summary(report_));
  EXPECT_THAT(std::string(WriteFiles(report_, "/no/such/folder").message()),
              HasSubstr("\"/no/such/folder/summary.json\""));
}

TEST(CompressScales, CountsEqualNeighbours) {
  EXPECT_EQ(CompressScales(std::vector<double>{8, 4, 4, 8}), "8 x1, 4 x2, 8 x1");
  EXPECT_EQ(CompressScales({}), "");
}

}  // namespace
}  // namespace muond::char_lm
