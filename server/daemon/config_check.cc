// What no single value can tell about a Config: addresses, ranges, socket directories.
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/daemon/config.h"
#include "server/daemon/config_settings.h"

namespace muond {
namespace {

constexpr std::string_view kUnixScheme = "unix://";

std::string SourceOf(const Config& config, const std::string& name) {
  const auto source = config.sources.find(name);
  return source == config.sources.end() ? "default" : source->second;
}

absl::Status Bad(const Config& config, const std::string& name, const std::string& value,
                 const std::string& message) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s \"%s\" (%s): %s", name, value, SourceOf(config, name), message));
}

struct HostPort {
  std::string host;  // an IPv6 address without its brackets
  int port = 0;
};

// Empty when `address` is not host:port with a port of 0..65535.
std::optional<HostPort> SplitHostPort(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) return std::nullopt;
  HostPort result{.host = address.substr(0, colon)};
  const char* begin = address.data() + colon + 1;
  const char* end = address.data() + address.size();
  const auto [rest, error] = std::from_chars(begin, end, result.port);
  if (error != std::errc() || rest != end || begin == end) return std::nullopt;
  if (result.port < 0 || result.port > 65535) return std::nullopt;
  const bool bracketed = result.host.front() == '[' && result.host.back() == ']';
  if (bracketed) {
    result.host = result.host.substr(1, result.host.size() - 2);
  } else if (result.host.find(':') != std::string::npos) {
    return std::nullopt;  // an IPv6 address needs its brackets
  }
  if (result.host.empty() || result.host.find_first_of("/ []") != std::string::npos) {
    return std::nullopt;
  }
  return result;
}

// By form, without asking a resolver: what a name resolves to may change after the check.
bool IsLoopback(const std::string& host) {
  if (host == "localhost" || host == "::1") return true;
  const bool v4 = host.find_first_not_of("0123456789.") == std::string::npos;
  return v4 && host.starts_with("127.");
}

absl::Status CheckListen(Config& config, const std::string& address,
                         std::set<std::pair<std::string, int>>& tcp) {
  if (address.starts_with(kUnixScheme)) {
    const std::string path = address.substr(kUnixScheme.size());
    if (!path.starts_with("/") || path.ends_with("/")) {
      return Bad(config, "listen", address, "expected unix:///absolute/path/of/the.sock");
    }
    if (path.size() >= sizeof(sockaddr_un::sun_path)) {
      return Bad(config, "listen", address,
                 absl::StrFormat("a socket path has at most %d bytes, this one has %d",
                                 sizeof(sockaddr_un::sun_path) - 1, path.size()));
    }
    return absl::OkStatus();
  }
  const auto tcp_address = SplitHostPort(address);
  if (!tcp_address) {
    return Bad(config, "listen", address,
               "expected unix:///path, host:port or [IPv6]:port, the port 0 to 65535");
  }
  if (!IsLoopback(tcp_address->host) && config.service.tls_cert.empty()) {
    if (!config.insecure) {
      return Bad(config, "listen", address,
                 "plain TCP beyond loopback lets anyone on the network read and change a run; "
                 "give --tls-cert, --tls-key and --tls-ca, listen on a unix socket or 127.0.0.1, "
                 "or say --insecure to accept that");
    }
    config.warnings.push_back(absl::StrFormat(
        "listening on \"%s\" without encryption or authentication (--insecure)", address));
  }
  if (tcp_address->port != 0 && !tcp.emplace(tcp_address->host, tcp_address->port).second) {
    return Bad(config, "listen", address, "the address is taken by another setting already");
  }
  return absl::OkStatus();
}

absl::Status CheckTls(const Config& config) {
  const ServiceOptions& service = config.service;
  const std::pair<const char*, const std::string&> files[] = {
      {"tls-cert", service.tls_cert}, {"tls-key", service.tls_key}, {"tls-ca", service.tls_ca}};
  int given = 0;
  for (const auto& [name, file] : files) given += file.empty() ? 0 : 1;
  for (const auto& [name, file] : files) {
    if (given == 0 || !file.empty()) continue;
    return Bad(config, name, file,
               "tls-cert, tls-key and tls-ca belong together: give all or none");
  }
  if (given > 0 && config.insecure) {
    return Bad(config, "insecure", "true", "with tls-cert every TCP address asks for certificates");
  }
  if (service.tls_refresh < absl::Seconds(1)) {
    return Bad(config, "tls-refresh", absl::FormatDuration(service.tls_refresh),
               "expected a second or more");
  }
  return absl::OkStatus();
}

// Anyone may know whether the daemon serves: no warning beyond loopback.
absl::Status CheckHealth(Config& config, std::set<std::pair<std::string, int>>& tcp) {
  std::string& health = config.service.health_address;
  if (health == "none") health.clear();
  if (health.empty()) return absl::OkStatus();
  const auto address = SplitHostPort(health);
  if (!address) {
    return Bad(config, "health-address", health,
               "expected host:port, the port 0 to 65535, or none");
  }
  if (address->port != 0) tcp.emplace(address->host, address->port);
  return absl::OkStatus();
}

absl::Status CheckAddresses(Config& config) {
  std::set<std::string> seen;
  std::set<std::pair<std::string, int>> tcp;
  MUOND_RETURN_IF_ERROR(CheckTls(config));
  MUOND_RETURN_IF_ERROR(CheckHealth(config, tcp));
  std::string& metrics = config.service.metrics_address;
  if (metrics == "none") metrics.clear();
  if (!metrics.empty()) {
    const auto address = SplitHostPort(metrics);
    if (!address) {
      return Bad(config, "metrics-address", metrics,
                 "expected host:port, the port 0 to 65535, or none");
    }
    if (!IsLoopback(address->host)) {
      config.warnings.push_back(
          absl::StrFormat("metrics are readable by anyone who can reach \"%s\"", metrics));
    }
    if (address->port != 0 && !tcp.emplace(address->host, address->port).second) {
      return Bad(config, "metrics-address", metrics,
                 "the address is taken by another setting already");
    }
  }
  if (config.service.listen.empty()) {
    return Bad(config, "listen", "", "a daemon needs at least one address");
  }
  for (const std::string& address : config.service.listen) {
    if (!seen.insert(address).second) {
      return Bad(config, "listen", address, "the address is there twice");
    }
    MUOND_RETURN_IF_ERROR(CheckListen(config, address, tcp));
  }
  return absl::OkStatus();
}

absl::Status CheckOneOf(const Config& config, const std::string& name, const std::string& value,
                        std::initializer_list<std::string_view> legal) {
  std::string list;
  for (const std::string_view word : legal) {
    if (word == value) return absl::OkStatus();
    list += absl::StrFormat("%s%s", list.empty() ? "" : ", ", word);
  }
  return Bad(config, name, value, "expected one of " + list);
}

absl::Status CheckRange(const Config& config, const std::string& name, std::int64_t value,
                        std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Bad(config, name, FindSetting(name)->get(config)[0],
             absl::StrFormat("expected %d to %d", low, high));
}

}  // namespace

absl::Status CheckConfig(Config& config) {
  const ServiceOptions& service = config.service;
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  MUOND_RETURN_IF_ERROR(CheckAddresses(config));
  MUOND_RETURN_IF_ERROR(
      CheckOneOf(config, "backend", service.backend, {"auto", "cuda", "cpu", "reference"}));
  MUOND_RETURN_IF_ERROR(CheckOneOf(config, "nccl", service.nccl, {"auto", "off"}));
  MUOND_RETURN_IF_ERROR(
      CheckOneOf(config, "cpu-products", service.cpu_products, {"auto", "f32", "bf16"}));
  MUOND_RETURN_IF_ERROR(
      CheckOneOf(config, "log-level", config.log_level, {"debug", "info", "warning", "error"}));
  MUOND_RETURN_IF_ERROR(CheckOneOf(config, "log-format", config.log_format, {"text", "json"}));
  MUOND_RETURN_IF_ERROR(CheckRange(config, "threads", service.threads, 0, 4096));
  // Below 4 KiB a message is mostly header; gRPC's own ceiling of a message is 2 GiB.
  MUOND_RETURN_IF_ERROR(
      CheckRange(config, "max-chunk-bytes", service.max_chunk_bytes, 4096, 1024 * kMiB));
  MUOND_RETURN_IF_ERROR(
      CheckRange(config, "max-tensor-bytes", service.max_tensor_bytes, 4, INT64_MAX));
  MUOND_RETURN_IF_ERROR(CheckRange(config, "max-run-bytes", service.max_run_bytes, 0, INT64_MAX));
  MUOND_RETURN_IF_ERROR(
      CheckRange(config, "max-parameters", service.max_parameters, 1, 100'000'000));
  MUOND_RETURN_IF_ERROR(CheckRange(config, "max-runs", service.max_runs, 1, 1024));
  MUOND_RETURN_IF_ERROR(
      CheckRange(config, "max-world-size", service.max_world_size, 1, 16'777'216));
  MUOND_RETURN_IF_ERROR(
      CheckRange(config, "diagnostics-every", service.diagnostics_every, 0, 1'000'000'000));
  MUOND_RETURN_IF_ERROR(
      CheckRange(config, "log-every", service.summary_every, 0, 1'000'000'000));
  if (service.peer_patience <= absl::ZeroDuration()) {
    return Bad(config, "peer-patience", absl::FormatDuration(service.peer_patience),
               "expected more than 0");
  }
  MUOND_RETURN_IF_ERROR(CheckRange(config, "buddy-steps", service.buddy_steps, 0, 1'000'000));
  if (service.peers_expected < 0) {
    return Bad(config, "peers-expected", absl::StrFormat("%d", service.peers_expected),
               "expected 0 or more");
  }
  if (service.step_deadline <= absl::ZeroDuration()) {
    return Bad(config, "step-deadline", absl::FormatDuration(service.step_deadline),
               "expected more than 0");
  }
  if (!service.fault_points.empty()) {
    config.warnings.push_back("fault injection is on (fault-points): for tests only");
  }
  return absl::OkStatus();
}

absl::Status PrepareSocketDirectories(const Config& config) {
  for (const std::string& address : config.service.listen) {
    if (!address.starts_with(kUnixScheme)) continue;
    const std::filesystem::path directory =
        std::filesystem::path(address.substr(kUnixScheme.size())).parent_path();
    const bool made = mkdir(directory.c_str(), 0700) == 0;
    if (made || access(directory.c_str(), W_OK | X_OK) == 0) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "listen \"%s\" (%s): cannot make a socket in \"%s\": %s; choose a place that this user may "
        "write to, as --listen unix:///run/user/%d/muond.sock, or only TCP, as --listen "
        "127.0.0.1:7070",
        address, SourceOf(config, "listen"), directory.string(), std::strerror(errno), getuid()));
  }
  return absl::OkStatus();
}

}  // namespace muond
