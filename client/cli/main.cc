// muonctl: the operator's tool. Verbs are in verb_*.cc, the command line in muonctl.cc.
#include <unistd.h>

#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "client/cli/muonctl.h"

int main(int argc, char** argv) {
  muond::cli::MuonctlHost host{.environment = {},
                               .terminal = isatty(STDOUT_FILENO) == 1,
                               .out = std::cout,
                               .err = std::cerr};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    host.environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  const int code = muond::cli::RunMuonctl(std::vector<std::string>(argv + 1, argv + argc), host);
  std::cout.flush();
  if (!std::cout) {
    std::cerr << "muonctl: the output could not be written\n";
    return code == 0 ? 1 : code;
  }
  return code;
}
