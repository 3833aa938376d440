#include "server/transport/placing_reader.h"

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "proto/crc32c.h"
#include "xxhash.h"

namespace muond {
namespace {

std::string Noise(std::size_t bytes) {
  std::string text(bytes, ' ');
  std::mt19937 random(7);
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

struct FreeState {
  void operator()(XXH3_state_s* state) const { XXH3_freeState(state); }
};

class PlacingReaderTest : public testing::Test {
 protected:
  PlacingReaderTest() { XXH3_64bits_reset(hash_.get()); }
  const std::string text_ = Noise(100'003);
  std::unique_ptr<XXH3_state_s, FreeState> hash_{XXH3_createState()};

  // The text in pieces that end anywhere, empty ones among them.
  std::vector<std::string_view> Pieces(std::size_t most) {
    std::vector<std::string_view> pieces;
    std::mt19937 random(static_cast<unsigned>(most));
    for (std::size_t at = 0; at < text_.size();) {
      const std::size_t n = std::min(random() % (most + 1), text_.size() - at);
      pieces.push_back(std::string_view(text_).substr(at, n));
      at += n;
    }
    return pieces;
  }
  void ExpectSums(const PlacingReader& reader) {
    EXPECT_EQ(reader.crc32c(), Crc32c(text_.data(), text_.size()));
    EXPECT_EQ(XXH3_64bits_digest(hash_.get()), XXH3_64bits(text_.data(), text_.size()));
  }
};

TEST_F(PlacingReaderTest, PlacesAndSumsAreThoseOfTheTextHoweverItIsCut) {
  for (const std::size_t piece : {std::size_t{3}, std::size_t{9'000}, std::size_t{200'000}}) {
    for (const std::size_t place : {std::size_t{5}, std::size_t{2'048}, std::size_t{40'000}}) {
      XXH3_64bits_reset(hash_.get());
      const auto pieces = Pieces(piece);
      PlacingReader reader(pieces, hash_.get());
      std::string placed(text_.size(), '\0');
      std::mt19937 random(static_cast<unsigned>(place));
      for (std::size_t at = 0; at < placed.size();) {
        const std::size_t n = std::min(random() % (place + 1), placed.size() - at);
        reader.Read(reinterpret_cast<std::byte*>(placed.data()) + at, n);
        at += n;
      }
      EXPECT_EQ(placed, text_) << piece << " " << place;
      ExpectSums(reader);
    }
  }
}

TEST_F(PlacingReaderTest, WhatGoesNowhereIsSummed) {
  const auto pieces = Pieces(30'000);
  PlacingReader reader(pieces, hash_.get());
  reader.Skip(text_.size());
  ExpectSums(reader);
}

TEST_F(PlacingReaderTest, NothingHasTheSumsOfNothing) {
  PlacingReader reader({}, hash_.get());
  reader.Skip(0);
  reader.Read(nullptr, 0);
  EXPECT_EQ(reader.crc32c(), 0u);
  EXPECT_EQ(XXH3_64bits_digest(hash_.get()), XXH3_64bits("", 0));
}

}  // namespace
}  // namespace muond
