#include "server/daemon/config_settings.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <numeric>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace muond {
namespace {

using Values = std::vector<std::string>;

absl::Status Expected(std::string_view what, const Values& values) {
  std::string got;
  for (const std::string& value : values) {
    got += absl::StrFormat("%s\"%s\"", got.empty() ? "" : ", ", value);
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("expected %s, got %s", what, got.empty() ? "nothing" : got));
}

template <typename Integer>
bool ParseInteger(std::string_view text, Integer& result) {
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), result);
  return error == std::errc() && rest == text.data() + text.size() && !text.empty();
}

struct ByteUnit {
  std::string_view suffix;
  std::int64_t bytes;
};
constexpr ByteUnit kByteUnits[] = {{"TiB", std::int64_t{1} << 40},
                                   {"GiB", std::int64_t{1} << 30},
                                   {"MiB", std::int64_t{1} << 20},
                                   {"KiB", std::int64_t{1} << 10}};

bool ParseBytes(std::string_view text, std::int64_t& result) {
  std::int64_t unit_bytes = 1;
  for (const ByteUnit& unit : kByteUnits) {
    if (!text.ends_with(unit.suffix)) continue;
    text.remove_suffix(unit.suffix.size());
    unit_bytes = unit.bytes;
    break;
  }
  if (!ParseInteger(text, result) || result < 0) return false;
  if (result > std::numeric_limits<std::int64_t>::max() / unit_bytes) return false;
  result *= unit_bytes;
  return true;
}

std::string PrintBytes(std::int64_t bytes) {
  for (const ByteUnit& unit : kByteUnits) {
    if (bytes > 0 && bytes % unit.bytes == 0) {
      return absl::StrFormat("%d%s", bytes / unit.bytes, unit.suffix);
    }
  }
  return absl::StrFormat("%d", bytes);
}

// ---- A row for each kind of field. `field` maps Config& to a reference to the field. ------------

template <typename Field>
Setting Text(std::string_view name, std::string_view placeholder, std::string_view help,
             Field field) {
  return {name,
          SettingKind::kText,
          placeholder,
          help,
          [field](Config& config, const Values& values) {
            if (values.size() != 1) return Expected("one value", values);
            field(config) = values[0];
            return absl::OkStatus();
          },
          [field](const Config& config) { return Values{field(config)}; }};
}

template <typename Field>
Setting List(std::string_view name, std::string_view placeholder, std::string_view help,
             Field field) {
  return {name,
          SettingKind::kList,
          placeholder,
          help,
          [field](Config& config, const Values& values) {
            if (std::find(values.begin(), values.end(), "") != values.end()) {
              return Expected("no empty entry", values);
            }
            field(config) = values;
            return absl::OkStatus();
          },
          [field](const Config& config) { return field(config); }};
}

template <typename Field>
Setting Switch(std::string_view name, std::string_view help, Field field) {
  return {name,
          SettingKind::kSwitch,
          "",
          help,
          [field](Config& config, const Values& values) {
            if (values.size() != 1 || (values[0] != "true" && values[0] != "false")) {
              return Expected("true or false", values);
            }
            field(config) = values[0] == "true";
            return absl::OkStatus();
          },
          [field](const Config& config) { return Values{field(config) ? "true" : "false"}; }};
}

template <typename Field>
Setting Integer(std::string_view name, std::string_view help, Field field) {
  return {name,
          SettingKind::kInteger,
          "N",
          help,
          [field](Config& config, const Values& values) {
            if (values.size() != 1 || !ParseInteger(values[0], field(config))) {
              return Expected("a whole number", values);
            }
            return absl::OkStatus();
          },
          [field](const Config& config) { return Values{absl::StrFormat("%d", field(config))}; }};
}

template <typename Field>
Setting Bytes(std::string_view name, std::string_view help, Field field) {
  return {name,
          SettingKind::kBytes,
          "BYTES",
          help,
          [field](Config& config, const Values& values) {
            if (values.size() != 1 || !ParseBytes(values[0], field(config))) {
              return Expected("bytes, as 1048576, 512KiB, 4MiB or 2GiB", values);
            }
            return absl::OkStatus();
          },
          [field](const Config& config) { return Values{PrintBytes(field(config))}; }};
}

template <typename Field>
Setting Duration(std::string_view name, std::string_view help, Field field) {
  return {name,
          SettingKind::kDuration,
          "DURATION",
          help,
          [field](Config& config, const Values& values) {
            absl::Duration parsed;
            if (values.size() != 1 || !absl::ParseDuration(values[0], &parsed) ||
                parsed == absl::InfiniteDuration() || parsed < absl::ZeroDuration()) {
              return Expected("a duration, as 500ms, 90s or 2m", values);
            }
            field(config) = parsed;
            return absl::OkStatus();
          },
          [field](const Config& config) { return Values{absl::FormatDuration(field(config))}; }};
}

// A generic lambda, so that one expression serves Config& and const Config&.
#define MUOND_FIELD(path) \
  [](auto& config) -> auto& { return config.path; }

// Who gets in, what computes, who else there is.
std::vector<Setting> ListenSettings() {
  return {
      List("listen", "ADDRESS",
           "where trainers connect: unix:///path or host:port, several separated by commas",
           MUOND_FIELD(service.listen)),
      List("socket-users", "NAME",
           "who may use the unix sockets beside the daemon's user and root: users by name or "
           "number, groups as @name; several separated by commas",
           MUOND_FIELD(service.socket_users)),
      Switch("insecure", "allow plain TCP beyond loopback", MUOND_FIELD(insecure)),
      Text("tls-cert", "FILE", "this daemon's certificate (PEM): TCP then asks each caller for one",
           MUOND_FIELD(service.tls_cert)),
      Text("tls-key", "FILE", "its private key (PEM)", MUOND_FIELD(service.tls_key)),
      Text("tls-ca", "FILE", "certificates of the authority (PEM) that callers' must be signed by",
           MUOND_FIELD(service.tls_ca)),
      Text("tls-server-name", "NAME", "name in the daemons' certificates; empty: the host called",
           MUOND_FIELD(service.tls_server_name)),
      Duration("tls-refresh", "how often these files are looked at for new ones",
               MUOND_FIELD(service.tls_refresh)),
      Text("health-address", "ADDRESS",
           "host:port of plain gRPC health, and nothing else, for probes; none: off",
           MUOND_FIELD(service.health_address)),
      Switch("reflection", "tell callers the protocol (grpc.reflection), for tools like grpcurl",
             MUOND_FIELD(service.reflection)),
      Text("metrics-address", "ADDRESS", "host:port of /metrics, /healthz, /readyz; none: off",
           MUOND_FIELD(service.metrics_address)),
      Text("backend", "NAME", "what computes: cuda, cpu, reference; auto: cuda where there is one",
           MUOND_FIELD(service.backend)),
      List("devices", "LIST",
           "GPUs of backend cuda: all, or numbers and UUIDs as nvidia-smi -L says",
           MUOND_FIELD(service.devices)),
      Text("cpu-products", "TYPE", "what the cpu backend multiplies in: auto, f32 or bf16",
           MUOND_FIELD(service.cpu_products)),
      Integer("threads", "threads of the backend; 0: one per core", MUOND_FIELD(service.threads)),
      Text("peers", "LIST",
           "daemons that share each run, this one too: a:7070,b:7070, dns:///name:7070 or @file",
           MUOND_FIELD(service.peers)),
      Text("advertise", "ADDRESS", "this daemon's own entry among the peers",
           MUOND_FIELD(service.advertise)),
      Integer("peers-expected", "how many addresses a DNS name of peers must have",
              MUOND_FIELD(service.peers_expected)),
      Duration("peer-patience", "how long a peer may be out of reach before callers are told",
               MUOND_FIELD(service.peer_patience)),
  };
}

// What outlives the daemon, and how a step is made.
std::vector<Setting> StateSettings() {
  return {
      Text("checkpoint-dir", "PATH", "where runs are saved, shared by all daemons; none: nowhere",
           MUOND_FIELD(service.checkpoint_dir)),
      Integer("checkpoint-every-steps", "save after so many steps; 0: not by steps",
              MUOND_FIELD(service.checkpoint_every_steps)),
      Duration("checkpoint-every", "save after so long, if steps were taken; 0s: not by time",
               MUOND_FIELD(service.checkpoint_every)),
      Integer("checkpoint-keep", "checkpoints of a run that are kept",
              MUOND_FIELD(service.checkpoint_keep)),
      Integer("buddy-steps",
              "each daemon holds the one before it, by a snapshot and gradients of at most so "
              "many steps; 0: no buddies",
              MUOND_FIELD(service.buddy_steps)),
      Text("restore", "WHICH", "what a run without its state goes on from: latest, a step, none",
           MUOND_FIELD(service.restore)),
      Text("state-dir", "DIRECTORY",
           "where the generation of each run is kept over restarts; none: nowhere",
           MUOND_FIELD(service.state_dir)),
      Switch("overlap", "orthogonalize while gradients still arrive; takes more scratch memory",
             MUOND_FIELD(service.overlap)),
  };
}

// How much, how long, and what is told.
std::vector<Setting> LimitSettings() {
  return {
      Duration("step-deadline", "longest wait of a Finish for the other ranks",
               MUOND_FIELD(service.step_deadline)),
      Duration("drain-grace", "time that running calls get at SIGTERM", MUOND_FIELD(drain_grace)),
      Bytes("max-chunk-bytes", "largest payload of one message",
            MUOND_FIELD(service.max_chunk_bytes)),
      Bytes("max-arena-bytes", "most memory shared with trainers, all together; 0: none is shared",
            MUOND_FIELD(service.max_arena_bytes)),
      Integer("max-arenas", "most trainers that share memory with the daemon at a time",
              MUOND_FIELD(service.max_arenas)),
      Text("nccl", "WHICH", "NCCL with trainers on other GPUs: auto (where it is found) or off",
           MUOND_FIELD(service.nccl)),
      Text("nccl-library", "FILE", "the NCCL library; empty: libnccl.so.2, as the loader finds it",
           MUOND_FIELD(service.nccl_library)),
      Duration("nccl-deadline", "how long a trainer may not join a pair, or an exchange not end",
               MUOND_FIELD(service.nccl_deadline)),
      Bytes("max-tensor-bytes", "largest parameter, in fp32",
            MUOND_FIELD(service.max_tensor_bytes)),
      Bytes("max-run-bytes", "most memory of one run; 0: what the machine has free",
            MUOND_FIELD(service.max_run_bytes)),
      Integer("max-parameters", "most parameters of one run", MUOND_FIELD(service.max_parameters)),
      Integer("max-runs", "most runs at a time", MUOND_FIELD(service.max_runs)),
      Integer("max-world-size", "most trainer ranks of one run",
              MUOND_FIELD(service.max_world_size)),
      Integer("diagnostics-every", "steps between samples of the costly diagnostics; 0: none",
              MUOND_FIELD(service.diagnostics_every)),
      Integer("log-every", "steps between a run's summary lines in the log; 0: none",
              MUOND_FIELD(service.summary_every)),
      Text("log-level", "LEVEL", "debug, info, warning or error", MUOND_FIELD(log_level)),
      Text("log-format", "FORMAT", "text, or json: one object per line", MUOND_FIELD(log_format)),
      Text("fault-points", "LIST", "faults to inject, name[:after[:count]],...; tests only",
           MUOND_FIELD(service.fault_points)),
  };
}

std::vector<Setting> MakeSettings() {
  std::vector<Setting> all;
  for (const auto& part : {ListenSettings(), StateSettings(), LimitSettings()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

#undef MUOND_FIELD

// Levenshtein distance.
std::size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row.back();
}

}  // namespace

std::string Setting::Flag() const { return absl::StrFormat("--%s", name); }

std::string Setting::Variable() const {
  const std::string upper = absl::AsciiStrToUpper(absl::string_view(name.data(), name.size()));
  return "MUOND_" + absl::StrReplaceAll(upper, {{"-", "_"}});
}

std::span<const Setting> AllSettings() {
  static const std::vector<Setting>& settings = *new std::vector<Setting>(MakeSettings());
  return settings;
}

const Setting* FindSetting(std::string_view name) {
  for (const Setting& setting : AllSettings()) {
    if (setting.name == name) return &setting;
  }
  return nullptr;
}

std::string DidYouMean(std::string_view name) {
  const Setting* closest = nullptr;
  std::size_t distance = 3;  // more typing errors than two are another word
  for (const Setting& setting : AllSettings()) {
    const std::size_t d = EditDistance(name, setting.name);
    if (d >= distance) continue;
    distance = d;
    closest = &setting;
  }
  return closest == nullptr ? "" : absl::StrFormat(" (did you mean \"%s\"?)", closest->name);
}

}  // namespace muond
