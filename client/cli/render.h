// Replies as tables for people. Pure: tests feed them messages.
#pragma once

#include <string>

#include "client/cli/text_table.h"
#include "muond/v1/admin.pb.h"
#include "muond/v1/optimizer.pb.h"

namespace muond::cli {

// The daemon in a line, its runs in a table, and under it what needs a sentence: why a run failed,
// whom a step waits for, what was skipped and why.
std::string RenderStatus(const v1::StatusReply& status, bool color);

// The table alone.
TextTable RunTable(const v1::StatusReply& status);

// A line for each parameter in registration order, and the totals.
std::string RenderParameters(const v1::DescribeParametersReply& reply, bool color);
TextTable ParameterTable(const v1::DescribeParametersReply& reply);

// Parameters that went the same way for the same reason, a line each.
TextTable RoutingTable(const v1::DescribeParametersReply& reply);

// The worst parameters by each measure; `describe` adds those with non-finite state.
TextTable WorstTable(const v1::StepEvent& event, const v1::DescribeParametersReply& describe);

// A step in a line: what became of it, its time, who offended.
std::string RenderEvent(const v1::StepEvent& event, bool color);

}  // namespace muond::cli
