#include "client/cli/text_table.h"

#include "gtest/gtest.h"

namespace muond::cli {
namespace {

TEST(TextTable, AlignsNumbersRightAndTextLeft) {
  TextTable table;
  table.AddColumn("NAME", Align::kLeft);
  table.AddColumn("T", Align::kRight);
  table.AddColumn("WHY", Align::kLeft);
  table.AddRow({{"a"}, {"12345"}, {"x"}});
  table.AddRow({{"longer"}, {"6"}, {""}});
  EXPECT_EQ(table.Render(false),
            "NAME        T  WHY\n"
            "a       12345  x\n"
            "longer      6\n");
}

TEST(TextTable, ColorsDoNotCountAsWidth) {
  TextTable table;
  table.AddColumn("S", Align::kLeft);
  table.AddColumn("N", Align::kRight);
  table.AddRow({{"failed", Color::kBad}, {"1"}});
  table.AddRow({{"ok", Color::kGood}, {"10"}});
  EXPECT_EQ(table.Render(true),
            "S        N\n"
            "\x1b[31mfailed\x1b[0m   1\n"
            "\x1b[32mok\x1b[0m      10\n");
}

TEST(TextTable, CountsCharactersNotBytes) {
  TextTable table;
  table.AddColumn("A", Align::kLeft);
  table.AddColumn("B", Align::kLeft);
  table.AddRow({{"\xc3\xa9"}, {"x"}});
  EXPECT_EQ(table.Render(false), "A  B\n\xc3\xa9  x\n");
}

}  // namespace
}  // namespace muond::cli
