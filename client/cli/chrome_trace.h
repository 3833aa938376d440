// Steps as the JSON that chrome://tracing and ui.perfetto.dev read. Pure.
#pragma once

#include <string>
#include <vector>

#include "client/cli/message_json.h"
#include "muond/v1/admin.pb.h"

namespace muond::cli {

// A process per daemon; in it a line for the steps, one for what the daemon waited for, one per
// device. Times are the daemons' own clocks: machines whose clocks differ lie apart.
Json ChromeTrace(const std::vector<v1::StepEvent>& events);

}  // namespace muond::cli
