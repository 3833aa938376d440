// The model: a character is guessed from the `context` characters before it by a network with two
// hidden layers. Forward and backward are written out here; matrix products are OpenBLAS's.
//
//   x = embedding rows of the context, side by side      context * width
//   h1 = silu(hidden.0 x + bias.0)                       hidden
//   h2 = silu(hidden.1 h1 + bias.1)                      hidden
//   logits = lm_head h2 + lm_head.bias                   vocabulary
//
// Matrices are out x in, row-major, fp32. The backward pass works as in mixed-precision training:
// the gradient of the loss is multiplied by the loss scale, and the gradient of every activation
// goes through fp16, so that it overflows when the scale is too large.
// Thread rule: one thread at a time per object. BLAS is set to one thread, so that sums have one
// order.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/examples/char_lm/text/corpus.h"
#include "proto/values.h"

namespace muond::char_lm {

struct ModelShape {
  std::int64_t vocabulary = 0;
  std::int64_t context = 16;  // characters that are looked at
  std::int64_t width = 32;    // of an embedding
  std::int64_t hidden = 256;
};

// One trained tensor.
struct ModelParameter {
  std::string name;
  Dims shape;
  Role role = Role::kUnspecified;
  std::vector<float> value;
};

// Examples: the context and target of number i start at starts[i] in `text`.
struct Batch {
  const Tokens* text = nullptr;
  std::vector<std::int64_t> starts;
};

enum class ActivationGradients {
  kF16,  // rounded to binary16, infinite beyond 65504
  kF32,  // as they are: for the test against finite differences
};

class Model {
 public:
  // Weights uniform with variance 1 / (columns), the embedding with variance 1, biases zero; the
  // seed decides all of them on every machine alike.
  Model(const ModelShape& shape, std::uint64_t seed);

  const ModelShape& shape() const { return shape_; }
  std::vector<ModelParameter>& parameters() { return parameters_; }
  const std::vector<ModelParameter>& parameters() const { return parameters_; }

  // Mean negative log-likelihood of the targets, in nats.
  double Loss(const Batch& batch);

  // Likewise, and loss_scale times its gradient by every parameter, in the order of parameters().
  double Gradient(const Batch& batch, double loss_scale, ActivationGradients precision,
                  std::vector<std::vector<float>>& gradients);

 private:
  enum Index { kEmbedding, kHidden0, kBias0, kHidden1, kBias1, kHead, kHeadBias, kCount };

  // The activations of the batch in hand, examples x features.
  struct Activations {
    std::vector<float> x, pre1, h1, pre2, h2;
    std::vector<float> probabilities;  // after Forward: softmax of the logits
  };
  // Fills the activations; returns the loss.
  double Forward(const Batch& batch);
  const float* Value(Index i) const { return parameters_[i].value.data(); }

  ModelShape shape_;
  std::vector<ModelParameter> parameters_;
  Activations act_;
};

}  // namespace muond::char_lm
