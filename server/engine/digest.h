// The digests that state is compared by: of a run the same however it is cut into slices, shards,
// devices and daemons.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "proto/values.h"

namespace muond {

// XXH3-128 of the bytes, 32 hex digits.
std::string Digest128(const std::string& bytes);

// What a digest takes of one shard: the hashes of the fixed blocks of each of its state tensors.
struct ShardHashes {
  int parameter = 0;
  std::int64_t first = 0;  // element; a multiple of kBlockElements
  std::int64_t t = 0;
  struct Tensor {
    std::string name;  // "master", "momentum", "exp_avg", "exp_avg_sq"
    std::vector<std::uint64_t> blocks;
  };
  std::vector<Tensor> tensors;
};

// Of the parameters that `shards` (any order) have anything of, by name: name, shape, dtype, the
// hashes of all blocks of every state tensor, "bf16" before those of a momentum that is kept so,
// and t.
std::map<std::string, std::string> ParameterDigests(const RunSpec& spec,
                                                    std::vector<ShardHashes> shards);

// Over all of these in name order.
std::string TensorDigest(const RunSpec& spec, std::vector<ShardHashes> shards);

}  // namespace muond
