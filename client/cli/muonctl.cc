#include "client/cli/muonctl.h"

#include <unistd.h>

#include <ostream>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cli/verb.h"

namespace muond::cli {
namespace {

constexpr char kFooter[] =
    "Exit codes: 0 fine, 1 error, 2 usage, 3 unhealthy. Every global option has an environment\n"
    "twin: --endpoint is MUOND_ENDPOINT. Colors only on a terminal and without NO_COLOR.";

// The options of every verb, as text until they are parsed.
struct GlobalOptions {
  std::string endpoint;
  std::string run;
  std::string output = "table";
  std::string timeout = "5s";
  TlsFiles tls;
};

std::string Lookup(const MuonctlHost& host, const std::string& name) {
  const auto found = host.environment.find(name);
  return found == host.environment.end() ? "" : found->second;
}

void AddGlobalOptions(CLI::App& app, GlobalOptions& options) {
  app.add_option("--endpoint", options.endpoint,
                 "the daemon: unix:///path or host:port [MUOND_ENDPOINT]")
      ->type_name("ADDRESS");
  app.add_option("--run", options.run, "the run, needed where there are several [MUOND_RUN]")
      ->type_name("NAME");
  app.add_option("-o,--output", options.output, "table, json or csv [MUOND_OUTPUT]")
      ->type_name("FORMAT");
  app.add_option("--timeout", options.timeout, "of each call, as 5s [MUOND_TIMEOUT]")
      ->type_name("DURATION");
  app.add_option("--tls-cert", options.tls.certificate,
                 "your certificate (PEM), for daemons that ask for one [MUOND_TLS_CERT]")
      ->type_name("FILE");
  app.add_option("--tls-key", options.tls.key, "its private key [MUOND_TLS_KEY]")
      ->type_name("FILE");
  app.add_option("--tls-ca", options.tls.authority, "the authority's certificates [MUOND_TLS_CA]")
      ->type_name("FILE");
  app.add_option("--tls-server-name", options.tls.server_name,
                 "name in the daemon's certificate, where it is not the host "
                 "[MUOND_TLS_SERVER_NAME]")
      ->type_name("NAME");
}

// The environment first; parsing the flags then overwrites.
GlobalOptions FromEnvironment(const MuonctlHost& host) {
  GlobalOptions options;
  options.endpoint = Lookup(host, "MUOND_ENDPOINT");
  options.run = Lookup(host, "MUOND_RUN");
  options.tls = {.certificate = Lookup(host, "MUOND_TLS_CERT"),
                 .key = Lookup(host, "MUOND_TLS_KEY"),
                 .authority = Lookup(host, "MUOND_TLS_CA"),
                 .server_name = Lookup(host, "MUOND_TLS_SERVER_NAME")};
  if (const std::string value = Lookup(host, "MUOND_OUTPUT"); !value.empty()) {
    options.output = value;
  }
  if (const std::string value = Lookup(host, "MUOND_TIMEOUT"); !value.empty()) {
    options.timeout = value;
  }
  return options;
}

int UsageError(const MuonctlHost& host, const std::string& message) {
  host.err << "muonctl: " << message << " (see muonctl --help)\n";
  return kUsage;
}

std::string Explain(const absl::Status& status, const std::string& verb,
                    const std::string& endpoint, const std::string& timeout) {
  const std::string message(status.message());
  if (absl::IsUnavailable(status)) {
    return absl::StrFormat(
        "muonctl: %s: no daemon answers at \"%s\": %s; is muond running there? Name another with "
        "--endpoint or MUOND_ENDPOINT\n",
        verb, endpoint, message);
  }
  if (absl::IsDeadlineExceeded(status)) {
    return absl::StrFormat(
        "muonctl: %s: the daemon at \"%s\" did not answer within %s: %s; --timeout waits longer\n",
        verb, endpoint, timeout, message);
  }
  return absl::StrFormat("muonctl: %s: %s\n", verb, message);
}

int Run(const std::string& verb, const VerbBody& body, const GlobalOptions& options,
        const MuonctlHost& host) {
  Output output = Output::kTable;
  if (options.output == "json") {
    output = Output::kJson;
  } else if (options.output == "csv") {
    output = Output::kCsv;
  } else if (options.output != "table") {
    return UsageError(host, absl::StrFormat("output \"%s\": expected table, json or csv",
                                            options.output));
  }
  absl::Duration timeout;
  if (!absl::ParseDuration(options.timeout, &timeout) || timeout <= absl::ZeroDuration() ||
      timeout > absl::Hours(24)) {
    return UsageError(host, absl::StrFormat("timeout \"%s\": expected a duration, as 500ms or 5s",
                                            options.timeout));
  }
  const std::string endpoint = options.endpoint.empty() ? DefaultEndpoint() : options.endpoint;
  client::Admin admin = host.channel != nullptr ? client::Admin(host.channel, timeout)
                                                : client::Admin(endpoint, timeout, options.tls);
  const bool plain = !Lookup(host, "NO_COLOR").empty() || Lookup(host, "TERM") == "dumb";
  VerbContext context{.admin = admin,
                      .endpoint = endpoint,
                      .run = options.run,
                      .output = output,
                      .color = host.terminal && !plain,
                      .terminal = host.terminal,
                      .timeout = timeout,
                      .out = host.out};
  const absl::StatusOr<ExitCode> code = body(context);
  if (code.ok()) return *code;
  host.err << Explain(code.status(), verb, endpoint, options.timeout);
  return kError;
}

}  // namespace

std::string DefaultEndpoint() {
  constexpr char kSocket[] = "/run/muond/muond.sock";
  return access(kSocket, R_OK | W_OK) == 0 ? absl::StrFormat("unix://%s", kSocket)
                                           : "127.0.0.1:7070";
}

int RunMuonctl(const std::vector<std::string>& arguments, const MuonctlHost& host) {
  CLI::App app("muonctl - asks a muond daemon what its optimizer is doing", "muonctl");
  app.set_version_flag("--version", "muonctl " + ClientVersion());
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();  // global options may follow the verb
  GlobalOptions options = FromEnvironment(host);
  AddGlobalOptions(app, options);
  std::map<std::string, VerbBody> bodies;
  for (const Verb& verb : AllVerbs()) {
    bodies[verb.name] = verb.attach(*app.add_subcommand(verb.name, verb.help));
  }
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::Success& success) {  // --help, --version
    app.exit(success, host.out, host.err);
    return kOk;
  } catch (const CLI::ParseError& error) {
    return UsageError(host, error.what());
  }
  const std::string verb = app.get_subcommands().front()->get_name();
  return Run(verb, bodies.at(verb), options, host);
}

}  // namespace muond::cli
