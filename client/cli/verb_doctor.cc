#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <ostream>
#include <utility>

#include "absl/time/clock.h"
#include "client/cli/doctor.h"
#include "client/cli/message_json.h"
#include "client/cli/text_table.h"
#include "client/cli/verb.h"
#include "proto/tls.h"

namespace muond::cli {
namespace {

constexpr char kUnixScheme[] = "unix:";

bool IsSocket(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode);
}

void AskSocket(DoctorFacts& facts) {
  facts.socket = facts.endpoint.starts_with(kUnixScheme);
  if (!facts.socket) return;
  std::string path = facts.endpoint.substr(sizeof(kUnixScheme) - 1);
  while (path.starts_with("//")) path.erase(0, 1);
  facts.socket_exists = IsSocket(path);
  facts.socket_usable = access(path.c_str(), R_OK | W_OK) == 0;
  const std::string arena = path + ".arena";
  facts.arena_exists = IsSocket(arena);
  facts.arena_usable = access(arena.c_str(), R_OK | W_OK) == 0;
}

// muonctl's own files: those of its flags, else of the environment.
TlsFiles OwnTlsFiles(const CLI::App& muonctl) {
  TlsFiles files = TlsFromEnvironment();
  for (const auto& [flag, field] : {std::pair{"--tls-cert", &TlsFiles::certificate},
                                    std::pair{"--tls-key", &TlsFiles::key},
                                    std::pair{"--tls-ca", &TlsFiles::authority}}) {
    const CLI::Option* option = muonctl.get_option(flag);
    if (option->count() > 0) files.*field = option->as<std::string>();
  }
  return files;
}

// The files that a daemon on this machine was given.
TlsFiles TlsFilesOf(const v1::SettingsReply& settings) {
  TlsFiles files;
  for (const v1::Setting& setting : settings.settings()) {
    const std::string value = setting.values_size() == 1 ? setting.values(0) : "";
    if (setting.name() == "tls-cert") files.certificate = value;
    if (setting.name() == "tls-key") files.key = value;
    if (setting.name() == "tls-ca") files.authority = value;
  }
  return files;
}

void AskTls(const CLI::App& muonctl, client::Admin& admin, DoctorFacts& facts) {
  facts.now = absl::Now();
  const TlsFiles own = OwnTlsFiles(muonctl);
  if (!own.empty()) facts.tls = CheckTlsFiles(own, facts.now);
  if (!facts.answers || !facts.socket) return;
  const auto settings = admin.Settings();
  if (!settings.ok()) return;
  const TlsFiles daemons = TlsFilesOf(*settings);
  if (!daemons.empty()) facts.daemon_tls = CheckTlsFiles(daemons, facts.now);
}

// The daemons of its runs, each once.
void AskPeers(const v1::StatusReply& status, absl::Duration timeout, DoctorFacts& facts) {
  std::vector<std::string> asked;
  for (const v1::RunStatus& run : status.runs()) {
    for (int i = 0; i < run.daemons_size(); ++i) {
      const std::string& address = run.daemons(i);
      if (i == run.daemon() || std::count(asked.begin(), asked.end(), address) > 0) continue;
      asked.push_back(address);
      const auto peer = client::Admin(address, timeout).Status();
      if (!peer.ok()) {
        if (facts.unreachable_peer.empty()) facts.unreachable_peer = address;
      } else if (peer->version() != status.version()) {
        facts.other_versions.push_back(peer->version());
      }
    }
  }
}

}  // namespace

VerbBody AttachDoctor(CLI::App& command) {
  command.footer("Exit code 3 when a check fails; warnings alone leave it 0.");
  return [&muonctl = *command.get_parent()](VerbContext& context) -> absl::StatusOr<ExitCode> {
    DoctorFacts facts = GatherMachineFacts();
    facts.endpoint = context.endpoint;
    facts.client_version = ClientVersion();
    AskSocket(facts);
    const auto status = context.admin.Status();
    facts.answers = status.ok();
    facts.refusal = std::string(status.status().message());
    if (status.ok()) {
      facts.daemon_version = status->version();
      facts.backend = status->backend();
      AskPeers(*status, context.timeout, facts);
    }
    AskTls(muonctl, context.admin, facts);
    const std::vector<Finding> findings = Judge(facts);
    TextTable table;
    for (const char* name : {"CHECK", "GRADE", "FOUND", "REMEDY"}) {
      table.AddColumn(name, Align::kLeft);
    }
    Json list = Json::array();
    bool failed = false;
    for (const Finding& finding : findings) {
      failed = failed || finding.grade == Grade::kFail;
      table.AddRow({{finding.check},
                    {GradeName(finding.grade),
                     finding.grade == Grade::kPass ? Color::kGood : Color::kBad},
                    {finding.found},
                    {finding.remedy}});
      list.push_back({{"check", finding.check},
                      {"grade", GradeName(finding.grade)},
                      {"found", finding.found},
                      {"remedy", finding.remedy}});
    }
    context.out << (context.output == Output::kJson  ? JsonText(list)
                    : context.output == Output::kCsv ? table.Csv()
                                                     : table.Render(context.color));
    return failed ? kUnhealthy : kOk;
  };
}

}  // namespace muond::cli
