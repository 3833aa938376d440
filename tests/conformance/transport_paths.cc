#include "tests/conformance/transport_paths.h"

#include <stdlib.h>

#include <filesystem>
#include <sstream>
#include <utility>

#include "proto/check.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {

std::string PathName(Path path) {
  switch (path) {
    case Path::kGrpcTcp:
      return "GrpcTcp";
    case Path::kGrpcUnix:
      return "GrpcUnix";
    case Path::kArena:
      return "Arena";
    case Path::kInProcess:
      return "InProcess";
  }
  return "";
}

PathDaemon::PathDaemon(ServiceOptions options) {
  char name[] = "/tmp/muond-paths-XXXXXX";
  MUOND_CHECK(mkdtemp(name) != nullptr, "no directory for a socket");
  directory_ = name;
  options.listen = {unix_address(), "127.0.0.1:0"};
  service_ = cluster::Must(Service::Start(options));
}

PathDaemon::~PathDaemon() {
  service_.reset();
  std::filesystem::remove_all(directory_);
}

client::SessionOptions PathDaemon::OptionsFor(Path path) {
  client::SessionOptions options;
  options.arena_window_bytes = 64 * 1024;  // small: tests' tensors take many
  switch (path) {
    case Path::kGrpcTcp:
      options.endpoint = service_->addresses()[1];
      options.transport = "grpc";
      break;
    case Path::kGrpcUnix:
      options.endpoint = unix_address();
      options.transport = "grpc";
      break;
    case Path::kArena:
      options.endpoint = unix_address();
      options.transport = "arena";
      break;
    case Path::kInProcess:
      options.channel = service_->channel();
      break;
  }
  return options;
}

double MetricOf(Service& service, const std::string& series) {
  std::istringstream lines(service.Metrics());
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(series + " ")) return std::stod(line.substr(series.size() + 1));
  }
  return 0;
}

}  // namespace muond::conformance
