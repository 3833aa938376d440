#include "client/cli/message_json.h"

#include <cmath>
#include <map>
#include <string>

#include "client/cli/format.h"
#include "google/protobuf/descriptor.h"

namespace muond::cli {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

// One value of the field: element `index` of a repeated one, the value itself for index -1.
Json ValueToJson(const Message& message, const FieldDescriptor* field, int index) {
  const Reflection& reflection = *message.GetReflection();
  const bool repeated = index >= 0;
#define MUOND_GET(Type)                                                 \
  (repeated ? reflection.GetRepeated##Type(message, field, index) \
            : reflection.Get##Type(message, field))
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: return MUOND_GET(Int32);
    case FieldDescriptor::CPPTYPE_INT64: return MUOND_GET(Int64);
    case FieldDescriptor::CPPTYPE_UINT32: return MUOND_GET(UInt32);
    case FieldDescriptor::CPPTYPE_UINT64: return MUOND_GET(UInt64);
    case FieldDescriptor::CPPTYPE_DOUBLE: return Number(MUOND_GET(Double));
    case FieldDescriptor::CPPTYPE_FLOAT: return Number(MUOND_GET(Float));
    case FieldDescriptor::CPPTYPE_BOOL: return MUOND_GET(Bool);
    case FieldDescriptor::CPPTYPE_ENUM: return ShortEnumName(*MUOND_GET(Enum));
    case FieldDescriptor::CPPTYPE_STRING: return MUOND_GET(String);
    case FieldDescriptor::CPPTYPE_MESSAGE: break;
  }
#undef MUOND_GET
  if (!repeated && !reflection.HasField(message, field)) return nullptr;
  return MessageToJson(repeated ? reflection.GetRepeatedMessage(message, field, index)
                                : reflection.GetMessage(message, field));
}

// All our maps have string keys.
Json MapToJson(const Message& message, const FieldDescriptor* field) {
  const Reflection& reflection = *message.GetReflection();
  std::map<std::string, Json> sorted;
  for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
    const Message& entry = reflection.GetRepeatedMessage(message, field, i);
    const FieldDescriptor* key = field->message_type()->map_key();
    const FieldDescriptor* value = field->message_type()->map_value();
    sorted[entry.GetReflection()->GetString(entry, key)] = ValueToJson(entry, value, -1);
  }
  Json object = Json::object();
  for (auto& [key, value] : sorted) object[key] = std::move(value);
  return object;
}

}  // namespace

Json MessageToJson(const Message& message) {
  Json object = Json::object();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    if (field->is_map()) {
      object[field->name()] = MapToJson(message, field);
    } else if (field->is_repeated()) {
      Json array = Json::array();
      for (int j = 0; j < message.GetReflection()->FieldSize(message, field); ++j) {
        array.push_back(ValueToJson(message, field, j));
      }
      object[field->name()] = std::move(array);
    } else {
      object[field->name()] = ValueToJson(message, field, -1);
    }
  }
  return object;
}

std::string JsonText(const Json& json) { return json.dump(2) + "\n"; }

}  // namespace muond::cli
