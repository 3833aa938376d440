#include "client/c/service.h"

#include "client/c/handles.h"
#include "proto/check.h"
#include "server/daemon/embedded.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

struct muond_service {
  std::unique_ptr<muond::Service> service;
  std::string address;
};

namespace muond::c {
namespace {

// The service logs to stderr, as the daemon does: stdout is the host program's.
absl::Status SetUpLogging(const std::string& level) {
  const auto parsed = spdlog::level::from_str(level.empty() ? "warn" : level);
  if (parsed == spdlog::level::off && level != "off") {
    return absl::InvalidArgumentError(
        absl::StrFormat("service options: log_level: unknown level \"%s\"", level));
  }
  auto logger = spdlog::get("muond");
  if (logger == nullptr) logger = spdlog::stderr_logger_mt("muond");
  logger->set_level(parsed);
  spdlog::set_default_logger(std::move(logger));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<muond_service>> Start(const muond_service_options& given) {
  if (given.threads < 0 || given.threads > 4096) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "service options: threads: expected 0 to 4096, got %d", given.threads));
  }
  if (given.checkpoint_every_steps < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("service options: checkpoint_every_steps: expected 0 or more, got %d",
                        given.checkpoint_every_steps));
  }
  MUOND_RETURN_IF_ERROR(SetUpLogging(Text(given.log_level, given.log_level_bytes)));
  ServiceOptions options;
  if (given.backend_bytes > 0) options.backend = Text(given.backend, given.backend_bytes);
  if (given.listen_bytes > 0) options.listen = {Text(given.listen, given.listen_bytes)};
  options.threads = static_cast<int>(given.threads);
  options.checkpoint_dir = Text(given.checkpoint_dir, given.checkpoint_dir_bytes);
  options.checkpoint_every_steps = given.checkpoint_every_steps;
  auto handle = std::make_unique<muond_service>();
  MUOND_ASSIGN_OR_RETURN(handle->service, Service::Start(options));
  if (!options.listen.empty()) handle->address = handle->service->addresses().at(0);
  return handle;
}

}  // namespace

std::shared_ptr<grpc::Channel> ChannelTo(muond_service* service) {
  return service->service->channel();
}

}  // namespace muond::c

extern "C" {

int32_t muond_has_service(void) { return 1; }

int32_t muond_service_start(const muond_service_options* options, muond_service** service,
                            muond_error** error) {
  using namespace muond::c;  // NOLINT: the C side of one namespace
  return Guard(error, [&]() -> absl::Status {
    MUOND_RETURN_IF_ERROR(CheckThere("service", service));
    *service = nullptr;
    MUOND_ASSIGN_OR_RETURN(const muond_service_options given,
                           ReadStruct("service options", options));
    MUOND_ASSIGN_OR_RETURN(auto started, Start(given));
    *service = started.release();
    return absl::OkStatus();
  });
}

const char* muond_service_address(const muond_service* service, size_t* bytes) {
  if (bytes != nullptr) *bytes = service == nullptr ? 0 : service->address.size();
  return service == nullptr ? "" : service->address.c_str();
}

void muond_service_free(muond_service* service) { delete service; }

}  // extern "C"
