#include "client/c/handles.h"

#include "google/protobuf/util/json_util.h"

namespace muond::c {

int32_t Answer(const absl::Status& status, muond_error** error) noexcept {
  if (error != nullptr) *error = nullptr;
  if (status.ok()) return MUOND_OK;
  if (error != nullptr) {
    try {
      *error = new muond_error{status, std::string(status.message())};
    } catch (...) {
      *error = nullptr;
    }
  }
  return static_cast<int32_t>(status.code());
}

absl::Status CheckThere(const char* what, const void* pointer) {
  if (pointer != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s: is NULL", what));
}

absl::Status FromJson(const char* what, const std::string& json,
                      google::protobuf::Message* message) {
  const auto status = google::protobuf::util::JsonStringToMessage(json, message);
  if (status.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s: %s: %s", what,
                                                    message->GetDescriptor()->full_name(),
                                                    status.ToString()));
}

absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (!status.ok()) return absl::InternalError(status.ToString());
  return json;
}

absl::Status GiveText(absl::StatusOr<std::string> text, muond_text** out) {
  if (!text.ok()) return text.status();
  *out = new muond_text{*std::move(text)};
  return absl::OkStatus();
}

}  // namespace muond::c

extern "C" {

uint32_t muond_abi_version(void) { return MUOND_ABI_VERSION; }

const char* muond_version(void) { return MUOND_VERSION; }

int32_t muond_error_code(const muond_error* error) {
  return error == nullptr ? MUOND_OK : static_cast<int32_t>(error->status.code());
}

const char* muond_error_message(const muond_error* error, size_t* bytes) {
  if (bytes != nullptr) *bytes = error == nullptr ? 0 : error->message.size();
  return error == nullptr ? "" : error->message.c_str();
}

void muond_error_free(muond_error* error) { delete error; }

const char* muond_text_data(const muond_text* text, size_t* bytes) {
  if (bytes != nullptr) *bytes = text == nullptr ? 0 : text->text.size();
  return text == nullptr ? "" : text->text.c_str();
}

void muond_text_free(muond_text* text) { delete text; }

}  // extern "C"
