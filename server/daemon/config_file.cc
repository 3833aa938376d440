#include "server/daemon/config_file.h"

#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond {
namespace {

bool IsKeyCharacter(char c) { return absl::ascii_isalnum(c) || c == '-' || c == '_'; }

class Reader {
 public:
  Reader(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  absl::StatusOr<std::vector<ConfigEntry>> Read() {
    std::vector<ConfigEntry> entries;
    std::map<std::string, int> lines;
    while (SkipToContent(), at_ < text_.size()) {
      MUOND_ASSIGN_OR_RETURN(ConfigEntry entry, ReadEntry());
      const auto [first, is_new] = lines.emplace(entry.key, entry.line);
      if (!is_new) {
        return Error(entry.line, absl::StrFormat("key \"%s\" was set in line %d already", entry.key,
                                                 first->second));
      }
      entries.push_back(std::move(entry));
    }
    return entries;
  }

 private:
  absl::Status Error(int line, const std::string& message) const {
    return absl::InvalidArgumentError(absl::StrFormat("%s:%d: %s", name_, line, message));
  }

  char Peek() const { return at_ < text_.size() ? text_[at_] : '\n'; }

  void SkipBlanks() {
    while (Peek() == ' ' || Peek() == '\t' || Peek() == '\r') ++at_;
    if (Peek() == '#') {
      while (Peek() != '\n') ++at_;
    }
  }

  // Over blanks, comments and line ends.
  void SkipToContent() {
    for (SkipBlanks(); at_ < text_.size() && text_[at_] == '\n'; SkipBlanks()) {
      ++at_;
      ++line_;
    }
  }

  absl::StatusOr<ConfigEntry> ReadEntry() {
    ConfigEntry entry{.line = line_};
    if (Peek() == '[') return Error(line_, "tables are not part of the format: write plain keys");
    while (IsKeyCharacter(Peek())) entry.key += text_[at_++];
    SkipBlanks();
    if (entry.key.empty() || Peek() != '=') {
      return Error(line_, absl::StrFormat("expected `key = value`%s",
                                          entry.key.empty() ? "" : " after \"" + entry.key + "\""));
    }
    ++at_;
    SkipBlanks();
    if (Peek() == '[') {
      entry.array = true;
      MUOND_RETURN_IF_ERROR(ReadArray(entry));
    } else {
      MUOND_ASSIGN_OR_RETURN(std::string value, ReadValue(entry.key));
      entry.values.push_back(std::move(value));
    }
    SkipBlanks();
    if (Peek() != '\n') {
      return Error(line_,
                   absl::StrFormat("key \"%s\": unexpected text after the value", entry.key));
    }
    return entry;
  }

  absl::Status ReadArray(ConfigEntry& entry) {
    ++at_;  // [
    while (true) {
      SkipToContent();
      if (Peek() == ']') break;
      if (at_ >= text_.size()) {
        return Error(entry.line, absl::StrFormat("key \"%s\": the array has no end", entry.key));
      }
      MUOND_ASSIGN_OR_RETURN(std::string value, ReadValue(entry.key));
      entry.values.push_back(std::move(value));
      SkipToContent();
      if (Peek() == ',') {
        ++at_;
      } else if (Peek() != ']') {
        return Error(line_, absl::StrFormat("key \"%s\": expected , or ] in the array", entry.key));
      }
    }
    ++at_;  // ]
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> ReadValue(const std::string& key) {
    if (Peek() == '"') return ReadString(key);
    std::string word;
    while (IsKeyCharacter(Peek()) || Peek() == '.') word += text_[at_++];
    const bool number = word.find_first_not_of("0123456789", word[0] == '-' ? 1 : 0) ==
                        std::string::npos;
    if (!word.empty() && (number || word == "true" || word == "false")) return word;
    return Error(line_, absl::StrFormat(
                            "key \"%s\": expected a number, true, false or a quoted string", key));
  }

  absl::StatusOr<std::string> ReadString(const std::string& key) {
    std::string value;
    for (++at_; Peek() != '"'; ++at_) {
      if (Peek() == '\n') {
        return Error(line_, absl::StrFormat("key \"%s\": the string has no closing quote", key));
      }
      if (Peek() == '\\') {
        ++at_;
        if (Peek() != '"' && Peek() != '\\') {
          return Error(line_,
                       absl::StrFormat("key \"%s\": a string knows \\\" and \\\\ only", key));
        }
      }
      value += text_[at_];
    }
    ++at_;
    return value;
  }

  std::string_view text_;
  const std::string& name_;
  std::size_t at_ = 0;
  int line_ = 1;
};

}  // namespace

absl::StatusOr<std::vector<ConfigEntry>> ParseConfigText(std::string_view text,
                                                         const std::string& name) {
  return Reader(text, name).Read();
}

std::string QuoteConfigValue(const std::string& value, bool bare) {
  if (bare) return value;
  std::string quoted = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "\"";
}

}  // namespace muond
