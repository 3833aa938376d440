// The data paths that a trainer can take to a daemon, for tests that must hold on each of them.
#pragma once

#include <memory>
#include <ostream>
#include <string>

#include "client/cpp/session.h"
#include "server/daemon/embedded.h"

namespace muond::conformance {

enum class Path { kGrpcTcp, kGrpcUnix, kArena, kInProcess };
inline constexpr Path kAllPaths[] = {Path::kGrpcTcp, Path::kGrpcUnix, Path::kArena,
                                     Path::kInProcess};

std::string PathName(Path path);  // "GrpcTcp", ...
inline void PrintTo(Path path, std::ostream* out) { *out << PathName(path); }

// The value of a series of a service's metrics; 0 when there is none.
double MetricOf(Service& service, const std::string& series);

// A daemon with a unix socket in a directory of its own and a port of the loopback.
class PathDaemon {
 public:
  explicit PathDaemon(ServiceOptions options = {.threads = 1});
  ~PathDaemon();

  Service& service() { return *service_; }
  std::string unix_address() const { return "unix://" + directory_ + "/muond.sock"; }
  std::string arena_socket() const { return directory_ + "/muond.sock.arena"; }
  // Of a session that takes this path, whatever its daemon would choose.
  client::SessionOptions OptionsFor(Path path);
  double Metric(const std::string& series) { return MetricOf(*service_, series); }

 private:
  std::string directory_;
  std::unique_ptr<Service> service_;
};

}  // namespace muond::conformance
