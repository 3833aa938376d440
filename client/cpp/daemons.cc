#include "client/cpp/daemons.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/call_scope.h"
#include "proto/check.h"

namespace muond::client {
namespace {

// How much a failure says. A daemon that refuses says most. One that is away is why others wait in
// vain, for its vote or for a rank that can't send to it, and hear of nothing but that.
constexpr int kDefinite = 3;
int Weight(const CallResult& result) {
  if (result.status.ok()) return 0;
  if (absl::IsDeadlineExceeded(result.status)) return 1;
  if (absl::IsUnavailable(result.status) || absl::IsCancelled(result.status)) return 2;
  return kDefinite;
}

// So many of equal failures are in a message.
constexpr int kFailuresTold = 4;

}  // namespace

std::string Daemons::Told(int daemon, const absl::Status& status) const {
  return absl::StrFormat("daemon \"%s\": %s", addresses_[daemon], status.message());
}

absl::StatusOr<std::unique_ptr<Daemons>> Daemons::Open(const std::string& endpoint,
                                                       std::shared_ptr<grpc::Channel> channel,
                                                       std::int64_t chunk_bytes,
                                                       const TlsFiles& tls) {
  std::unique_ptr<Daemons> daemons(new Daemons());
  daemons->chunk_bytes_ = chunk_bytes;
  if (channel == nullptr) {
    MUOND_ASSIGN_OR_RETURN(daemons->security_, ResolveSecurity(tls));
  }
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<Connection> home,
                         Connection::Open(endpoint, std::move(channel), chunk_bytes,
                                          daemons->security_));
  daemons->connections_ = {std::move(home)};
  return daemons;
}

absl::Status Daemons::Adopt(const v1::RegisterReply& registered) {
  std::vector<std::string> addresses(registered.daemons().begin(), registered.daemons().end());
  if (addresses.empty()) addresses = {""};
  const std::int64_t home = registered.daemon();
  if (home < 0 || home >= std::ssize(addresses)) {
    return absl::InternalError(absl::StrFormat(
        "register: %s calls itself daemon %d of %d", connections_[home_]->peer(), home,
        addresses.size()));
  }
  if (addresses == addresses_ && home == home_) return absl::OkStatus();
  std::vector<std::shared_ptr<Connection>> connections(addresses.size());
  for (std::size_t daemon = 0; daemon < addresses.size(); ++daemon) {
    if (static_cast<std::int64_t>(daemon) == home) continue;
    MUOND_ASSIGN_OR_RETURN(connections[daemon],
                           Connection::Open(addresses[daemon], nullptr, chunk_bytes_, security_));
  }
  connections[home] = connections_[home_];
  connections_ = std::move(connections);
  addresses_ = std::move(addresses);
  home_ = static_cast<int>(home);
  return absl::OkStatus();
}

CallResult Daemons::ForEach(const std::function<CallResult(int daemon, Connection&)>& call,
                            bool but_home) {
  if (count() == 1) return but_home ? CallResult{} : call(0, *connections_[0]);
  std::vector<CallResult> results(count());
  std::vector<std::thread> threads;
  CallScope scope(CallScope::Current());
  std::atomic<int> refused{-1};  // the first that has
  for (int daemon = 0; daemon < count(); ++daemon) {
    if (but_home && daemon == home_) continue;
    threads.emplace_back([&, daemon] {
      const CallScope::Guard guard(&scope);
      results[daemon] = call(daemon, *connections_[daemon]);
      int none = -1;
      if (Weight(results[daemon]) < kDefinite) return;
      if (refused.compare_exchange_strong(none, daemon)) scope.GiveUp();
    });
  }
  for (std::thread& thread : threads) thread.join();
  int worst = std::max(refused.load(), 0);
  for (int daemon = 0; daemon < count(); ++daemon) {
    if (Weight(results[daemon]) > Weight(results[worst])) worst = daemon;
  }
  CallResult result = std::move(results[worst]);
  if (result.status.ok()) return result;
  // One may know which rank is missing, and another one that a daemon is.
  std::string message = Told(worst, result.status);
  int left_out = 0;
  for (int daemon = 0, told = 1; daemon < count(); ++daemon) {
    if (daemon == worst || results[daemon].status.code() != result.status.code()) continue;
    if (++told > kFailuresTold) {
      ++left_out;
    } else {
      absl::StrAppend(&message, "; ", Told(daemon, results[daemon].status));
    }
  }
  if (left_out > 0) absl::StrAppendFormat(&message, "; and %d more", left_out);
  result.status = absl::Status(result.status.code(), message);
  return result;
}

}  // namespace muond::client
