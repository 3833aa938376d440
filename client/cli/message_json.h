// Messages as JSON for scripts: keys are the proto's field names and never change with the values.
//
// Not protobuf's own mapping, which writes 64-bit integers as strings (jq could not add them up)
// and leaves out what is zero.
#pragma once

#include "google/protobuf/message.h"
#include "nlohmann/json.hpp"

namespace muond::cli {

using Json = nlohmann::ordered_json;

// Every field in the order of the proto, zeros too; a missing message is null, a map an object with
// sorted keys, an enumerator its short name ("running"), a number that is not finite null.
Json MessageToJson(const google::protobuf::Message& message);

// Two blanks of indentation and a final newline.
std::string JsonText(const Json& json);

}  // namespace muond::cli
