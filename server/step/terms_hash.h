// A hash of what trainers tell of a step, equal on every daemon that was told the same. Pure.
#pragma once

#include <bit>
#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/string_view.h"
#include "proto/values.h"
#include "xxhash.h"

namespace muond {

class TermsHash {
 public:
  void Add(std::int64_t value) { Append(static_cast<std::uint64_t>(value)); }
  // By its bits: values that differ at all differ here. Zeros are equal, whatever their signs.
  void Add(double value) { Append(value == 0 ? 0 : std::bit_cast<std::uint64_t>(value)); }
  void Add(absl::string_view algorithm, const std::map<std::string, Hyperparameters>& groups) {
    Add(algorithm);
    Add(static_cast<std::int64_t>(groups.size()));
    for (const auto& [name, values] : groups) {
      Add(absl::string_view(name));
      for (const double value : {values.lr, values.weight_decay, values.momentum, values.beta1,
                                 values.beta2, values.eps}) {
        Add(value);
      }
    }
  }
  std::uint64_t Value() const { return XXH3_64bits(text_.data(), text_.size()); }

 private:
  void Add(absl::string_view text) {
    Append(text.size());
    text_.append(text.data(), text.size());
  }
  // Little endian on every machine, since daemons compare.
  void Append(std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) {
      text_.push_back(static_cast<char>(value >> shift & 0xff));
    }
  }
  std::string text_;
};

}  // namespace muond
