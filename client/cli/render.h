// Replies as tables for people. Pure: tests feed them messages.
#pragma once

#include <string>

#include "muond/v1/optimizer.pb.h"

namespace muond::cli {

// The daemon in a line, its runs in a table, and under it what needs a sentence: why a run failed,
// whom a step waits for, what was skipped and why.
std::string RenderStatus(const v1::StatusReply& status, bool color);

// A line for each parameter in registration order, and the totals.
std::string RenderParameters(const v1::DescribeParametersReply& reply, bool color);

}  // namespace muond::cli
