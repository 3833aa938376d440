#include "server/daemon/reflection.h"

#include <memory>
#include <vector>

#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/impl/server_builder_option.h"
#include "grpcpp/impl/server_builder_plugin.h"

namespace muond {
namespace {

using Plugins = std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>;

class ReflectionOption : public grpc::ServerBuilderOption {
 public:
  explicit ReflectionOption(bool on) : on_(on) {}

  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(Plugins* plugins) override {
    std::erase_if(*plugins, [](const std::unique_ptr<grpc::ServerBuilderPlugin>& plugin) {
      return dynamic_cast<grpc::reflection::ProtoServerReflectionPlugin*>(plugin.get()) != nullptr;
    });
    if (on_) plugins->push_back(std::make_unique<grpc::reflection::ProtoServerReflectionPlugin>());
  }

 private:
  const bool on_;
};

}  // namespace

void SetReflection(grpc::ServerBuilder& builder, bool on) {
  builder.SetOption(std::make_unique<ReflectionOption>(on));
}

}  // namespace muond
