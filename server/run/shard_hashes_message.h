// Hashes of state as the daemons exchange them.
#pragma once

#include <vector>

#include "muond/v1/peer.pb.h"
#include "server/engine/digest.h"

namespace muond {

void AppendToProto(const std::vector<ShardHashes>& shards, v1::StateHashesReply* reply);
void AppendFromProto(const v1::StateHashesReply& reply, std::vector<ShardHashes>& shards);

}  // namespace muond
