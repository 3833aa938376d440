#include "absl/status/status.h"
#include "client/c/handles.h"
#include "client/c/service.h"

namespace muond::c {

std::shared_ptr<grpc::Channel> ChannelTo(muond_service*) { return nullptr; }

}  // namespace muond::c

extern "C" {

int32_t muond_has_service(void) { return 0; }

int32_t muond_service_start(const muond_service_options*, muond_service** service,
                            muond_error** error) {
  if (service != nullptr) *service = nullptr;
  return muond::c::Answer(
      absl::UnimplementedError("service: this libmuond_client.so was built without it (cmake "
                               "-DMUOND_CLIENT_SERVICE=OFF): start a daemon, name its endpoint"),
      error);
}

const char* muond_service_address(const muond_service*, size_t* bytes) {
  if (bytes != nullptr) *bytes = 0;
  return "";
}

void muond_service_free(muond_service*) {}

}  // extern "C"
