// What a value is.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "kernels/tensor.h"

namespace muond {

// The function scanner must not stumble over what C++ has to offer.
struct Value {
  explicit Value(int a) : a_{a}, b_(a), c_{a, a} {
    if (a > 0) b_ = '}';
  }
  bool operator==(const Value& other) const { return a_ == other.a_; }
  int operator()() const { return a_; }
  int a_;
  int b_ = {3};
  int c_[2];
};

template <typename T = int, typename = decltype(sizeof(T{}))>
T Twice(T x = T{1}) requires(sizeof(T) > 1) {
  auto f = [](T y) { return y + y; };
  return f(x);
}

inline const char* Raw() { return R"({ "brace": "{" } // no comment)"; }
enum class Kind : int { kOne, kTwo };

}  // namespace muond
