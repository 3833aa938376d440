// The shapes of real models by name: what `muonctl plan` plans and muond-bench sends.
//
// Plain values and pure functions: no thread rule.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/values.h"

namespace muond::models {

struct ModelTensor {
  std::string name;
  Dims shape;
  Kind kind = Kind::kMatrix;
  Role role = Role::kHidden;

  std::int64_t Elements() const;
  // Whether a daemon routes it to Muon: a hidden matrix of more than one row and column.
  bool IsMuon() const {
    return kind == Kind::kMatrix && role == Role::kHidden && shape[0] > 1 && shape[1] > 1;
  }
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
//   llama7b   32 layers, hidden 4096, ffn 11008: 224 matrices; embedding and norms
//   llama70b  80 layers, hidden 8192, kv 1024, ffn 28672: 560 matrices; embedding and norms
//   7b8       the first 8 layers of llama7b: 56 matrices; embedding and norms
//   custom:ROWSxCOLS[xCOUNT][:adamw],...   hidden matrices, or embeddings that AdamW trains
//   synthetic:COUNT[xSIDE]   COUNT parameters, half of them SIDE x SIDE matrices (16), half vectors
//                            of as many elements: what a step costs per parameter
// INVALID_ARGUMENT for any other, and for sizes that are not positive or overflow.
absl::StatusOr<Model> ParseModel(const std::string& name);

// "tiny, gpt2, ... or synthetic:COUNT[xSIDE]": what ParseModel takes, for messages.
const char* ModelNames();

// The run that registers `model`: one group of algorithm `auto`, one rank, everything in `dtype`
// but Muon's momentum.
RunSpec MakeRunSpec(const Model& model, const std::string& run, Dtype dtype,
                    Dtype momentum_dtype = Dtype::kF32);

}  // namespace muond::models
