#include "server/daemon/secure_listen.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "grpc/grpc_security_constants.h"
#include "grpcpp/security/auth_metadata_processor.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "proto/check.h"
#include "proto/mutex.h"
#include "proto/status.h"
#include "server/rpc/roles.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

constexpr absl::Duration kExpiryWarning = absl::Hours(7 * 24);
constexpr absl::Duration kRefusalLogInterval = absl::Seconds(1);

std::vector<std::string> Values(const grpc::AuthContext& context, const char* property) {
  std::vector<std::string> values;
  for (const grpc::string_ref& value : context.FindPropertyValues(property)) {
    values.emplace_back(value.data(), value.size());
  }
  return values;
}

// Asked by gRPC for every call of a connection, before any handler sees it. Thread-safe.
class RoleGuard : public grpc::AuthMetadataProcessor {
 public:
  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context, OutputMetadata*,
                       OutputMetadata*) override {
    const auto path = metadata.find(":path");
    const std::string method =
        path == metadata.end() ? "" : std::string(path->second.data(), path->second.size());
    const std::vector<std::string> names = Values(*context, GRPC_X509_CN_PROPERTY_NAME);
    const std::string holder = names.empty() ? "without a name" : "CN=" + names[0];
    const absl::Status status =
        CheckRole(method, RolesOf(Values(*context, GRPC_PEER_URI_PROPERTY_NAME)), holder);
    if (!status.ok()) Log(status);
    return ToGrpc(status);
  }

 private:
  // At most one line a second: whoever is refused decides how often to try.
  void Log(const absl::Status& status) {
    MutexLock lock(mutex_);
    ++unlogged_;
    const absl::Time now = absl::Now();
    if (now < next_line_) return;
    spdlog::warn("refused: {} ({} refusals since the last line)", std::string(status.message()),
                 unlogged_);
    unlogged_ = 0;
    next_line_ = now + kRefusalLogInterval;
  }

  Mutex mutex_;
  absl::Time next_line_ MUOND_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::int64_t unlogged_ MUOND_GUARDED_BY(mutex_) = 0;
};

absl::Status CheckOwnCertificate(const TlsFiles& files) {
  const absl::Time now = absl::Now();
  MUOND_ASSIGN_OR_RETURN(const CertificateFacts facts, CheckTlsFiles(files, now));
  const std::vector<CallerRole> roles = RolesOf(facts.uris);
  if (std::find(roles.begin(), roles.end(), CallerRole::kDaemon) == roles.end()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "TLS file \"%s\": the certificate of \"%s\" does not have the role daemon",
        files.certificate, facts.subject));
  }
  spdlog::info("TLS: \"{}\", valid until {}", facts.subject,
               absl::FormatTime(facts.not_after, absl::UTCTimeZone()));
  if (facts.not_after - now < kExpiryWarning) {
    spdlog::warn("TLS file \"{}\": the certificate ends within {}", files.certificate,
                 absl::FormatDuration(absl::Floor(facts.not_after - now, absl::Minutes(1))));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const TlsFiles& files) {
  if (files.empty()) return grpc::InsecureServerCredentials();
  MUOND_RETURN_IF_ERROR(CheckOwnCertificate(files));
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          files.key, files.certificate, files.authority,
          static_cast<unsigned>(std::max<std::int64_t>(1, absl::ToInt64Seconds(files.refresh)))));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  std::shared_ptr<grpc::ServerCredentials> credentials =
      grpc::experimental::TlsServerCredentials(options);
  credentials->SetAuthMetadataProcessor(std::make_shared<RoleGuard>());
  return credentials;
}

}  // namespace muond
