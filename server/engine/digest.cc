// What "not one byte changed" is checked with.
#include "server/engine/digest.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/engine/engine.h"
#include "xxhash.h"

namespace muond {
namespace {

void Append(std::string& bytes, const void* data, std::size_t size) {
  bytes.append(static_cast<const char*>(data), size);
}

void AppendString(std::string& bytes, const std::string& text) {
  const std::uint64_t size = text.size();
  Append(bytes, &size, sizeof(size));
  bytes += text;
}

// Hashed block by block, so that parts of a tensor that was cut at block borders can be hashed
// where they lie.
kernels::Error HashTensor(kernels::Backend& backend, const ShardState::Tensor& tensor,
                          std::int64_t elements, std::vector<std::uint64_t>& blocks) {
  // Several blocks per copy: what a device charges for one is worth megabytes.
  constexpr std::int64_t kBlock = kernels::kBlockElements;
  constexpr std::int64_t kPiece = 64 * kBlock;
  const auto width = static_cast<std::int64_t>(DtypeBytes(tensor.dtype));
  std::vector<char> piece;
  for (std::int64_t at = 0; at < elements; at += kPiece) {
    const std::int64_t count = std::min(kPiece, elements - at);
    const char* values = static_cast<const char*>(tensor.data) + at * width;
    if (!backend.host_memory()) {
      piece.resize(count * width);
      if (auto error = backend.Download(piece.data(), values, count * width)) return error;
      values = piece.data();
    }
    for (std::int64_t i = 0; i < count; i += kBlock) {
      blocks.push_back(XXH3_64bits(values + i * width, std::min(kBlock, count - i) * width));
    }
  }
  return {};
}

// What the digest of each parameter is made of.
std::map<std::string, std::string> StateBytes(const RunSpec& spec,
                                              std::vector<ShardHashes>& shards) {
  std::sort(shards.begin(), shards.end(), [](const ShardHashes& a, const ShardHashes& b) {
    return std::tie(a.parameter, a.first) < std::tie(b.parameter, b.first);
  });
  std::map<std::string, Dtype> momentum_dtypes;  // by group
  for (const GroupSpec& group : spec.groups) momentum_dtypes[group.name] = group.momentum_dtype;
  std::map<std::string, std::string> result;
  for (std::size_t i = 0; i < shards.size();) {
    const ParameterSpec& parameter = spec.parameters[shards[i].parameter];
    std::size_t end = i;
    while (end < shards.size() && shards[end].parameter == shards[i].parameter) ++end;
    std::string& bytes = result[parameter.name];
    AppendString(bytes, parameter.name);
    for (std::int64_t dim : *parameter.shape) Append(bytes, &dim, sizeof(dim));
    AppendString(bytes, "f32");
    for (std::size_t tensor = 0; tensor < shards[i].tensors.size(); ++tensor) {
      const std::string& name = shards[i].tensors[tensor].name;
      AppendString(bytes, name);
      if (name == "momentum" && momentum_dtypes.at(parameter.group) == Dtype::kBF16) {
        AppendString(bytes, "bf16");
      }
      for (std::size_t shard = i; shard < end; ++shard) {
        const auto& blocks = shards[shard].tensors[tensor].blocks;
        Append(bytes, blocks.data(), blocks.size() * sizeof(blocks[0]));
      }
    }
    Append(bytes, &shards[i].t, sizeof(shards[i].t));
    i = end;
  }
  return result;
}

}  // namespace

std::string Digest128(const std::string& bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

std::map<std::string, std::string> ParameterDigests(const RunSpec& spec,
                                                    std::vector<ShardHashes> shards) {
  std::map<std::string, std::string> digests = StateBytes(spec, shards);
  for (auto& [name, value] : digests) value = Digest128(value);
  return digests;
}

std::string TensorDigest(const RunSpec& spec, std::vector<ShardHashes> shards) {
  std::string bytes;
  for (const auto& [name, state] : StateBytes(spec, shards)) AppendString(bytes, state);
  return Digest128(bytes);
}

absl::StatusOr<std::vector<ShardHashes>> Engine::HashShards() const {
  std::vector<ShardHashes> result;
  for (const ShardState& state : states_) {
    ShardHashes hashes{.parameter = state.parameter, .first = state.first, .t = state.t};
    std::vector<ShardState::Tensor> tensors = state.Tensors();
    // A digest begins with the master weights.
    if (!state.muon()) std::rotate(tensors.begin(), tensors.end() - 1, tensors.end());
    for (const ShardState::Tensor& tensor : tensors) {
      hashes.tensors.push_back({tensor.name, {}});
      if (auto error = HashTensor(backend_, tensor, state.elements, hashes.tensors.back().blocks)) {
        return absl::InternalError(
            absl::StrFormat("parameter \"%s\": digest: %s", state.spec->name, error.message()));
      }
    }
    result.push_back(std::move(hashes));
  }
  return result;
}

}  // namespace muond
