#include "proto/crc32c.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace muond {
namespace {

std::uint32_t Of(const std::string& bytes) { return Crc32c(bytes.data(), bytes.size()); }

TEST(Crc32c, Rfc3720Vectors) {
  EXPECT_EQ(Of(std::string(32, '\x00')), 0x8a9136aau);
  EXPECT_EQ(Of(std::string(32, '\xff')), 0x62a8ab43u);
  std::string ascending;
  for (char c = 0; c < 32; ++c) ascending += c;
  EXPECT_EQ(Of(ascending), 0x46dd794eu);
  EXPECT_EQ(Of(std::string(ascending.rbegin(), ascending.rend())), 0x113fdb5cu);
  EXPECT_EQ(Of("123456789"), 0xe3069283u);
  EXPECT_EQ(Of(""), 0u);
}

// The definition itself, a bit at a time, over lengths that exercise every tail of the fast paths.
TEST(Crc32c, EqualsTheBitwiseDefinitionAtEveryLengthAndAlignment) {
  std::vector<unsigned char> bytes(1100);
  std::uint32_t random = 1;
  for (auto& byte : bytes)
    byte = static_cast<unsigned char>((random = random * 1664525 + 1013904223) >> 24);
  for (std::size_t start = 0; start < 9; ++start) {
    std::uint32_t crc = ~0u;
    for (std::size_t length = 0; start + length < bytes.size(); ++length) {
      ASSERT_EQ(Crc32c(&bytes[start], length), ~crc) << start << " + " << length;
      crc ^= bytes[start + length];
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
    }
  }
}

TEST(Crc32c, ContinuesFromAnyCut) {
  const std::string bytes = "a gradient that came in two chunks";
  for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
    const std::uint32_t head = Crc32c(bytes.data(), cut);
    EXPECT_EQ(Crc32c(bytes.data() + cut, bytes.size() - cut, head), Of(bytes)) << cut;
  }
}

}  // namespace
}  // namespace muond
