#include "client/examples/char_lm/progress.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_format.h"

namespace muond::char_lm {

Progress::Progress(std::string label, std::int64_t total, std::FILE* stream)
    : label_(std::move(label)), total_(total), stream_(stream),
      terminal_(isatty(fileno(stream)) != 0) {}

Progress::~Progress() {
  // The bar's place is given back to what is printed next.
  if (terminal_) absl::FPrintF(stream_, "\r\033[K");
  std::fflush(stream_);
}

void Progress::Update(std::int64_t done, const std::string& note) {
  const std::int64_t parts = terminal_ ? 100 : 20;
  const std::int64_t part = done * parts / total_;
  if (part <= shown_) return;
  shown_ = part;
  if (terminal_) {
    constexpr int kWidth = 30;
    const auto filled = static_cast<std::size_t>(done * kWidth / total_);
    absl::FPrintF(stream_, "\r%s [%s%s] %d/%d %s\033[K", label_, std::string(filled, '#'),
                  std::string(kWidth - filled, '.'), done, total_, note);
  } else {
    absl::FPrintF(stream_, "%s %d/%d %s\n", label_, done, total_, note);
  }
  std::fflush(stream_);
}

}  // namespace muond::char_lm
