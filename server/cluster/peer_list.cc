#include "server/cluster/peer_list.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "proto/check.h"
#include "proto/steady_time.h"

namespace muond {
namespace {

constexpr char kDnsPrefix[] = "dns:///";

absl::Status Malformed(const std::string& entry, const char* why) {
  return absl::InvalidArgumentError(
      absl::StrFormat("peers: \"%s\": %s; expected host:port or unix:/path", entry, why));
}

absl::Status CheckEntry(const std::string& entry) {
  if (absl::StartsWith(entry, "unix:/")) return absl::OkStatus();
  const std::size_t colon = entry.rfind(':');
  if (colon == std::string::npos || colon == 0) return Malformed(entry, "no port");
  int port = 0;
  if (!absl::SimpleAtoi(entry.substr(colon + 1), &port) || port < 1 || port > 65535) {
    return Malformed(entry, "the port is no number from 1 to 65535");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ReadFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return absl::NotFoundError(absl::StrFormat("peers: file \"%s\": cannot be read", path));
  }
  std::vector<std::string> entries;
  for (std::string line; std::getline(file, line);) {
    line = line.substr(0, line.find('#'));
    absl::StripAsciiWhitespace(&line);
    if (!line.empty()) entries.push_back(line);
  }
  return entries;
}

std::string AddressText(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text,
              sizeof(text));
    return text;
  }
  if (address->sa_family == AF_INET6) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text,
              sizeof(text));
    return absl::StrFormat("[%s]", text);
  }
  return "";
}

// Sorted, so that every daemon numbers them alike.
std::vector<std::string> LookUp(const std::string& host, const std::string& port,
                                std::string* why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    *why = gai_strerror(error);
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  std::set<std::string> addresses;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    addresses.insert(AddressText(entry->ai_addr) + ":" + port);
  }
  return {addresses.begin(), addresses.end()};
}

absl::StatusOr<std::vector<std::string>> Resolve(const PeerOptions& options) {
  const std::string name = options.peers.substr(sizeof(kDnsPrefix) - 1);
  MUOND_RETURN_IF_ERROR(CheckEntry(name));
  if (options.daemons_expected < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "peers: \"%s\": a DNS name needs the number of daemons (--peers-expected): a list that "
        "still grows would differ from daemon to daemon",
        options.peers));
  }
  const std::size_t colon = name.rfind(':');
  const absl::Time deadline = SteadyNow() + options.resolve_timeout;
  for (;;) {
    std::string why;
    std::vector<std::string> found = LookUp(name.substr(0, colon), name.substr(colon + 1), &why);
    if (static_cast<int>(found.size()) == options.daemons_expected) return found;
    if (SteadyNow() >= deadline) {
      return absl::UnavailableError(absl::StrFormat(
          "peers: \"%s\": expected %d addresses, found %d%s after %s", options.peers,
          options.daemons_expected, found.size(), why.empty() ? "" : " (" + why + ")",
          absl::FormatDuration(options.resolve_timeout)));
    }
    absl::SleepFor(std::min(absl::Seconds(1), deadline - SteadyNow()));
  }
}

// The addresses of this machine, as LookUp writes them.
std::set<std::string> OwnAddresses() {
  std::set<std::string> addresses;
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) return addresses;
  for (const ifaddrs* each = interfaces; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr != nullptr) addresses.insert(AddressText(each->ifa_addr));
  }
  freeifaddrs(interfaces);
  return addresses;
}

// "unix:///p" and "unix:/p" are one address.
std::string Canonical(const std::string& entry) {
  if (!absl::StartsWith(entry, "unix:")) return entry;
  std::string path = entry.substr(5);
  while (absl::StartsWith(path, "//")) path.erase(0, 1);
  return "unix:" + path;
}

absl::StatusOr<int> FindSelf(const PeerOptions& options, const std::vector<std::string>& daemons) {
  std::set<std::string> mine;
  if (!options.advertise.empty()) {
    mine = {Canonical(options.advertise)};
  } else {
    for (const std::string& address : options.listen) mine.insert(Canonical(address));
  }
  std::vector<int> found;
  for (int i = 0; i < static_cast<int>(daemons.size()); ++i) {
    if (mine.contains(daemons[i])) found.push_back(i);
  }
  if (found.empty() && options.advertise.empty() && absl::StartsWith(options.peers, kDnsPrefix)) {
    const std::set<std::string> own = OwnAddresses();
    for (int i = 0; i < static_cast<int>(daemons.size()); ++i) {
      if (own.contains(daemons[i].substr(0, daemons[i].rfind(':')))) found.push_back(i);
    }
  }
  if (found.size() == 1) return found[0];
  return absl::InvalidArgumentError(absl::StrFormat(
      "peers: [%s]: this daemon is %s of them: name its own entry with --advertise%s",
      absl::StrJoin(daemons, ", "), found.empty() ? "none" : "more than one",
      options.advertise.empty() ? "" : " (now \"" + options.advertise + "\")"));
}

}  // namespace

absl::StatusOr<PeerList> ResolvePeers(const PeerOptions& options) {
  PeerList list;
  if (options.peers.empty()) return list;
  if (absl::StartsWith(options.peers, kDnsPrefix)) {
    MUOND_ASSIGN_OR_RETURN(list.daemons, Resolve(options));
  } else if (options.peers[0] == '@') {
    MUOND_ASSIGN_OR_RETURN(list.daemons, ReadFile(options.peers.substr(1)));
  } else {
    list.daemons = absl::StrSplit(options.peers, ',');
  }
  std::set<std::string> seen;
  for (std::string& entry : list.daemons) {
    absl::StripAsciiWhitespace(&entry);
    entry = Canonical(entry);
    MUOND_RETURN_IF_ERROR(CheckEntry(entry));
    if (!seen.insert(entry).second) {
      return absl::InvalidArgumentError(
          absl::StrFormat("peers: \"%s\": is in the list twice", entry));
    }
  }
  if (list.daemons.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("peers: \"%s\": the list is empty", options.peers));
  }
  MUOND_ASSIGN_OR_RETURN(list.self, FindSelf(options, list.daemons));
  return list;
}

}  // namespace muond
