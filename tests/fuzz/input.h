// What a fuzzer's bytes are read as: numbers and strings, zeros and nothing when they are used up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

// The entry point of every harness, libFuzzer's and the replay's (replay_main.cc).
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace muond::fuzz {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size)
      : rest_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return rest_.empty(); }
  std::uint8_t Byte() {
    if (rest_.empty()) return 0;
    const auto byte = static_cast<std::uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return byte;
  }
  // In [0, count), count up to 256.
  int Below(int count) { return Byte() % count; }
  std::int64_t Int64() {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value |= std::uint64_t{Byte()} << (8 * i);
    return static_cast<std::int64_t>(value);
  }
  std::string_view Take(std::size_t bytes) {
    const std::string_view taken = rest_.substr(0, std::min(bytes, rest_.size()));
    rest_.remove_prefix(taken.size());
    return taken;
  }
  std::string_view Rest() { return Take(rest_.size()); }

 private:
  std::string_view rest_;
};

}  // namespace muond::fuzz
