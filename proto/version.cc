#include "proto/version.h"

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace muond {
namespace {

constexpr std::string_view kBeforeTheField = "0.1.0";
constexpr std::size_t kLongest = 64;

struct Release {
  std::int64_t major = 0, minor = 0;
};

bool IsNumber(absl::string_view text, std::int64_t* number) {
  // SimpleAtoi takes signs and blanks.
  for (const char c : text) {
    if (c < '0' || c > '9') return false;
  }
  return absl::SimpleAtoi(text, number);
}

// Of "0.1", "0.1.0" and "0.1.0-anything".
std::optional<Release> Parse(std::string_view text) {
  if (text.size() > kLongest) return std::nullopt;
  const std::string whole(text.substr(0, text.find_first_of("-+")));
  const std::vector<std::string> parts = absl::StrSplit(whole, '.');
  Release release;
  std::int64_t patch = 0;
  if (parts.size() < 2 || parts.size() > 3) return std::nullopt;
  if (!IsNumber(parts[0], &release.major) || !IsNumber(parts[1], &release.minor)) {
    return std::nullopt;
  }
  if (parts.size() == 3 && !IsNumber(parts[2], &patch)) return std::nullopt;
  return release;
}

}  // namespace

std::string_view OwnVersion() { return MUOND_VERSION; }

absl::Status CheckVersions(std::string_view own, std::string_view other, std::string_view who) {
  const std::string told(other.empty() ? kBeforeTheField : other.substr(0, kLongest));
  const std::optional<Release> mine = Parse(own), theirs = Parse(other.empty() ? told : other);
  if (!theirs || !mine) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: version \"%s\": expected numbers as in 0.1.0", std::string(who), told));
  }
  if (mine->major == theirs->major && std::abs(mine->minor - theirs->minor) <= 1) {
    return absl::OkStatus();
  }
  const bool older = theirs->major < mine->major ||
                     (theirs->major == mine->major && theirs->minor < mine->minor);
  return absl::FailedPreconditionError(absl::StrFormat(
      "%s has version %s, here it is %s: they may be one version apart (the second number): "
      "upgrade %s",
      std::string(who), told, std::string(own), older ? "the other one" : "this one"));
}

}  // namespace muond
