#include "server/metrics/metrics_server.h"

#include <charconv>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "civetweb.h"
#include "proto/check.h"
#include "proto/mutex.h"
#include "server/metrics/worker_stack.h"

namespace muond {
namespace {

constexpr char kExpositionType[] = "text/plain; version=0.0.4; charset=utf-8";

// "host:port" cut in two; the host as civetweb takes it.
struct HostPort {
  std::string host;
  int port = 0;
};

absl::StatusOr<HostPort> ParseAddress(const std::string& address) {
  const auto bad = [&address] {
    return absl::InvalidArgumentError(absl::StrFormat(
        "metrics address \"%s\": expected <IPv4>:<port>, [<IPv6>]:<port> or localhost:<port>",
        address));
  };
  const std::size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) return bad();
  HostPort result{.host = address.substr(0, colon)};
  const char* begin = address.data() + colon + 1;
  const char* end = address.data() + address.size();
  const auto [rest, error] = std::from_chars(begin, end, result.port);
  if (error != std::errc() || rest != end || result.port < 0 || result.port > 65535) return bad();
  if (result.host == "localhost") result.host = "127.0.0.1";
  // Civetweb's own syntax has lists and suffixes; none of them may slip through.
  const bool v6 = result.host.front() == '[' && result.host.back() == ']';
  const std::string_view legal = v6 ? "[]:.0123456789abcdefABCDEF" : ".0123456789";
  if (result.host.find_first_not_of(legal) != std::string::npos) return bad();
  return result;
}

void Answer(mg_connection* connection, int code, std::string_view reason, std::string_view type,
            std::string_view body) {
  const std::string head = absl::StrFormat(
      "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n", code,
      reason, type, body.size());
  mg_write(connection, head.data(), head.size());
  const bool head_only =
      std::string_view(mg_get_request_info(connection)->request_method) == "HEAD";
  if (!head_only) mg_write(connection, body.data(), body.size());
}

}  // namespace

struct MetricsServer::Impl {
  const DaemonMetrics* metrics = nullptr;
  mg_context* context = nullptr;
  Mutex mutex;
  std::string errors MUOND_GUARDED_BY(mutex);  // what civetweb said, until it has started

  ~Impl() {
    if (context != nullptr) mg_stop(context);
  }

  static int OnLog(const mg_connection* connection, const char* message) {
    auto* impl = static_cast<Impl*>(mg_get_user_data(mg_get_context(connection)));
    if (impl != nullptr) {
      MutexLock lock(impl->mutex);
      if (impl->errors.size() < 1000) impl->errors += (impl->errors.empty() ? "" : "; ");
      if (impl->errors.size() < 1000) impl->errors += message;
    }
    return 1;  // civetweb itself prints nothing
  }

  static int OnRequest(mg_connection* connection, void* data) {
    const auto* metrics = static_cast<const DaemonMetrics*>(data);
    const mg_request_info* request = mg_get_request_info(connection);
    const std::string_view method = request->request_method;
    const std::string_view uri = request->local_uri;
    if (method != "GET" && method != "HEAD") {
      Answer(connection, 405, "Method Not Allowed", "text/plain", "GET or HEAD only\n");
    } else if (uri == "/metrics") {
      Answer(connection, 200, "OK", kExpositionType, metrics->Serialize());
    } else if (uri == "/healthz") {
      Answer(connection, 200, "OK", "text/plain", "ok\n");
    } else if (uri == "/readyz" && metrics->ready()) {
      Answer(connection, 200, "OK", "text/plain", "ready\n");
    } else if (uri == "/readyz") {
      Answer(connection, 503, "Service Unavailable", "text/plain", "not ready\n");
    } else {
      Answer(connection, 404, "Not Found", "text/plain", "see /metrics, /healthz, /readyz\n");
    }
    return 1;
  }
};

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& address,
                                                                    const DaemonMetrics* metrics) {
  MUOND_ASSIGN_OR_RETURN(const HostPort wanted, ParseAddress(address));
  auto impl = std::make_unique<Impl>();
  impl->metrics = metrics;

  static const unsigned initialized = mg_init_library(0);
  static_cast<void>(initialized);
  const std::string listen = absl::StrFormat("%s:%d", wanted.host, wanted.port);
  // Two threads: a scrape that hangs must not keep a probe waiting.
  const char* options[] = {"listening_ports", listen.c_str(), "num_threads", "32",
                           "request_timeout_ms", "1000", nullptr};
  mg_callbacks callbacks{};
  callbacks.log_message = &Impl::OnLog;
  char text[256] = "";
  unsigned code = 0;
  mg_init_data init{&callbacks, impl.get(), options};
  mg_error_data error{&code, text, sizeof(text)};
  GiveThreadsRoom();
  impl->context = mg_start2(&init, &error);
  if (impl->context == nullptr) {
    MutexLock lock(impl->mutex);
    return absl::UnavailableError(absl::StrFormat(
        "metrics address \"%s\": cannot listen: %s", address,
        impl->errors.empty() ? std::string(text) : impl->errors));
  }
  mg_set_request_handler(impl->context, "/", &Impl::OnRequest, const_cast<DaemonMetrics*>(metrics));

  mg_server_port port{};
  MUOND_CHECK(mg_get_server_ports(impl->context, 1, &port) == 1, "one port was asked for");
  return std::unique_ptr<MetricsServer>(
      new MetricsServer(std::move(impl), absl::StrFormat("%s:%d", wanted.host, port.port)));
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl, std::string address)
    : impl_(std::move(impl)), address_(std::move(address)) {}

MetricsServer::~MetricsServer() = default;

}  // namespace muond
