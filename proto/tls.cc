#include "proto/tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "proto/check.h"

namespace muond {
namespace {

template <auto Free>
struct Freer {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
void FreeStack(STACK_OF(X509) * stack) { sk_X509_pop_free(stack, X509_free); }
void FreeNames(GENERAL_NAMES* names) { GENERAL_NAMES_free(names); }

using Certificate = std::unique_ptr<X509, Freer<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freer<EVP_PKEY_free>>;
using Stack = std::unique_ptr<STACK_OF(X509), Freer<FreeStack>>;
using Store = std::unique_ptr<X509_STORE, Freer<X509_STORE_free>>;
using StoreContext = std::unique_ptr<X509_STORE_CTX, Freer<X509_STORE_CTX_free>>;
using Bio = std::unique_ptr<BIO, Freer<BIO_free_all>>;

absl::Status Unfit(const std::string& file, const std::string& cause) {
  ERR_clear_error();
  return absl::FailedPreconditionError(absl::StrFormat("TLS file \"%s\": %s", file, cause));
}

absl::StatusOr<Bio> OpenFile(const std::string& path) {
  Bio file(BIO_new_file(path.c_str(), "r"));
  if (file != nullptr) return file;
  ERR_clear_error();
  return absl::NotFoundError(absl::StrFormat("TLS file \"%s\": cannot read it", path));
}

// All certificates of the file, at least one.
absl::StatusOr<Stack> ReadCertificates(const std::string& path) {
  MUOND_ASSIGN_OR_RETURN(const Bio file, OpenFile(path));
  Stack stack(sk_X509_new_null());
  while (X509* certificate = PEM_read_bio_X509(file.get(), nullptr, nullptr, nullptr)) {
    sk_X509_push(stack.get(), certificate);
  }
  ERR_clear_error();
  if (sk_X509_num(stack.get()) == 0) return Unfit(path, "no certificate in PEM form is in it");
  return stack;
}

absl::StatusOr<Key> ReadKey(const std::string& path) {
  MUOND_ASSIGN_OR_RETURN(const Bio file, OpenFile(path));
  // An empty passphrase, never a prompt: a daemon has nobody to ask.
  char nothing[] = "";
  Key key(PEM_read_bio_PrivateKey(file.get(), nullptr, nullptr, nothing));
  if (key == nullptr) return Unfit(path, "no unencrypted private key in PEM form is in it");
  return key;
}

absl::Time ToTime(const ASN1_TIME* time) {
  tm parts{};
  ASN1_TIME_to_tm(time, &parts);
  return absl::FromTM(parts, absl::UTCTimeZone());
}

std::string SubjectOf(X509* certificate) {
  Bio text(BIO_new(BIO_s_mem()));
  X509_NAME_print_ex(text.get(), X509_get_subject_name(certificate), 0, XN_FLAG_RFC2253);
  char* data = nullptr;
  const auto size = BIO_get_mem_data(text.get(), &data);
  return {data, static_cast<std::size_t>(size)};
}

std::vector<std::string> UrisOf(X509* certificate) {
  std::vector<std::string> uris;
  const std::unique_ptr<GENERAL_NAMES, Freer<FreeNames>> names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const ASN1_IA5STRING* uri = name->d.uniformResourceIdentifier;
    uris.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(uri)),
                      ASN1_STRING_length(uri));
  }
  return uris;
}

absl::Status CheckSigned(const TlsFiles& files, const Stack& own, const Stack& authorities,
                         absl::Time now) {
  const Store store(X509_STORE_new());
  for (int i = 0; i < sk_X509_num(authorities.get()); ++i) {
    X509_STORE_add_cert(store.get(), sk_X509_value(authorities.get(), i));
  }
  const StoreContext context(X509_STORE_CTX_new());
  X509_STORE_CTX_init(context.get(), store.get(), sk_X509_value(own.get(), 0), own.get());
  X509_STORE_CTX_set_time(context.get(), 0, absl::ToTimeT(now));
  if (X509_verify_cert(context.get()) == 1) return absl::OkStatus();
  const char* why = X509_verify_cert_error_string(X509_STORE_CTX_get_error(context.get()));
  return Unfit(files.certificate,
               absl::StrFormat("not acceptable to those in \"%s\": %s", files.authority, why));
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

TlsFiles TlsFromEnvironment() {
  return {.certificate = Variable("MUOND_TLS_CERT"),
          .key = Variable("MUOND_TLS_KEY"),
          .authority = Variable("MUOND_TLS_CA"),
          .server_name = Variable("MUOND_TLS_SERVER_NAME")};
}

absl::StatusOr<CertificateFacts> CheckTlsFiles(const TlsFiles& files, absl::Time now) {
  if (files.certificate.empty() || files.key.empty() || files.authority.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "TLS needs three files: certificate (\"%s\"), key (\"%s\") and authority (\"%s\")",
        files.certificate, files.key, files.authority));
  }
  MUOND_ASSIGN_OR_RETURN(const Stack own, ReadCertificates(files.certificate));
  MUOND_ASSIGN_OR_RETURN(const Key key, ReadKey(files.key));
  MUOND_ASSIGN_OR_RETURN(const Stack authorities, ReadCertificates(files.authority));
  X509* certificate = sk_X509_value(own.get(), 0);
  if (X509_check_private_key(certificate, key.get()) != 1) {
    return Unfit(files.key, absl::StrFormat("not the key of \"%s\"", files.certificate));
  }
  CertificateFacts facts{.subject = SubjectOf(certificate),
                         .uris = UrisOf(certificate),
                         .not_before = ToTime(X509_get0_notBefore(certificate)),
                         .not_after = ToTime(X509_get0_notAfter(certificate))};
  if (now > facts.not_after || now < facts.not_before) {
    return Unfit(files.certificate,
                 absl::StrFormat("valid from %s to %s only", absl::FormatTime(facts.not_before),
                                 absl::FormatTime(facts.not_after)));
  }
  MUOND_RETURN_IF_ERROR(CheckSigned(files, own, authorities, now));
  return facts;
}

absl::StatusOr<ChannelSecurity> MakeChannelSecurity(const TlsFiles& files) {
  if (files.empty()) return ChannelSecurity{};
  MUOND_RETURN_IF_ERROR(CheckTlsFiles(files, absl::Now()).status());
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          files.key, files.certificate, files.authority,
          static_cast<unsigned>(std::max<std::int64_t>(1, absl::ToInt64Seconds(files.refresh)))));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_verify_server_certs(true);
  return ChannelSecurity{.credentials = grpc::experimental::TlsCredentials(options),
                         .server_name = files.server_name};
}

}  // namespace muond
