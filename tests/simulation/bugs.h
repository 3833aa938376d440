// Faults that can be planted into the simulated daemons: each must be caught by the checker, or a
// simulation without findings says little.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

namespace muond::simulation {

enum class Bug : std::uint8_t {
  kNone,
  kApplyTwice,         // a repeated Finish applies the step once more
  kLocalVerdict,       // a daemon decides by its own vote alone
  kNoGenerationCheck,  // whatever arrives counts as of this generation
  kOldVoteCounted,     // a vote of an earlier step counts for this one
  kBrokenPromise,      // a daemon promises and goes on voting in the old generation
  kNoSettling,         // a generation is raised without the votes that complete a step
  kOvertakenRaise,     // a daemon raises to less than it has promised
  kSharedNumbers,     // several daemons, or tries, propose the same generation for different orders
  kMixedLineages,     // a generation is raised on new and on old state at once
  kEarlyApply,        // state is touched before the verdict
  kSkipTouchesState,  // a skipped step leaves a trace
  kGrowsAlone,        // a daemon that has taken parameters on is not followed by the others
  kGrowthForgets,     // parameters come with a new machine, which knows no votes of before
};

inline constexpr std::pair<Bug, std::string_view> kBugs[] = {
    {Bug::kNone, "none"},
    {Bug::kApplyTwice, "apply-twice"},
    {Bug::kLocalVerdict, "local-verdict"},
    {Bug::kNoGenerationCheck, "no-generation-check"},
    {Bug::kOldVoteCounted, "old-vote-counted"},
    {Bug::kBrokenPromise, "broken-promise"},
    {Bug::kNoSettling, "no-settling"},
    {Bug::kOvertakenRaise, "overtaken-raise"},
    {Bug::kSharedNumbers, "shared-numbers"},
    {Bug::kMixedLineages, "mixed-lineages"},
    {Bug::kEarlyApply, "early-apply"},
    {Bug::kSkipTouchesState, "skip-touches-state"},
    {Bug::kGrowsAlone, "grows-alone"},
    {Bug::kGrowthForgets, "growth-forgets"},
};

inline std::optional<Bug> FindBug(std::string_view name) {
  for (const auto& [bug, its_name] : kBugs) {
    if (its_name == name) return bug;
  }
  return std::nullopt;
}

}  // namespace muond::simulation
