// What `muonctl doctor` checks: facts of this machine and its daemon, and what to think of them.
// Gathering asks the system; judging is pure, so that every verdict can be tested.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/tls.h"

namespace muond::cli {

enum class Grade : std::uint8_t { kPass, kWarn, kFail };
const char* GradeName(Grade grade);  // "PASS", "WARN", "FAIL"

struct Finding {
  std::string check;   // "memlock"
  Grade grade = Grade::kPass;
  std::string found;   // "64 KiB of locked memory are allowed"
  std::string remedy;  // empty when all is well
};

// Empty optionals: the system does not tell.
struct DoctorFacts {
  // The daemon.
  std::string endpoint;
  bool answers = false;
  std::string refusal;  // why not
  std::string daemon_version, client_version, backend;
  std::vector<std::string> other_versions;  // of the run's other daemons, where they differ
  std::string unreachable_peer;             // the first of them
  bool socket = false;                      // the endpoint is a unix socket
  bool socket_exists = false, socket_usable = false;
  bool arena_exists = false, arena_usable = false;  // the socket beside it that hands arenas over
  bool default_port_free = true, metrics_port_free = true;  // of 127.0.0.1:7070 and :9470
  std::optional<bool> metrics_answer;       // GET /healthz at the metrics port
  // What CheckTlsFiles says of muonctl's files, and of the daemon's where it runs on this machine.
  std::optional<absl::StatusOr<CertificateFacts>> tls, daemon_tls;  // empty: none are named
  absl::Time now;  // when they were looked at
  // The machine.
  std::optional<std::string> driver;        // of NVIDIA's kernel module
  int gpus = 0;                             // device files
  std::optional<std::string> gpu_list;      // what nvidia-smi says; empty: it failed
  std::optional<std::int64_t> p2p_missing;  // pairs of GPUs that can't read each other
  std::optional<std::int64_t> ecc_errors;   // uncorrected
  std::int64_t memlock_bytes = -1;          // -1: unlimited
  std::int64_t open_files_max = 0;
  std::optional<std::int64_t> shm_bytes, shm_free_bytes;  // of /dev/shm
  std::optional<std::int64_t> free_bytes;   // of memory
  std::optional<bool> clock_synchronized;
};

DoctorFacts GatherMachineFacts();
// One finding for each check, in a fixed order.
std::vector<Finding> Judge(const DoctorFacts& facts);

}  // namespace muond::cli
