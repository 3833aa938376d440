// The models that the benchmark can be: lists of tensors with the shapes of real ones.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/values.h"

namespace muond::bench {

struct ModelTensor {
  std::string name;
  Dims shape;
  Kind kind = Kind::kMatrix;
  Role role = Role::kHidden;
};

struct Model {
  std::string name;
  std::vector<ModelTensor> tensors;

  std::int64_t Elements() const;
};

// The model of that name:
//   tiny      2 layers, 64 wide, 115k elements: does it work?
//   gpt2      GPT-2 124M: 12 layers, fused qkv 2304x768, proj, fc and back; embeddings
//   llama1b   Llama-3.2-1B: 16 layers, 112 matrices; embedding and norms
//   7b8       8 layers of a 7B: hidden 4096, ffn 11008, 56 matrices; embedding
//   custom:ROWSxCOLS[xCOUNT],...   hidden matrices
// INVALID_ARGUMENT for any other, and for sizes that are not positive or overflow.
absl::StatusOr<Model> ParseModel(const std::string& name);

// The run that registers `model`: one group of algorithm `auto`, one rank, everything in `dtype`.
RunSpec MakeRunSpec(const Model& model, const std::string& run, Dtype dtype);

}  // namespace muond::bench
