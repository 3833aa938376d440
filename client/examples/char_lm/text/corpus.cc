#include "client/examples/char_lm/text/corpus.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"

namespace muond::char_lm {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// "1Sm3:10 And the ..." -> "1Sm" and where the words begin; an empty book when it is no verse.
struct Address {
  std::string book;
  std::size_t words = 0;
};

Address ParseAddress(std::string_view line) {
  const std::size_t space = line.find(' ');
  const std::size_t colon = line.find(':');
  if (space == std::string_view::npos || colon == std::string_view::npos || colon + 1 >= space) {
    return {};
  }
  std::size_t chapter = colon;
  while (chapter > 0 && IsDigit(line[chapter - 1])) --chapter;
  const bool numbers = chapter < colon && std::all_of(line.begin() + colon + 1,
                                                      line.begin() + space, IsDigit);
  if (!numbers) return {};
  return {std::string(line.substr(0, chapter)), space + 1};
}

// What the verses add up to, still as characters.
struct Books {
  std::vector<std::string> names;
  std::string text;
  void Add(const std::string& book, std::string_view words) {
    if (names.empty() || names.back() != book) names.push_back(book);
    text.append(words);
    text += '\n';
  }
};

std::string VocabularyOf(const std::string& a, const std::string& b) {
  std::set<char> characters(a.begin(), a.end());
  characters.insert(b.begin(), b.end());
  return std::string(characters.begin(), characters.end());
}

Tokens Encode(const std::string& text, const std::string& vocabulary) {
  std::array<std::uint8_t, 256> index{};
  for (std::size_t i = 0; i < vocabulary.size(); ++i) {
    index[static_cast<std::uint8_t>(vocabulary[i])] = static_cast<std::uint8_t>(i);
  }
  Tokens tokens(text.size());
  std::transform(text.begin(), text.end(), tokens.begin(),
                 [&index](char c) { return index[static_cast<std::uint8_t>(c)]; });
  return tokens;
}

}  // namespace

absl::StatusOr<Corpus> ParseCorpus(const std::string& text,
                                   const std::vector<std::string>& held_out) {
  Corpus corpus;
  Books train, validation;
  std::istringstream lines(text);
  std::int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.empty()) continue;
    const Address address = ParseAddress(line);
    if (address.book.empty()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "text: line %d: expected a verse such as \"Ge1:1 In the beginning\", got \"%s\"", number,
          line.substr(0, 40)));
    }
    const bool held = std::find(held_out.begin(), held_out.end(), address.book) != held_out.end();
    (held ? validation : train).Add(address.book, std::string_view(line).substr(address.words));
    ++corpus.verses;
  }
  for (const std::string& book : held_out) {
    if (std::find(validation.names.begin(), validation.names.end(), book) !=
        validation.names.end()) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrFormat("text: held-out book \"%s\" is not in it; the others are: %s", book,
                        absl::StrJoin(train.names, " ")));
  }
  if (train.names.empty() || validation.names.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "text: %d books for training and %d held out; at least one of each is needed",
        train.names.size(), validation.names.size()));
  }
  corpus.vocabulary = VocabularyOf(train.text, validation.text);
  corpus.train = Encode(train.text, corpus.vocabulary);
  corpus.validation = Encode(validation.text, corpus.vocabulary);
  corpus.train_books = std::move(train.names);
  corpus.validation_books = std::move(validation.names);
  return corpus;
}

absl::StatusOr<Corpus> ReadCorpus(const std::string& path,
                                  const std::vector<std::string>& held_out) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) {
    return absl::NotFoundError(absl::StrFormat("text: cannot read \"%s\"", path));
  }
  return ParseCorpus(text.str(), held_out);
}

}  // namespace muond::char_lm
