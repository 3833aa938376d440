// The daemons of a session's run: a connection to each, and one call to all of them at once.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/connection.h"
#include "client/cpp/retry.h"

namespace muond::client {

class Daemons {
 public:
  // The first contact, whichever of the run's daemons that is.
  static absl::StatusOr<std::unique_ptr<Daemons>> Open(const std::string& endpoint,
                                                       std::shared_ptr<grpc::Channel> channel,
                                                       std::int64_t chunk_bytes,
                                                       const TlsFiles& tls = {});

  // What the first contact says of the run: connects to the others, in the plan's order; again when
  // the addresses have changed. INTERNAL for an answer that makes no sense.
  absl::Status Adopt(const v1::RegisterReply& registered);

  int count() const { return static_cast<int>(connections_.size()); }
  // The first contact's place.
  int home() const { return home_; }
  Connection& operator[](int daemon) { return *connections_[daemon]; }

  // Calls every daemon at once, each from a thread of its own, and returns when all have answered,
  // or one has refused for good: the calls to the others, which may wait for long, are given up
  // then (CallScope). OK, or the most telling failure (what no repetition can mend before what one
  // might, the first of a kind), with the daemon's name where there are several, and those of other
  // daemons with the same code. `call` must be safe for different daemons at a time. With
  // `but_home` the first contact is left out.
  CallResult ForEach(const std::function<CallResult(int daemon, Connection&)>& call,
                     bool but_home = false);

 private:
  Daemons() = default;
  // What the daemon said, with its name.
  std::string Told(int daemon, const absl::Status& status) const;
  std::int64_t chunk_bytes_ = 0;
  ChannelSecurity security_;
  int home_ = 0;
  std::vector<std::string> addresses_;
  std::vector<std::shared_ptr<Connection>> connections_;
};

}  // namespace muond::client
