#include "server/run/shard_hashes_message.h"

#include <utility>

namespace muond {

void AppendToProto(const std::vector<ShardHashes>& shards, v1::StateHashesReply* reply) {
  for (const ShardHashes& shard : shards) {
    v1::ShardHashes* message = reply->add_shards();
    message->set_parameter(shard.parameter);
    message->set_first(shard.first);
    message->set_t(shard.t);
    for (const ShardHashes::Tensor& tensor : shard.tensors) {
      v1::ShardHashes::Tensor* hashes = message->add_tensors();
      hashes->set_name(tensor.name);
      hashes->mutable_blocks()->Assign(tensor.blocks.begin(), tensor.blocks.end());
    }
  }
}

void AppendFromProto(const v1::StateHashesReply& reply, std::vector<ShardHashes>& shards) {
  for (const v1::ShardHashes& message : reply.shards()) {
    ShardHashes shard{.parameter = static_cast<int>(message.parameter()),
                      .first = message.first(),
                      .t = message.t()};
    for (const v1::ShardHashes::Tensor& tensor : message.tensors()) {
      shard.tensors.push_back({tensor.name(), {tensor.blocks().begin(), tensor.blocks().end()}});
    }
    shards.push_back(std::move(shard));
  }
}

}  // namespace muond
