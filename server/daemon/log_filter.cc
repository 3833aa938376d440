#include "server/daemon/log_filter.h"

#include <cctype>
#include <charconv>

#include "absl/strings/str_format.h"

namespace muond {
namespace {

// More kinds than the source has messages: names vary. They are forgotten all at once.
constexpr std::size_t kKindsMax = 4096;

std::string KindOf(std::string_view message) {
  std::string kind;
  for (const char c : message) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (!digit) {
      kind += c;
    } else if (kind.empty() || kind.back() != '#') {
      kind += '#';
    }
  }
  return kind;
}

}  // namespace

LogFields LogFieldsOf(std::string_view message) {
  LogFields fields;
  constexpr std::string_view kRun = "run \"", kStep = "step ";
  if (const auto at = message.find(kRun); at != std::string_view::npos) {
    const std::string_view rest = message.substr(at + kRun.size());
    if (const auto end = rest.find('"'); end != std::string_view::npos) {
      fields.run = rest.substr(0, end);
    }
  }
  for (auto at = message.find(kStep); at != std::string_view::npos;
       at = message.find(kStep, at + 1)) {
    const char* first = message.data() + at + kStep.size();
    std::int64_t step = 0;
    const bool word = at == 0 || std::isalnum(static_cast<unsigned char>(message[at - 1])) == 0;
    if (!word) continue;
    if (std::from_chars(first, message.data() + message.size(), step).ec == std::errc()) {
      fields.step = step;
      break;
    }
  }
  return fields;
}

std::optional<std::string> LogFilter::Admit(std::string_view message, absl::Time now) {
  if (kinds_.size() >= kKindsMax) kinds_.clear();
  Kind& kind = kinds_[KindOf(message)];
  std::string text(message);
  if (now - kind.since >= kPeriod) {
    if (kind.left_out > 0) text += absl::StrFormat(" (%d more like it left out)", kind.left_out);
    kind = {.since = now};
  } else if (kind.written >= kBurst) {
    ++kind.left_out;
    return std::nullopt;
  }
  ++kind.written;
  return text;
}

}  // namespace muond
