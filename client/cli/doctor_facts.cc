// What the system says of itself.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "client/cli/doctor.h"

namespace muond::cli {
namespace {

constexpr int kServicePort = 7070, kMetricsPort = 9470;

// The output of a program that answers at once or is ended; empty where it fails.
std::optional<std::string> OutputOf(const std::string& command) {
  FILE* pipe = popen(("timeout 10 " + command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return std::nullopt;
  std::string text;
  char buffer[4096];
  while (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) text += buffer;
  return pclose(pipe) == 0 ? std::optional(text) : std::optional(std::string());
}

bool HasProgram(const char* name) {
  return std::system(("command -v " + std::string(name) + " >/dev/null 2>&1").c_str()) == 0;
}

// A connection to a port of this machine; -1: nobody listens.
int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  timeval patience{.tv_sec = 2, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

bool AnswersProbe(int fd) {
  const std::string request = "GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n";
  if (write(fd, request.data(), request.size()) != std::ssize(request)) return false;
  char reply[64] = {};
  const ssize_t size = read(fd, reply, sizeof(reply) - 1);
  return size > 0 && std::string(reply).find(" 200") != std::string::npos;
}

void AskGpus(DoctorFacts& facts) {
  if (std::ifstream file("/proc/driver/nvidia/version"); file) {
    for (std::string word; file >> word;) {
      if (word.find('.') != std::string::npos && std::isdigit(word[0]) != 0) {
        facts.driver = word;
        break;
      }
    }
    if (!facts.driver) facts.driver = "of unknown version";
  }
  while (std::filesystem::exists("/dev/nvidia" + std::to_string(facts.gpus))) ++facts.gpus;
  if (facts.gpus == 0 || !HasProgram("nvidia-smi")) return;
  facts.gpu_list = OutputOf("nvidia-smi --query-gpu=name --format=csv,noheader");
  if (facts.gpu_list) {
    for (char& c : *facts.gpu_list) c = c == '\n' ? ' ' : c;
  }
  if (const auto errors = OutputOf("nvidia-smi --query-gpu=ecc.errors.uncorrected.volatile.total "
                                   "--format=csv,noheader")) {
    std::istringstream lines(*errors);
    std::int64_t sum = 0;
    for (std::string line; std::getline(lines, line);) sum += std::atoll(line.c_str());
    facts.ecc_errors = sum;
  }
  if (facts.gpus < 2) return;
  const auto topology = OutputOf("nvidia-smi topo -p2p r");
  if (!topology || topology->empty()) return;
  std::int64_t missing = 0;
  std::istringstream lines(*topology);
  for (std::string line; std::getline(lines, line);) {
    if (line.find("GPU") == std::string::npos) continue;
    std::istringstream cells(line);
    for (std::string cell; cells >> cell;) missing += cell == "NS" || cell == "CNS" || cell == "U";
  }
  facts.p2p_missing = missing / 2;
}

void AskLimits(DoctorFacts& facts) {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    facts.memlock_bytes =
        limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<std::int64_t>(limit.rlim_cur);
  }
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    facts.open_files_max = static_cast<std::int64_t>(limit.rlim_cur);
  }
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0) {
    facts.shm_bytes = static_cast<std::int64_t>(shm.f_blocks * shm.f_frsize);
    facts.shm_free_bytes = static_cast<std::int64_t>(shm.f_bavail * shm.f_frsize);
  }
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("MemAvailable:")) {
      facts.free_bytes = std::atoll(line.c_str() + line.find_first_of("0123456789")) * 1024;
    }
  }
  timex clock{};
  if (const int state = adjtimex(&clock); state >= 0) {
    facts.clock_synchronized = state != TIME_ERROR && (clock.status & STA_UNSYNC) == 0;
  }
}

}  // namespace

DoctorFacts GatherMachineFacts() {
  DoctorFacts facts;
  AskGpus(facts);
  AskLimits(facts);
  if (const int fd = Connect(kServicePort); fd >= 0) {
    facts.default_port_free = false;
    close(fd);
  }
  if (const int fd = Connect(kMetricsPort); fd >= 0) {
    facts.metrics_port_free = false;
    facts.metrics_answer = AnswersProbe(fd);
    close(fd);
  }
  return facts;
}

}  // namespace muond::cli
