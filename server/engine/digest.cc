// The tensor digest: what "not one byte changed" is checked with.
#include "server/engine/digest.h"

#include <algorithm>
#include <string>
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

// A tensor is hashed block by block, so that the parts of a tensor cut at block borders can be
// hashed where they lie.
void AppendTensor(std::string& bytes, const char* name, const Buffer& tensor) {
  AppendString(bytes, name);
  const auto* data = static_cast<const char*>(tensor.data());
  const std::size_t block = kernels::kBlockElements * sizeof(float);
  for (std::size_t at = 0; at < tensor.bytes(); at += block) {
    const XXH64_hash_t hash = XXH3_64bits(data + at, std::min(block, tensor.bytes() - at));
    Append(bytes, &hash, sizeof(hash));
  }
}

}  // namespace

std::string Digest128(const std::string& bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

std::string Engine::HashState(int parameter) const {
  const ParameterState& state = states_[parameter];
  std::string bytes;
  AppendString(bytes, state.spec->name);
  for (std::int64_t dim : *state.spec->shape) Append(bytes, &dim, sizeof(dim));
  AppendString(bytes, "f32");
  AppendTensor(bytes, "master", state.weight);
  if (state.muon()) {
    AppendTensor(bytes, "momentum", state.momentum);
  } else {
    AppendTensor(bytes, "exp_avg", state.momentum);
    AppendTensor(bytes, "exp_avg_sq", state.exp_avg_sq);
  }
  Append(bytes, &state.t, sizeof(state.t));
  return bytes;
}

std::string Engine::ParameterDigest(int parameter) const {
  return Digest128(HashState(parameter));
}

std::string Engine::TensorDigest() const {
  std::vector<std::pair<std::string, int>> order;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].owned) order.emplace_back(states_[i].spec->name, static_cast<int>(i));
  }
  std::sort(order.begin(), order.end());
  std::string bytes;
  for (const auto& [name, index] : order) AppendString(bytes, HashState(index));
  return Digest128(bytes);
}

}  // namespace muond
