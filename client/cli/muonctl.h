// muonctl as a function, so that tests can call it: arguments and environment in, text and exit
// code out.
#pragma once

#include <iosfwd>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace grpc {
class Channel;
}

namespace muond::cli {

struct MuonctlHost {
  std::map<std::string, std::string> environment;  // MUOND_*, NO_COLOR, TERM
  bool terminal = false;                           // `out` is one
  std::ostream& out;
  std::ostream& err;
  std::shared_ptr<grpc::Channel> channel = nullptr;  // tests: takes the place of the endpoint
};

// `arguments` without the program's name. Returns an ExitCode (verb.h).
int RunMuonctl(const std::vector<std::string>& arguments, const MuonctlHost& host);

// The endpoint when none is named: the daemon's default socket where this user may use it, else its
// default TCP address.
std::string DefaultEndpoint();

}  // namespace muond::cli
