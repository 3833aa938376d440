#include "client/cli/doctor.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/format.h"

namespace muond::cli {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
// A container's default of 64 MiB is too little for what trainers keep there.
constexpr std::int64_t kShmWanted = 1024 * kMiB;
constexpr std::int64_t kMemlockWanted = 64 * kMiB;
constexpr std::int64_t kOpenFilesWanted = 4096;
constexpr std::int64_t kFreeWanted = 1024 * kMiB;

Finding Pass(const char* check, std::string found) {
  return {check, Grade::kPass, std::move(found), ""};
}

Finding Daemon(const DoctorFacts& facts) {
  if (facts.answers) {
    return Pass("daemon", absl::StrFormat("%s at \"%s\", backend %s", facts.daemon_version,
                                          facts.endpoint, facts.backend));
  }
  return {"daemon", Grade::kFail,
          absl::StrFormat("none answers at \"%s\": %s", facts.endpoint, facts.refusal),
          "start muond, or name another with --endpoint"};
}

Finding Versions(const DoctorFacts& facts) {
  if (!facts.answers) {
    return {"versions", Grade::kWarn, "not known without a daemon", "see daemon"};
  }
  if (!facts.other_versions.empty()) {
    return {"versions", Grade::kFail,
            absl::StrFormat("this daemon is %s, others of its runs are %s", facts.daemon_version,
                            absl::StrJoin(facts.other_versions, ", ")),
            "install one version everywhere: results of different builds may differ"};
  }
  if (!facts.unreachable_peer.empty()) {
    return {"versions", Grade::kWarn,
            absl::StrFormat("daemon \"%s\" of the run does not answer from here",
                            facts.unreachable_peer),
            "run doctor where its peers can be reached"};
  }
  if (facts.daemon_version == facts.client_version) {
    return Pass("versions", "muonctl and muond are both " + facts.client_version);
  }
  return {"versions", Grade::kWarn,
          absl::StrFormat("muonctl is %s, muond %s", facts.client_version, facts.daemon_version),
          "install muonctl of the daemon's version"};
}

Finding Socket(const DoctorFacts& facts) {
  if (!facts.socket) return Pass("socket", "the endpoint is TCP");
  if (!facts.socket_exists) {
    return {"socket", Grade::kFail, "the socket file is not there",
            "start muond, or look at its setting `listen`"};
  }
  if (!facts.socket_usable) {
    return {"socket", Grade::kFail, "this user may not use the socket",
            "join the socket's group, or ask as the daemon's user"};
  }
  return Pass("socket", "there, and this user may use it");
}

Finding Arena(const DoctorFacts& facts) {
  if (!facts.socket) return Pass("arena", "asked for at unix sockets only");
  if (!facts.socket_exists) return Pass("arena", "not known without the socket");
  if (!facts.arena_exists) {
    return {"arena", Grade::kWarn, "the daemon hands no shared memory over; data goes by gRPC",
            "set max-arena-bytes above 0; the daemon's log says what else is in the way"};
  }
  if (!facts.arena_usable) {
    return {"arena", Grade::kWarn, "this user may not use the arena socket; data goes by gRPC",
            "join the group of the socket that ends in .arena"};
  }
  return Pass("arena", "its socket is there, and this user may use it");
}

// Whoever renews certificates does so earlier: by then something is wrong with the renewal.
absl::Duration WantedToBeLeft(const CertificateFacts& certificate) {
  return std::min(absl::Hours(14 * 24), (certificate.not_after - certificate.not_before) / 10);
}

Finding Tls(const char* check, const std::optional<absl::StatusOr<CertificateFacts>>& files,
            absl::Time now, const char* without) {
  if (!files) return Pass(check, without);
  if (absl::IsNotFound(files->status())) {
    return {check, Grade::kWarn, std::string(files->status().message()),
            "mend the path, or ask as a user who may read it"};
  }
  if (!files->ok()) {
    return {check, Grade::kFail, std::string(files->status().message()),
            "get a certificate that fits; programs look for new files every tls-refresh"};
  }
  const CertificateFacts& certificate = **files;
  const absl::Duration left = certificate.not_after - now;
  const std::string found = absl::StrFormat(
      "\"%s\" is valid until %s", certificate.subject,
      absl::FormatTime("%Y-%m-%d %H:%M UTC", certificate.not_after, absl::UTCTimeZone()));
  if (left >= WantedToBeLeft(certificate)) return Pass(check, found);
  return {check, Grade::kWarn, found, "renew it: connections made after that time fail"};
}

Finding Ports(const DoctorFacts& facts) {
  if (!facts.default_port_free && !facts.answers) {
    return {"ports", Grade::kWarn, "127.0.0.1:7070 is taken and no muond answers at the endpoint",
            "see who listens (ss -ltnp), or choose another port with --listen"};
  }
  if (!facts.metrics_port_free && facts.metrics_answer == false) {
    return {"ports", Grade::kWarn, "127.0.0.1:9470 is taken by something else than muond's metrics",
            "choose another port with --metrics-address"};
  }
  return Pass("ports", facts.metrics_answer == true ? "metrics answer at 127.0.0.1:9470"
                                                    : "7070 and 9470 are free or muond's");
}

Finding Driver(const DoctorFacts& facts) {
  if (facts.driver) return Pass("driver", "NVIDIA " + *facts.driver);
  if (facts.backend == "cuda" || facts.gpus > 0) {
    return {"driver", Grade::kFail, "NVIDIA's kernel module is not loaded",
            "install the driver, or load it: modprobe nvidia"};
  }
  return Pass("driver", "no NVIDIA driver; the cpu backend needs none");
}

Finding Gpu(const DoctorFacts& facts) {
  if (facts.gpus == 0) {
    if (!facts.driver) return Pass("gpu", "none; the cpu backend needs none");
    return {"gpu", Grade::kWarn, "a driver, but no device file /dev/nvidia0",
            "in a container: pass the devices in (--gpus all)"};
  }
  if (facts.ecc_errors.value_or(0) > 0) {
    return {"gpu", Grade::kFail, absl::StrFormat("%d uncorrected memory errors", *facts.ecc_errors),
            "take the machine out; its results are not to be trusted"};
  }
  if (facts.gpu_list && facts.gpu_list->empty()) {
    return {"gpu", Grade::kFail, "nvidia-smi fails", "run nvidia-smi and follow its message"};
  }
  return Pass("gpu", facts.gpu_list ? *facts.gpu_list
                                    : absl::StrFormat("%d device files", facts.gpus));
}

Finding P2p(const DoctorFacts& facts) {
  if (facts.gpus < 2) return Pass("p2p", "fewer than two GPUs");
  if (!facts.p2p_missing) {
    return {"p2p", Grade::kWarn, "nvidia-smi topo does not tell", "run nvidia-smi topo -p2p r"};
  }
  if (*facts.p2p_missing > 0) {
    return {"p2p", Grade::kWarn,
            absl::StrFormat("%d pairs of GPUs can't read each other", *facts.p2p_missing),
            "transfers between them go through the host; look at IOMMU and ACS settings"};
  }
  return Pass("p2p", "all pairs of GPUs read each other");
}

Finding Memlock(const DoctorFacts& facts) {
  if (facts.memlock_bytes < 0) return Pass("memlock", "unlimited");
  if (facts.memlock_bytes >= kMemlockWanted) {
    return Pass("memlock", FormatBytes(facts.memlock_bytes));
  }
  return {"memlock", Grade::kWarn, FormatBytes(facts.memlock_bytes) + " may be locked",
          "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited: pinned staging needs it"};
}

Finding Shm(const DoctorFacts& facts) {
  if (!facts.shm_bytes) {
    return {"/dev/shm", Grade::kWarn, "is not mounted",
            "mount a tmpfs there: NCCL and data loaders of trainers need it"};
  }
  const std::string found = absl::StrFormat("%s, %s free", FormatBytes(*facts.shm_bytes),
                                            FormatBytes(facts.shm_free_bytes.value_or(0)));
  if (facts.shm_free_bytes.value_or(0) >= kShmWanted) return Pass("/dev/shm", found);
  return {"/dev/shm", Grade::kWarn, found,
          "in a container: --shm-size=8g, or a volume with medium: Memory"};
}

Finding OpenFiles(const DoctorFacts& facts) {
  const std::string found = absl::StrFormat("%d", facts.open_files_max);
  if (facts.open_files_max >= kOpenFilesWanted) return Pass("open files", found);
  return {"open files", Grade::kWarn, found, "LimitNOFILE=65536 in the unit, or ulimit -n 65536"};
}

Finding Memory(const DoctorFacts& facts) {
  if (!facts.free_bytes) return {"memory", Grade::kWarn, "/proc/meminfo does not tell", ""};
  const std::string found = FormatBytes(*facts.free_bytes) + " available";
  if (*facts.free_bytes >= kFreeWanted) return Pass("memory", found);
  return {"memory", Grade::kWarn, found, "muonctl plan says what a model needs"};
}

Finding Clock(const DoctorFacts& facts) {
  if (facts.clock_synchronized == true) return Pass("clock", "synchronized");
  return {"clock", Grade::kWarn,
          facts.clock_synchronized ? "not synchronized" : "the kernel does not tell",
          "start chrony or systemd-timesyncd: alerts and traces compare machines' clocks"};
}

}  // namespace

const char* GradeName(Grade grade) {
  return grade == Grade::kPass ? "PASS" : grade == Grade::kWarn ? "WARN" : "FAIL";
}

std::vector<Finding> Judge(const DoctorFacts& facts) {
  return {Daemon(facts), Versions(facts), Socket(facts), Arena(facts), Ports(facts),
          Driver(facts), Gpu(facts), P2p(facts), Memlock(facts), Shm(facts), OpenFiles(facts),
          Memory(facts), Clock(facts),
          Tls("tls", facts.tls, facts.now, "muonctl is given no certificate"),
          Tls("daemon tls", facts.daemon_tls, facts.now,
              facts.socket ? "the daemon is given no certificate"
                           : "asked for at unix sockets only")};
}

}  // namespace muond::cli
