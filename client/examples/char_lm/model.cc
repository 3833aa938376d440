#include "client/examples/char_lm/model.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/tensor.h"

namespace muond::char_lm {
namespace {

using Int = std::int64_t;

// y[batch x out] = x[batch x in] w^T[out x in] + bias in every row.
void Affine(const std::vector<float>& x, const float* w, const std::vector<float>& bias, Int batch,
            Int in, Int out, std::vector<float>& y) {
  y.resize(static_cast<std::size_t>(batch * out));
  for (Int i = 0; i < batch; ++i) std::copy(bias.begin(), bias.end(), y.begin() + i * out);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(batch),
              static_cast<int>(out), static_cast<int>(in), 1.0f, x.data(), static_cast<int>(in), w,
              static_cast<int>(in), 1.0f, y.data(), static_cast<int>(out));
}

// dw[out x in] = dy^T[out x batch] x[batch x in] and dbias = the columns' sums of dy.
void WeightGradient(const std::vector<float>& dy, const std::vector<float>& x, Int batch, Int in,
                    Int out, std::vector<float>& dw, std::vector<float>& dbias) {
  dw.resize(static_cast<std::size_t>(out * in));
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, static_cast<int>(out), static_cast<int>(in),
              static_cast<int>(batch), 1.0f, dy.data(), static_cast<int>(out), x.data(),
              static_cast<int>(in), 0.0f, dw.data(), static_cast<int>(in));
  dbias.assign(static_cast<std::size_t>(out), 0.0f);
  for (Int i = 0; i < batch; ++i) {
    for (Int j = 0; j < out; ++j) dbias[j] += dy[i * out + j];
  }
}

// dx[batch x in] = dy[batch x out] w[out x in].
void InputGradient(const std::vector<float>& dy, const float* w, Int batch, Int in, Int out,
                   std::vector<float>& dx) {
  dx.resize(static_cast<std::size_t>(batch * in));
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(batch),
              static_cast<int>(in), static_cast<int>(out), 1.0f, dy.data(), static_cast<int>(out),
              w, static_cast<int>(in), 0.0f, dx.data(), static_cast<int>(in));
}

void Silu(const std::vector<float>& pre, std::vector<float>& h) {
  h.resize(pre.size());
  for (std::size_t i = 0; i < pre.size(); ++i) h[i] = pre[i] / (1.0f + std::exp(-pre[i]));
}

// dh becomes the gradient by `pre`: silu' = s + pre s (1 - s), s the sigmoid.
void SiluGradient(const std::vector<float>& pre, std::vector<float>& dh) {
  for (std::size_t i = 0; i < pre.size(); ++i) {
    const float s = 1.0f / (1.0f + std::exp(-pre[i]));
    dh[i] *= s + pre[i] * s * (1.0f - s);
  }
}

void Round(ActivationGradients precision, std::vector<float>& values) {
  if (precision == ActivationGradients::kF32) return;
  for (float& value : values) value = kernels::F16ToFloat(kernels::FloatToF16(value));
}

// Logits to probabilities in place; the summed negative log-likelihood of the targets.
double Softmax(const Batch& batch, Int context, Int vocabulary, std::vector<float>& logits) {
  double loss = 0;
  for (std::size_t i = 0; i < batch.starts.size(); ++i) {
    float* row = logits.data() + static_cast<Int>(i) * vocabulary;
    const float largest = *std::max_element(row, row + vocabulary);
    const Int target = (*batch.text)[static_cast<std::size_t>(batch.starts[i] + context)];
    const double target_logit = row[target] - largest;
    double sum = 0;
    for (Int j = 0; j < vocabulary; ++j) sum += row[j] = std::exp(row[j] - largest);
    for (Int j = 0; j < vocabulary; ++j) row[j] = static_cast<float>(row[j] / sum);
    loss += std::log(sum) - target_logit;
  }
  return loss;
}

// Uniform in (-limit, limit) from the generator's bits alone, unlike std's distributions.
void FillUniform(std::mt19937_64& random, double limit, std::vector<float>& values) {
  for (float& value : values) {
    const double unit = static_cast<double>(random() >> 11) * 0x1p-53;
    value = static_cast<float>((2 * unit - 1) * limit);
  }
}

}  // namespace

Model::Model(const ModelShape& shape, std::uint64_t seed) : shape_(shape) {
  openblas_set_num_threads(1);
  const Int in = shape.context * shape.width;
  const Int hidden = shape.hidden;
  parameters_ = {
      {"embedding", {shape.vocabulary, shape.width}, Role::kEmbedding, {}},
      {"hidden.0", {hidden, in}, Role::kHidden, {}},
      {"bias.0", {hidden}, Role::kBias, {}},
      {"hidden.1", {hidden, hidden}, Role::kHidden, {}},
      {"bias.1", {hidden}, Role::kBias, {}},
      {"lm_head", {shape.vocabulary, hidden}, Role::kLmHead, {}},
      {"lm_head.bias", {shape.vocabulary}, Role::kBias, {}},
  };
  std::mt19937_64 random(seed);
  for (ModelParameter& parameter : parameters_) {
    const bool matrix = parameter.shape.size() == 2;
    const Int elements = parameter.shape[0] * (matrix ? parameter.shape[1] : 1);
    parameter.value.assign(static_cast<std::size_t>(elements), 0.0f);
    if (!matrix) continue;
    const double variance =
        parameter.role == Role::kEmbedding ? 1.0 : 1.0 / static_cast<double>(parameter.shape[1]);
    FillUniform(random, std::sqrt(3 * variance), parameter.value);
  }
}

double Model::Forward(const Batch& batch) {
  const auto examples = static_cast<Int>(batch.starts.size());
  const Int in = shape_.context * shape_.width;
  act_.x.resize(static_cast<std::size_t>(examples * in));
  for (Int i = 0; i < examples; ++i) {
    for (Int n = 0; n < shape_.context; ++n) {
      const Int token = (*batch.text)[static_cast<std::size_t>(batch.starts[i] + n)];
      std::copy_n(Value(kEmbedding) + token * shape_.width, shape_.width,
                  act_.x.begin() + i * in + n * shape_.width);
    }
  }
  Affine(act_.x, Value(kHidden0), parameters_[kBias0].value, examples, in, shape_.hidden,
         act_.pre1);
  Silu(act_.pre1, act_.h1);
  Affine(act_.h1, Value(kHidden1), parameters_[kBias1].value, examples, shape_.hidden,
         shape_.hidden, act_.pre2);
  Silu(act_.pre2, act_.h2);
  Affine(act_.h2, Value(kHead), parameters_[kHeadBias].value, examples, shape_.hidden,
         shape_.vocabulary, act_.probabilities);
  return Softmax(batch, shape_.context, shape_.vocabulary, act_.probabilities) /
         static_cast<double>(examples);
}

double Model::Loss(const Batch& batch) { return Forward(batch); }

double Model::Gradient(const Batch& batch, double loss_scale, ActivationGradients precision,
                       std::vector<std::vector<float>>& gradients) {
  const double loss = Forward(batch);
  gradients.resize(kCount);
  const auto examples = static_cast<Int>(batch.starts.size());
  const Int in = shape_.context * shape_.width;

  // By the logits: (probability - 1 at the target) times the scale, over the number of examples.
  std::vector<float>& dlogits = act_.probabilities;
  const auto factor = static_cast<float>(loss_scale / static_cast<double>(examples));
  for (Int i = 0; i < examples; ++i) {
    const Int target = (*batch.text)[static_cast<std::size_t>(batch.starts[i] + shape_.context)];
    dlogits[i * shape_.vocabulary + target] -= 1.0f;
  }
  for (float& value : dlogits) value *= factor;
  Round(precision, dlogits);
  WeightGradient(dlogits, act_.h2, examples, shape_.hidden, shape_.vocabulary, gradients[kHead],
                 gradients[kHeadBias]);

  std::vector<float> dh2, dh1, dx;
  InputGradient(dlogits, Value(kHead), examples, shape_.hidden, shape_.vocabulary, dh2);
  SiluGradient(act_.pre2, dh2);
  Round(precision, dh2);
  WeightGradient(dh2, act_.h1, examples, shape_.hidden, shape_.hidden, gradients[kHidden1],
                 gradients[kBias1]);

  InputGradient(dh2, Value(kHidden1), examples, shape_.hidden, shape_.hidden, dh1);
  SiluGradient(act_.pre1, dh1);
  Round(precision, dh1);
  WeightGradient(dh1, act_.x, examples, in, shape_.hidden, gradients[kHidden0],
                 gradients[kBias0]);

  InputGradient(dh1, Value(kHidden0), examples, in, shape_.hidden, dx);
  Round(precision, dx);
  std::vector<float>& dembedding = gradients[kEmbedding];
  dembedding.assign(parameters_[kEmbedding].value.size(), 0.0f);
  for (Int i = 0; i < examples; ++i) {
    for (Int n = 0; n < shape_.context; ++n) {
      const Int token = (*batch.text)[static_cast<std::size_t>(batch.starts[i] + n)];
      const float* from = dx.data() + i * in + n * shape_.width;
      float* to = dembedding.data() + token * shape_.width;
      for (Int j = 0; j < shape_.width; ++j) to[j] += from[j];
    }
  }
  return loss;
}

}  // namespace muond::char_lm
