// A small table for terminals: columns as wide as their widest cell, numbers to the right.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace muond::cli {

enum class Align : std::uint8_t { kLeft, kRight };
enum class Color : std::uint8_t { kNone, kGood, kBad };  // green, red

struct Cell {
  std::string text;
  Color color = Color::kNone;
};

// `text` in its colour when `enabled`, else as it is.
std::string Paint(const std::string& text, Color color, bool enabled);

class TextTable {
 public:
  // A column with heading `name`; numbers are aligned to the right, text to the left.
  void AddColumn(std::string name, Align align);
  // One cell for each column.
  void AddRow(std::vector<Cell> cells);

  // Headings, then a line for each row. Two blanks between columns, none at the end of a line.
  std::string Render(bool color) const;
  // As comma-separated values (RFC 4180 but for line ends), headings in lower case with
  // underscores.
  std::string Csv() const;

 private:
  std::vector<std::string> names_;
  std::vector<Align> aligns_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace muond::cli
