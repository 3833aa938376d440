#include "server/daemon/log_filter.h"

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"

namespace muond {
namespace {

TEST(LogFields, FindsRunAndStep) {
  const LogFields fields = LogFieldsOf("run \"gpt-2\": step 41 skipped: overflow in w");
  EXPECT_EQ(fields.run, "gpt-2");
  EXPECT_EQ(fields.step, 41);
  EXPECT_EQ(LogFieldsOf("run \"r\": the next step is 3").step, std::nullopt);
  EXPECT_EQ(LogFieldsOf("listening on 127.0.0.1:7070").run, "");
  EXPECT_EQ(LogFieldsOf("run \"unfinished").run, "");
  EXPECT_EQ(LogFieldsOf("parameter \"p\": push for step 7: footstep 8").step, 7);
}

TEST(LogFilter, LimitsMessagesThatDifferInDigitsOnly) {
  LogFilter filter;
  const absl::Time start = absl::UnixEpoch();
  int written = 0;
  for (int step = 0; step < 1000; ++step) {
    written += filter.Admit(absl::StrFormat("step %d skipped", step), start).has_value();
  }
  EXPECT_EQ(written, LogFilter::kBurst);
  EXPECT_TRUE(filter.Admit("step 5 applied", start).has_value()) << "another kind";
  EXPECT_FALSE(filter.Admit("step 5 skipped", start + LogFilter::kPeriod / 2).has_value());
  EXPECT_EQ(filter.Admit("step 6 skipped", start + LogFilter::kPeriod),
            "step 6 skipped (981 more like it left out)");
  EXPECT_EQ(filter.Admit("step 7 skipped", start + LogFilter::kPeriod), "step 7 skipped");
}

TEST(LogFilter, ForgetsKindsRatherThanGrowWithoutBound) {
  LogFilter filter;
  for (int i = 0; i < 100'000; ++i) {
    std::string name;
    for (int n = i; n > 0; n /= 26) name += static_cast<char>('a' + n % 26);
    EXPECT_TRUE(filter.Admit("run \"" + name + "\": opened", absl::UnixEpoch()).has_value());
  }
}

}  // namespace
}  // namespace muond
