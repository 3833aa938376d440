// Which versions of client and daemon, or of two daemons, may work together: those whose second
// numbers differ by at most one, under the same first number. 0.3.1 works with 0.2.0 to 0.4.9.
//
// Both sides judge, each by its own version, so that the older one's word is heard too. Pure.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace muond {

// This program's, "0.1.0".
std::string_view OwnVersion();

// FAILED_PRECONDITION unless `other` may work with `own`. Empty is 0.1: who spoke it told no
// version. `who` names the other for the message: `client "muond-client/0.3.0 (c++)"`.
// INVALID_ARGUMENT for what is no version.
absl::Status CheckVersions(std::string_view own, std::string_view other, std::string_view who);

}  // namespace muond
