#include "client/cli/text_table.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "proto/check.h"

namespace muond::cli {
namespace {

// Characters of UTF-8 text; names are ASCII, but reasons come from the daemon.
std::size_t Width(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
}

std::string CsvField(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted(1, '"');
  for (const char c : text) quoted.append(c == '"' ? 2 : 1, c);
  quoted.push_back('"');
  return quoted;
}

void TrimRight(std::string& line) { line.erase(line.find_last_not_of(' ') + 1); }

}  // namespace

std::string Paint(const std::string& text, Color color, bool enabled) {
  if (!enabled || color == Color::kNone) return text;
  return (color == Color::kGood ? "\x1b[32m" : "\x1b[31m") + text + "\x1b[0m";
}

void TextTable::AddColumn(std::string name, Align align) {
  names_.push_back(std::move(name));
  aligns_.push_back(align);
}

void TextTable::AddRow(std::vector<Cell> cells) {
  MUOND_CHECK(cells.size() == names_.size(), "one cell for each column");
  rows_.push_back(std::move(cells));
}

std::string TextTable::Csv() const {
  const auto line = [](const auto& cells, const auto& text_of) {
    std::string text;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (i > 0) text.push_back(',');
      text += CsvField(text_of(cells[i]));
    }
    text.push_back('\n');
    return text;
  };
  std::string text = line(names_, [](std::string name) {
    for (char& c : name) {
      const auto lower = std::tolower(static_cast<unsigned char>(c));
      c = c == ' ' || c == '-' ? '_' : static_cast<char>(lower);
    }
    return name;
  });
  for (const auto& row : rows_) text += line(row, [](const Cell& cell) { return cell.text; });
  return text;
}

std::string TextTable::Render(bool color) const {
  std::vector<std::size_t> widths;
  for (const std::string& name : names_) widths.push_back(Width(name));
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], Width(row[i].text));
    }
  }
  std::string text;
  const auto append = [&](const auto& text_of, const auto& painted) {
    std::string line;
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const std::string padding(widths[i] - Width(text_of(i)), ' ');
      if (i > 0) line += "  ";
      line += aligns_[i] == Align::kRight ? padding + painted(i) : painted(i) + padding;
    }
    TrimRight(line);
    text += line + "\n";
  };
  const auto name = [this](std::size_t i) { return names_[i]; };
  append(name, name);
  for (const auto& row : rows_) {
    append([&row](std::size_t i) { return row[i].text; },
           [&](std::size_t i) { return Paint(row[i].text, row[i].color, color); });
  }
  return text;
}

}  // namespace muond::cli
