#include "client/cli/format.h"

#include <cmath>

#include "gtest/gtest.h"
#include "muond/v1/optimizer.pb.h"

namespace muond::cli {
namespace {

TEST(Format, Bytes) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(1048575), "1.0 MiB");
  EXPECT_EQ(FormatBytes(12'897'485), "12.3 MiB");
  EXPECT_EQ(FormatBytes(std::int64_t{1} << 50), "1024.0 TiB");
}

TEST(Format, Numbers) {
  EXPECT_EQ(FormatNumber(65536), "65536");
  EXPECT_EQ(FormatNumber(0), "0");
  EXPECT_EQ(FormatNumber(0.0123456), "0.01235");
  EXPECT_EQ(FormatNumber(1.25e-5), "1.25e-05");
  EXPECT_EQ(FormatNumber(1e30), "1e+30");
  EXPECT_EQ(FormatNumber(std::nan("")), "nan");
}

TEST(Format, Seconds) {
  EXPECT_EQ(FormatSeconds(0.354), "0.35s");
  EXPECT_EQ(FormatSeconds(12.9), "12s");
  EXPECT_EQ(FormatSeconds(192), "3m12s");
  EXPECT_EQ(FormatSeconds(7505), "2h5m");
  EXPECT_EQ(FormatSeconds(4 * 86400 + 3 * 3600), "4d3h");
  EXPECT_EQ(FormatSeconds(-1), "-1s");
}

TEST(Format, ShapesAndMatrices) {
  v1::Parameter parameter;
  EXPECT_EQ(FormatShape(parameter), "?");
  parameter.mutable_shape();
  EXPECT_EQ(FormatShape(parameter), "[]");
  parameter.mutable_shape()->add_dims(4);
  parameter.mutable_shape()->add_dims(3);
  EXPECT_EQ(FormatShape(parameter), "[4, 3]");

  v1::RoutedParameter routed;
  EXPECT_EQ(FormatMatrices(routed), "-");
  auto* one = routed.add_matrices();
  one->set_rows(768);
  one->set_cols(512);
  one->set_count(1);
  auto* many = routed.add_matrices();
  many->set_rows(64);
  many->set_cols(768);
  many->set_count(8);
  EXPECT_EQ(FormatMatrices(routed), "768x512 + 8 of 64x768");
}

TEST(Format, EnumNamesLoseTheirPrefix) {
  const auto name = [](const auto* type, int number) {
    return ShortEnumName(*type->FindValueByNumber(number));
  };
  EXPECT_EQ(name(v1::RunState_descriptor(), v1::RUN_STATE_RUNNING), "running");
  EXPECT_EQ(name(v1::SkipCause_descriptor(), v1::SKIP_CAUSE_STATE_OVERFLOW), "state_overflow");
  EXPECT_EQ(name(v1::LossScale::Mode_descriptor(), v1::LossScale::MODE_DYNAMIC), "dynamic");
}

}  // namespace
}  // namespace muond::cli
