// How slices go to the daemon through an arena: one attempt of an Initialize or a Push stream whose
// messages name what lies in a window instead of holding it.
#pragma once

#include "absl/time/time.h"
#include "client/cpp/push_stream.h"
#include "client/cpp/retry.h"
#include "muond/v1/optimizer.pb.h"

namespace muond::client {

// As SendInitialize and SendPush, which call them for jobs with an arena.
CallResult SendThroughArena(const PushJob& job, const v1::InitializeRequest& head,
                            absl::Time deadline, v1::InitializeReply* reply);
CallResult SendThroughArena(const PushJob& job, const v1::PushRequest& head, absl::Time deadline,
                            v1::PushReply* reply);

}  // namespace muond::client
