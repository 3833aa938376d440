#include "client/examples/char_lm/text/corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muond::char_lm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kText[] =
    "Ge1:1 In the\n"
    "Ge1:2 And 1:2\n"
    "1Sm12:3 Now\n"
    "\n"
    "Ruth1:1 Now it\n";

std::string Decode(const Corpus& corpus, const Tokens& tokens) {
  std::string text;
  for (const std::uint8_t token : tokens) text += corpus.vocabulary[token];
  return text;
}

TEST(Corpus, SplitsByWholeBooksAndLosesNoCharacter) {
  const auto corpus = ParseCorpus(kText, {"Ruth"});
  ASSERT_TRUE(corpus.ok()) << corpus.status();
  EXPECT_EQ(Decode(*corpus, corpus->train), "In the\nAnd 1:2\nNow\n");
  EXPECT_EQ(Decode(*corpus, corpus->validation), "Now it\n");
  EXPECT_THAT(corpus->train_books, ElementsAre("Ge", "1Sm"));
  EXPECT_THAT(corpus->validation_books, ElementsAre("Ruth"));
  EXPECT_EQ(corpus->verses, 4);
  EXPECT_TRUE(std::is_sorted(corpus->vocabulary.begin(), corpus->vocabulary.end()));
}

std::string Error(const std::string& text, const std::vector<std::string>& held_out) {
  return std::string(ParseCorpus(text, held_out).status().message());
}

TEST(Corpus, NamesTheLineThatIsNoVerse) {
  EXPECT_THAT(Error("Ge1:1 a\nno verse here\n", {}), HasSubstr("line 2: expected a verse"));
  for (const char* line : {"Ge:1 a", "Ge1: a", "Ge1 a", "1:1 a", "Ge1:1", "Ge1:x a"}) {
    EXPECT_THAT(Error(line, {}), HasSubstr("line 1: expected a verse")) << line;
  }
}

TEST(Corpus, NamesTheBookThatIsNotThereAndASplitWithoutTwoSides) {
  EXPECT_THAT(Error(kText, {"Mark"}), HasSubstr("\"Mark\" is not in it; the others are: Ge 1Sm"));
  EXPECT_THAT(Error(kText, {}), HasSubstr("3 books for training and 0 held out"));
  EXPECT_THAT(Error(kText, {"Ge", "1Sm", "Ruth"}), HasSubstr("0 books for training"));
}

TEST(Corpus, AFileThatCannotBeReadIsNamed) {
  const auto corpus = ReadCorpus("/no/such/file", {"Ruth"});
  EXPECT_TRUE(absl::IsNotFound(corpus.status()));
  EXPECT_THAT(std::string(corpus.status().message()), HasSubstr("/no/such/file"));
}

}  // namespace
}  // namespace muond::char_lm
