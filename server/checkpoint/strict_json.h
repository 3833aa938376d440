// JSON as files from elsewhere must be read: no key twice, no deep nesting, no exceptions.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace muond::checkpoint {

using Json = nlohmann::json;

// INVALID_ARGUMENT that says where, for text that is no JSON object, has a key twice in one object
// or is nested deeper than any of our files.
absl::StatusOr<Json> ParseStrictJson(const std::string& text);

// Reads one field at a time; the first that is missing or of another type is kept as the status,
// and everything after it reads as zero. `where` names the object in the message.
class JsonReader {
 public:
  JsonReader(const Json& object, std::string where);

  std::int64_t Integer(const char* key);  // within 63 bits
  double Number(const char* key);
  bool Bool(const char* key);
  std::string Text(const char* key);
  const Json& Object(const char* key);
  const Json& Array(const char* key);
  // True and no error when there is no such key.
  bool Lacks(const char* key) const { return !object_.contains(key); }

  const absl::Status& status() const { return status_; }

 private:
  const Json* Find(const char* key, const char* type, bool (Json::*is)() const noexcept);
  const Json& object_;
  const std::string where_;
  absl::Status status_;
};

}  // namespace muond::checkpoint
