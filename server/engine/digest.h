// The digest that state is compared by.
#pragma once

#include <string>

namespace muond {

// XXH3-128 of the bytes, 32 hex digits.
std::string Digest128(const std::string& bytes);

}  // namespace muond
