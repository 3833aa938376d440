#include "server/rpc/admin_service.h"
#include "server/rpc/answer.h"

namespace muond {

grpc::ServerUnaryReactor* AdminService::Settings(grpc::CallbackServerContext* context,
                                                 const v1::SettingsRequest*,
                                                 v1::SettingsReply* reply) {
  *reply = context_.settings;
  return AnswerNow(context, absl::OkStatus(), nullptr);
}

}  // namespace muond
