#include "server/metrics/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>

#include "server/metrics/metric_table.h"

namespace muond {
namespace {

// Fields of /proc/self/stat that follow the parenthesized command name (proc(5)); the first of them
// is number 3, the state.
struct ProcessStat {
  double cpu_ticks = 0;
  double start_ticks = 0;  // since boot
  double virtual_bytes = 0;
  double resident_pages = 0;
};

std::optional<ProcessStat> ReadStat() {
  std::ifstream file("/proc/self/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name_end = text.rfind(')');  // the name itself may hold spaces and parentheses
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(name_end + 1));
  std::vector<std::string> values(std::istream_iterator<std::string>(fields), {});
  if (values.size() < 22) return std::nullopt;
  const auto field = [&values](int number) { return std::stod(values[number - 3]); };
  return ProcessStat{.cpu_ticks = field(14) + field(15),
                     .start_ticks = field(22),
                     .virtual_bytes = field(23),
                     .resident_pages = field(24)};
}

// Unix time of the boot; empty where /proc/stat hides it.
std::optional<double> BootTime() {
  std::ifstream file("/proc/stat");
  std::string key;
  double value = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    if (fields >> key >> value && key == "btime") return value;
  }
  return std::nullopt;
}

std::optional<double> OpenFds() {
  std::error_code error;
  std::filesystem::directory_iterator entries("/proc/self/fd", error);
  if (error) return std::nullopt;
  // One of them is the iterator's own.
  return static_cast<double>(std::distance(begin(entries), end(entries)) - 1);
}

void Append(MetricId id, double value, std::vector<prometheus::MetricFamily>& families) {
  const MetricRow& row = RowOf(id);
  prometheus::MetricFamily family;
  family.name = row.name;
  family.help = row.help;
  prometheus::ClientMetric metric;
  if (row.type == MetricType::kCounter) {
    family.type = prometheus::MetricType::Counter;
    metric.counter.value = value;
  } else {
    family.type = prometheus::MetricType::Gauge;
    metric.gauge.value = value;
  }
  family.metric.push_back(std::move(metric));
  families.push_back(std::move(family));
}

}  // namespace

std::vector<prometheus::MetricFamily> CollectProcessMetrics() {
  std::vector<prometheus::MetricFamily> families;
  if (const auto stat = ReadStat()) {
    const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    if (const auto boot = BootTime()) {
      Append(MetricId::kProcessStartTime, *boot + stat->start_ticks / ticks, families);
    }
    Append(MetricId::kProcessCpu, stat->cpu_ticks / ticks, families);
    Append(MetricId::kProcessResidentMemory,
           stat->resident_pages * static_cast<double>(sysconf(_SC_PAGESIZE)), families);
    Append(MetricId::kProcessVirtualMemory, stat->virtual_bytes, families);
  }
  if (const auto fds = OpenFds()) Append(MetricId::kProcessOpenFds, *fds, families);
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    Append(MetricId::kProcessMaxFds, static_cast<double>(limit.rlim_cur), families);
  }
  return families;
}

}  // namespace muond
