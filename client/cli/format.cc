#include "client/cli/format.h"

#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "proto/values.h"

namespace muond::cli {
namespace {

// "RunState" -> "RUN_STATE_".
std::string PrefixOf(const std::string& enum_name) {
  std::string prefix;
  for (std::size_t i = 0; i < enum_name.size(); ++i) {
    if (i > 0 && absl::ascii_isupper(enum_name[i])) prefix += '_';
    prefix += absl::ascii_toupper(enum_name[i]);
  }
  return prefix + "_";
}

}  // namespace

std::string FormatBytes(std::int64_t bytes) {
  if (bytes < 1024) return absl::StrFormat("%d B", bytes);
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  // 1023.95 would print as 1024.0.
  for (value /= 1024; value >= 1023.95 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatNumber(double value) {
  const bool whole = value == std::floor(value) && std::abs(value) < 1e15;
  return whole ? absl::StrFormat("%.0f", value) : absl::StrFormat("%.4g", value);
}

std::string FormatSeconds(double seconds) {
  if (!(seconds >= 0) || seconds > 1e12) return FormatNumber(seconds) + "s";
  if (seconds < 10) return absl::StrFormat("%.2fs", seconds);
  const std::int64_t whole = static_cast<std::int64_t>(seconds);
  const std::int64_t minutes = whole / 60;
  const std::int64_t hours = minutes / 60;
  if (minutes == 0) return absl::StrFormat("%ds", whole);
  if (hours == 0) return absl::StrFormat("%dm%ds", minutes, whole % 60);
  if (hours < 24) return absl::StrFormat("%dh%dm", hours, minutes % 60);
  return absl::StrFormat("%dd%dh", hours / 24, hours % 24);
}

std::string FormatCount(std::int64_t count) { return absl::StrFormat("%d", count); }

std::string FormatShape(const v1::Parameter& parameter) {
  if (!parameter.has_shape()) return "?";
  const auto& dims = parameter.shape().dims();
  return DimsToString(Dims(dims.begin(), dims.end()));
}

std::string FormatMatrices(const v1::RoutedParameter& routed) {
  std::string text;
  for (const auto& view : routed.matrices()) {
    if (!text.empty()) text += " + ";
    if (view.count() != 1) text += absl::StrFormat("%d of ", view.count());
    text += absl::StrFormat("%dx%d", view.rows(), view.cols());
  }
  return text.empty() ? "-" : text;
}

std::string ShortEnumName(const google::protobuf::EnumValueDescriptor& value) {
  std::string name = value.name();
  const std::string prefix = PrefixOf(value.type()->name());
  if (name.starts_with(prefix)) name.erase(0, prefix.size());
  return absl::AsciiStrToLower(name);
}

}  // namespace muond::cli
