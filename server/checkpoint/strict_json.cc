#include "server/checkpoint/strict_json.h"

#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

namespace muond::checkpoint {
namespace {

constexpr int kDepthMax = 16;

}  // namespace

absl::StatusOr<Json> ParseStrictJson(const std::string& text) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  std::string wrong;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    switch (event) {
      case Json::parse_event_t::object_start:
        keys.emplace_back();
        break;
      case Json::parse_event_t::object_end:
        keys.pop_back();
        break;
      case Json::parse_event_t::key:
        if (!keys.back().insert(value.get<std::string>()).second && wrong.empty()) {
          wrong = absl::StrFormat("key \"%s\" stands there twice", value.get<std::string>());
        }
        break;
      default:
        break;
    }
    if (depth > kDepthMax && wrong.empty()) wrong = "is nested too deep";
    return wrong.empty();  // what is wrong is dropped: it must not take memory
  };
  Json json;
  try {
    json = Json::parse(text, watch);
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrFormat("JSON: %s", error.what()));
  }
  if (!wrong.empty()) return absl::InvalidArgumentError(absl::StrFormat("JSON: %s", wrong));
  if (!json.is_object()) return absl::InvalidArgumentError("JSON: expected an object");
  return json;
}

JsonReader::JsonReader(const Json& object, std::string where)
    : object_(object), where_(std::move(where)) {
  if (!object.is_object()) {
    status_ = absl::InvalidArgumentError(absl::StrFormat("%s: expected an object", where_));
  }
}

const Json* JsonReader::Find(const char* key, const char* type,
                             bool (Json::*is)() const noexcept) {
  if (!status_.ok()) return nullptr;
  const auto found = object_.find(key);
  if (found != object_.end() && (*found.*is)()) return &*found;
  status_ = absl::InvalidArgumentError(
      absl::StrFormat("%s: field \"%s\": expected %s%s", where_, key, type,
                      found == object_.end() ? ", there is none" : ""));
  return nullptr;
}

std::int64_t JsonReader::Integer(const char* key) {
  const Json* found = Find(key, "an integer", &Json::is_number_integer);
  if (found == nullptr) return 0;
  if (found->is_number_unsigned() &&
      found->get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()}) {
    status_ = absl::InvalidArgumentError(
        absl::StrFormat("%s: field \"%s\": beyond 63 bits", where_, key));
    return 0;
  }
  return found->get<std::int64_t>();
}

double JsonReader::Number(const char* key) {
  const Json* found = Find(key, "a number", &Json::is_number);
  return found == nullptr ? 0 : found->get<double>();
}

bool JsonReader::Bool(const char* key) {
  const Json* found = Find(key, "true or false", &Json::is_boolean);
  return found != nullptr && found->get<bool>();
}

std::string JsonReader::Text(const char* key) {
  const Json* found = Find(key, "a string", &Json::is_string);
  return found == nullptr ? "" : found->get<std::string>();
}

const Json& JsonReader::Object(const char* key) {
  static const Json& empty = *new Json(Json::object());
  const Json* found = Find(key, "an object", &Json::is_object);
  return found == nullptr ? empty : *found;
}

const Json& JsonReader::Array(const char* key) {
  static const Json& empty = *new Json(Json::array());
  const Json* found = Find(key, "an array", &Json::is_array);
  return found == nullptr ? empty : *found;
}

}  // namespace muond::checkpoint
