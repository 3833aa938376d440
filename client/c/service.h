// How the C interface reaches a service in its own process. Two files implement it: service.cc with
// the service, service_absent.cc for a library that was built without.
#pragma once

#include <memory>

#include "client/c/muond.h"

namespace grpc {
class Channel;
}

namespace muond::c {

// Never null for a service that was started.
std::shared_ptr<grpc::Channel> ChannelTo(muond_service* service);

}  // namespace muond::c
