// The text: which characters there are, and which books are for training and which for validation.
//
// The file has one verse a line, as the Debian package bible-kjv prints them: book, chapter and
// verse ("Ge1:1", "1Sm3:10"), a space, the words. Whole books are held out, so that no half of a
// passage helps to guess the other half.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace muond::char_lm {

// One byte for each character: its index in the vocabulary.
using Tokens = std::vector<std::uint8_t>;

struct Corpus {
  std::string vocabulary;  // sorted characters of the whole text
  Tokens train;            // verses in file order, each ended by a newline
  Tokens validation;
  std::vector<std::string> train_books;
  std::vector<std::string> validation_books;  // in file order
  std::int64_t verses = 0;
};

// INVALID_ARGUMENT naming line or book: a line without a verse's address, a held-out book that is
// not there, no book left for training.
absl::StatusOr<Corpus> ParseCorpus(const std::string& text,
                                   const std::vector<std::string>& held_out);

// Of a file; NOT_FOUND when it cannot be read.
absl::StatusOr<Corpus> ReadCorpus(const std::string& path,
                                  const std::vector<std::string>& held_out);

}  // namespace muond::char_lm
