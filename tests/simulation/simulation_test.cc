// Every invariant holds under every fault, over many seeds; and each planted bug is caught.
#include "tests/simulation/simulation.h"

#include <algorithm>
#include <ostream>
#include <string>
#include <string_view>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::simulation {
namespace {

constexpr int kParts = 8;
constexpr std::uint64_t kSeedsOfPart = 250;

class Seeds : public ::testing::TestWithParam<int> {};

TEST_P(Seeds, HoldEveryInvariant) {
  Coverage coverage;
  for (std::uint64_t i = 0; i < kSeedsOfPart; ++i) {
    const std::uint64_t seed = static_cast<std::uint64_t>(GetParam()) * kSeedsOfPart + i;
    const Result result = Simulate(seed);
    coverage.Add(result.coverage);
    ASSERT_EQ(result.violation, "")
        << "see what happened: simulation --seed " << seed << " --verbose";
  }
  // What the seeds did not come across they did not test.
  EXPECT_THAT(coverage.Missing(), ::testing::IsEmpty()) << coverage.ToString();
}

INSTANTIATE_TEST_SUITE_P(Simulation, Seeds, ::testing::Range(0, kParts));

TEST(Simulation, SeedsAreReproduced) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Result first = Simulate(seed);
    EXPECT_EQ(Simulate(seed).hash, first.hash) << "seed " << seed;
    EXPECT_NE(Simulate(seed + 1).hash, first.hash) << "seed " << seed;
  }
}

// Several that raise the generation at once, and daemons that crash all the time.
TEST(Simulation, RestlessSeedsHoldEveryInvariant) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const Result result = Simulate(seed, {.restless = true});
    ASSERT_EQ(result.violation, "")
        << "see what happened: simulation --seed " << seed << " --restless --verbose";
  }
}

struct Planted {
  Bug bug;
  bool restless;            // only then daemons meet in a way that shows it
  std::string_view caught;  // what the checker says of it
};

std::string_view NameOf(Bug bug) {
  for (const auto& [value, name] : kBugs) {
    if (value == bug) return name;
  }
  return "unknown";
}
// How googletest, and with it ctest, shows the parameter.
void PrintTo(const Planted& planted, std::ostream* out) { *out << NameOf(planted.bug); }

class PlantedBug : public ::testing::TestWithParam<Planted> {};

TEST_P(PlantedBug, IsCaught) {
  const Planted& planted = GetParam();
  for (std::uint64_t seed = 0; seed < kParts * kSeedsOfPart; ++seed) {
    const Result result = Simulate(seed, {.bug = planted.bug, .restless = planted.restless});
    if (result.violation.find(planted.caught) == std::string::npos) continue;
    RecordProperty("seed", std::to_string(seed));
    RecordProperty("violation", result.violation);
    return;
  }
  FAIL() << "no seed catches it";
}

INSTANTIATE_TEST_SUITE_P(
    Simulation, PlantedBug,
    ::testing::Values(Planted{Bug::kApplyTwice, false, "is not the reference's"},
                      Planted{Bug::kLocalVerdict, false, "without a vote of daemon"},
                      Planted{Bug::kNoGenerationCheck, false, "which not all ranks have begun"},
                      Planted{Bug::kOldVoteCounted, false, "without a vote of daemon"},
                      Planted{Bug::kBrokenPromise, false, "having promised"},
                      Planted{Bug::kNoSettling, false, "throws away step"},
                      Planted{Bug::kOvertakenRaise, true, "having promised"},
                      Planted{Bug::kSharedNumbers, true, "of lineage"},
                      Planted{Bug::kMixedLineages, true, "of lineage"},
                      Planted{Bug::kEarlyApply, false, "is not the reference's"},
                      Planted{Bug::kSkipTouchesState, false, "is not the reference's"},
                      Planted{Bug::kGrowsAlone, false, "have different parameters"},
                      Planted{Bug::kGrowthForgets, false, "throws away step"}),
    [](const ::testing::TestParamInfo<Planted>& info) {
      std::string name(NameOf(info.param.bug));
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

}  // namespace
}  // namespace muond::simulation
