#include "client/models/model_file.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "proto/check.h"

namespace muond::models {
namespace {

using Json = nlohmann::json;

// A value as it may stand in a message.
std::string Shown(const Json& value) {
  constexpr std::size_t kShown = 60;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() <= kShown ? text : text.substr(0, kShown) + "...";
}

// The keys of one JSON object, read one by one; the first fault is kept and later reads do nothing.
class Reader {
 public:
  // `where` names the object in messages.
  Reader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object_.is_object()) Fail(absl::StrFormat("expected an object, got %s", Shown(object_)));
  }

  // The value of `key`, null when it is not there.
  const Json* Find(const char* key) {
    if (!status_.ok()) return nullptr;
    known_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  void Read(const char* key, std::string* value) {
    const Json* json = Find(key);
    if (json == nullptr) return;
    if (!json->is_string()) return FailKey(key, "expected a string", *json);
    *value = json->get<std::string>();
  }
  void Read(const char* key, bool* value) {
    const Json* json = Find(key);
    if (json == nullptr) return;
    if (!json->is_boolean()) return FailKey(key, "expected true or false", *json);
    *value = json->get<bool>();
  }
  void Read(const char* key, std::int64_t* value) {
    const Json* json = Find(key);
    if (json == nullptr) return;
    if (!IsWhole(*json)) return FailKey(key, "expected a whole number", *json);
    *value = json->get<std::int64_t>();
  }
  void Read(const char* key, std::vector<double>* value) {
    const Json* json = Find(key);
    if (json == nullptr) return;
    if (!json->is_array()) return FailKey(key, "expected a list of numbers", *json);
    for (const Json& entry : *json) {
      if (!entry.is_number()) return FailKey(key, "expected a list of numbers", *json);
      value->push_back(entry.get<double>());
    }
  }
  void Read(const char* key, Dims* value) {
    const Json* json = Find(key);
    if (json == nullptr) return;
    if (!json->is_array()) return FailKey(key, "expected a list of whole numbers", *json);
    for (const Json& entry : *json) {
      if (!IsWhole(entry)) return FailKey(key, "expected a list of whole numbers", *json);
      value->push_back(entry.get<std::int64_t>());
    }
  }
  // One of `choices`, by the name that `name_of` gives it.
  template <typename Enum, typename NameOf>
  void Read(const char* key, Enum* value, std::initializer_list<Enum> choices, NameOf&& name_of) {
    const Json* json = Find(key);
    if (json == nullptr) return;
    std::string names;
    for (const Enum choice : choices) {
      const std::string name(name_of(choice));
      if (json->is_string() && json->get<std::string>() == name) {
        *value = choice;
        return;
      }
      names += (names.empty() ? "" : ", ") + name;
    }
    FailKey(key, "expected one of " + names, *json);
  }

  void Fail(const std::string& cause) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrFormat("%s: %s", where_, cause));
  }
  void FailKey(const char* key, const std::string& cause, const Json& got) {
    Fail(absl::StrFormat("%s: %s, got %s", key, cause, Shown(got)));
  }
  // What was wrong, a key that no Read asked for included.
  absl::Status Finish() {
    if (!status_.ok()) return status_;
    for (const auto& entry : object_.items()) {
      if (known_.count(entry.key()) > 0) continue;
      std::string names;
      for (const std::string& key : known_) names += (names.empty() ? "" : ", ") + key;
      Fail(absl::StrFormat("key %s is not one of %s", Shown(entry.key()), names));
      break;
    }
    return status_;
  }

 private:
  static bool IsWhole(const Json& json) {
    return json.is_number_integer() &&
           (!json.is_number_unsigned() || json.get<std::uint64_t>() <= INT64_MAX);
  }

  const Json& object_;
  const std::string where_;
  std::set<std::string> known_;
  absl::Status status_;
};

void ReadAlgorithm(Reader& reader, Algorithm* algorithm) {
  reader.Read("algorithm", algorithm, {Algorithm::kAuto, Algorithm::kMuon, Algorithm::kAdamW},
              AlgorithmName);
}

void ReadDtype(Reader& reader, Dtype* dtype) {
  reader.Read("dtype", dtype, {Dtype::kF32, Dtype::kBF16, Dtype::kF16}, kernels::DtypeName);
}

class FileParser {
 public:
  FileParser(std::string file, Dtype dtype) : file_(std::move(file)), dtype_(dtype) {}

  absl::StatusOr<RunSpec> Parse(const Json& json) {
    run_.name = "plan";
    if (json.is_array()) {
      MUOND_RETURN_IF_ERROR(Each("parameters", json, &FileParser::AddParameter));
    } else {
      MUOND_RETURN_IF_ERROR(ParseObject(json));
    }
    if (run_.parameters.empty()) {
      return absl::InvalidArgumentError(Where() + ": has no parameters");
    }
    if (!groups_listed_) {
      std::set<std::string> names;
      for (const ParameterSpec& parameter : run_.parameters) {
        if (names.insert(parameter.group).second) run_.groups.emplace_back().name = parameter.group;
      }
    }
    return std::move(run_);
  }

 private:
  std::string Where() const { return absl::StrFormat("model file \"%s\"", file_); }

  absl::Status ParseObject(const Json& json) {
    Reader reader(json, Where());
    ReadDtype(reader, &dtype_);
    reader.Read("world_size", &run_.world_size);
    const Json* groups = reader.Find("groups");
    const Json* rules = reader.Find("rules");
    const Json* parameters = reader.Find("parameters");
    if (run_.world_size < 1) reader.Fail("world_size: expected 1 or more");
    if (json.is_object() && parameters == nullptr) reader.Fail("parameters: is missing");
    MUOND_RETURN_IF_ERROR(reader.Finish());
    groups_listed_ = groups != nullptr;
    if (groups != nullptr) MUOND_RETURN_IF_ERROR(Each("groups", *groups, &FileParser::AddGroup));
    if (rules != nullptr) MUOND_RETURN_IF_ERROR(Each("rules", *rules, &FileParser::AddRule));
    return Each("parameters", *parameters, &FileParser::AddParameter);
  }

  using Add = absl::Status (FileParser::*)(const Json& json, std::string where);
  absl::Status Each(const char* key, const Json& list, Add add) {
    if (!list.is_array()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: %s: expected a list, got %s", Where(), key, Shown(list)));
    }
    for (std::size_t i = 0; i < list.size(); ++i) {
      std::string where = absl::StrFormat("%s: %s[%d]", Where(), key, i);
      if (list[i].is_object() && list[i].contains("name")) where += " " + Shown(list[i]["name"]);
      MUOND_RETURN_IF_ERROR((this->*add)(list[i], std::move(where)));
    }
    return absl::OkStatus();
  }

  absl::Status AddParameter(const Json& json, std::string where) {
    Reader reader(json, where);
    ParameterSpec& spec = run_.parameters.emplace_back();
    spec.dtype = dtype_;
    spec.group = "all";
    reader.Read("name", &spec.name);
    if (reader.Find("shape") != nullptr) reader.Read("shape", &spec.shape.emplace());
    reader.Read("allow_empty", &spec.allow_empty);
    ReadDtype(reader, &spec.dtype);
    reader.Read("group", &spec.group);
    reader.Read("kind", &spec.kind,
                {Kind::kMatrix, Kind::kExperts, Kind::kConv, Kind::kVector, Kind::kScalar},
                KindName);
    reader.Read(
        "role", &spec.role,
        {Role::kHidden, Role::kEmbedding, Role::kLmHead, Role::kNorm, Role::kBias, Role::kOther},
        RoleName);
    reader.Read("exclude", &spec.exclude);
    reader.Read("replicated", &spec.replicated);
    reader.Read("tie", &spec.tie);
    reader.Read("tie_reduction", &spec.tie_reduction, {TieReduction::kSum, TieReduction::kSame},
                [](TieReduction value) { return value == TieReduction::kSum ? "sum" : "same"; });
    const Json* split = reader.Find("split");
    MUOND_RETURN_IF_ERROR(reader.Finish());
    if (const absl::Status name = ValidateParameterName(spec.name); !name.ok()) {
      return absl::InvalidArgumentError(absl::StrFormat("%s: name: %s", where, name.message()));
    }
    return split == nullptr ? absl::OkStatus() : ReadSplit(*split, where + ": split", &spec.split);
  }

  static absl::Status ReadSplit(const Json& json, std::string where, RowSplit* split) {
    Reader reader(json, std::move(where));
    reader.Read("sizes", &split->sizes);
    reader.Read("groups", &split->groups);
    reader.Read("interleaved", &split->interleaved);
    reader.Read("per_head", &split->per_head);
    return reader.Finish();
  }

  absl::Status AddGroup(const Json& json, std::string where) {
    Reader reader(json, std::move(where));
    GroupSpec& group = run_.groups.emplace_back();
    reader.Read("name", &group.name);
    ReadAlgorithm(reader, &group.algorithm);
    reader.Read("coefficients", &group.coefficients);
    reader.Read("custom_steps", &group.custom_steps);
    reader.Read("momentum_dtype", &group.momentum_dtype, {Dtype::kF32, Dtype::kBF16},
                kernels::DtypeName);
    if (group.name.empty()) reader.Fail("name: is missing");
    if (!group.custom_steps.empty() && group.coefficients != "custom") {
      reader.Fail("custom_steps: only with coefficients \"custom\"");
    }
    if (group.coefficients == "custom" &&
        (group.custom_steps.empty() || group.custom_steps.size() % 3 != 0)) {
      reader.Fail("custom_steps: expected three numbers for each step");
    }
    return reader.Finish();
  }

  absl::Status AddRule(const Json& json, std::string where) {
    Reader reader(json, std::move(where));
    RoutingRule& rule = run_.rules.emplace_back();
    reader.Read("pattern", &rule.pattern);
    ReadAlgorithm(reader, &rule.algorithm);
    return reader.Finish();
  }

  const std::string file_;
  Dtype dtype_;
  bool groups_listed_ = false;
  RunSpec run_;
};

}  // namespace

absl::StatusOr<RunSpec> ParseModelFile(const std::string& text, const std::string& file,
                                       Dtype dtype) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::exception& error) {  // names line and column
    return absl::InvalidArgumentError(
        absl::StrFormat("model file \"%s\": no JSON: %s", file, error.what()));
  }
  return FileParser(file, dtype).Parse(json);
}

absl::StatusOr<RunSpec> LoadModelFile(const std::string& path, Dtype dtype) {
  // A folder can be opened, but reading it throws.
  std::error_code ignored;
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open() || std::filesystem::is_directory(path, ignored)) {
    return absl::NotFoundError(absl::StrFormat("model file \"%s\": can't be read", path));
  }
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return ParseModelFile(text, path, dtype);
}

}  // namespace muond::models
