// Mutual TLS between programs: which files prove who one is, and whether they can.
//
// Everybody, trainer or daemon, has a certificate of the same authority. What its holder may do is
// written into it (server/rpc/roles.h); that it is the holder's own is shown by the handshake.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/channel.h"

namespace muond {

// PEM files. All three paths or none; they are read again every `refresh`, so that a certificate
// can be replaced under a running program: connections made later use the new one.
struct TlsFiles {
  std::string certificate;  // the own one first, then intermediates
  std::string key;          // of the own certificate, unencrypted
  std::string authority;    // certificates of the authorities that are believed
  // The name that daemons' certificates carry; empty: the host of the address that is called. For
  // daemons that are called by addresses nobody knows beforehand, as those of pods.
  std::string server_name;
  absl::Duration refresh = absl::Seconds(30);  // at least a second

  bool empty() const { return certificate.empty() && key.empty() && authority.empty(); }
};

// $MUOND_TLS_CERT, $MUOND_TLS_KEY, $MUOND_TLS_CA and $MUOND_TLS_SERVER_NAME.
TlsFiles TlsFromEnvironment();

// What a certificate says of its holder.
struct CertificateFacts {
  std::string subject;            // "CN=rank 3, O=muond"
  std::vector<std::string> uris;  // its subject alternative names of that kind, roles among them
  absl::Time not_before;
  absl::Time not_after;
};

// Reads the files and checks what a handshake would: that key and certificate belong together, that
// an authority of the file has signed it, that `now` is within its time. INVALID_ARGUMENT for two
// paths of three, NOT_FOUND for a file that can't be read, FAILED_PRECONDITION for the rest; the
// message names the file.
absl::StatusOr<CertificateFacts> CheckTlsFiles(const TlsFiles& files, absl::Time now);

// What a channel is to be made with; plain for empty `files`. Errors as CheckTlsFiles.
absl::StatusOr<ChannelSecurity> MakeChannelSecurity(const TlsFiles& files);

}  // namespace muond
