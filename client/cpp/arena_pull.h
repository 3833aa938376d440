// How slices come back through an arena: the daemon fills windows, the trainer empties them and
// says so.
#pragma once

#include "client/cpp/pull_assembly.h"
#include "client/cpp/pull_stream.h"
#include "client/cpp/retry.h"
#include "grpcpp/client_context.h"

namespace muond::client {

// Part of ReceivePull, for jobs with an arena. Errors as there, and DATA_LOSS for a window whose
// fence does not stand where the daemon says, or a region outside of its window.
CallResult ReceiveThroughArena(const PullJob& job, const v1::PullRequest& request,
                               PullAssembly& assembly, grpc::ClientContext& context);

}  // namespace muond::client
