#include "client/bench/model.h"

#include <charconv>
#include <map>
#include <set>
#include <string_view>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond::bench {
namespace {

constexpr std::string_view kCustom = "custom:";
constexpr std::int64_t kMaxCount = 100'000;

void AddMatrix(Model& model, const std::string& name, std::int64_t rows, std::int64_t cols,
               Role role = Role::kHidden) {
  model.tensors.push_back({name, {rows, cols}, Kind::kMatrix, role});
}

void AddNorm(Model& model, const std::string& name, std::int64_t width) {
  model.tensors.push_back({name, {width}, Kind::kVector, Role::kNorm});
}

// A GPT: fused qkv, projection, fc and back in every layer.
Model Gpt(const std::string& name, int layers, std::int64_t width, std::int64_t vocabulary,
          std::int64_t positions) {
  Model model{.name = name, .tensors = {}};
  AddMatrix(model, "wte", vocabulary, width, Role::kEmbedding);
  AddMatrix(model, "wpe", positions, width, Role::kEmbedding);
  for (int i = 0; i < layers; ++i) {
    const std::string layer = absl::StrFormat("h.%d.", i);
    AddMatrix(model, layer + "attn.qkv", 3 * width, width);
    AddMatrix(model, layer + "attn.proj", width, width);
    AddMatrix(model, layer + "mlp.fc", 4 * width, width);
    AddMatrix(model, layer + "mlp.proj", width, 4 * width);
  }
  return model;
}

// A Llama: q and o of the hidden width, k and v narrower, gate, up and down.
Model Llama(const std::string& name, int layers, std::int64_t width, std::int64_t kv_width,
            std::int64_t ffn, std::int64_t vocabulary) {
  Model model{.name = name, .tensors = {}};
  AddMatrix(model, "embed", vocabulary, width, Role::kEmbedding);
  for (int i = 0; i < layers; ++i) {
    const std::string layer = absl::StrFormat("layers.%d.", i);
    AddNorm(model, layer + "attn_norm", width);
    AddMatrix(model, layer + "q", width, width);
    AddMatrix(model, layer + "k", kv_width, width);
    AddMatrix(model, layer + "v", kv_width, width);
    AddMatrix(model, layer + "o", width, width);
    AddNorm(model, layer + "ffn_norm", width);
    AddMatrix(model, layer + "gate", ffn, width);
    AddMatrix(model, layer + "up", ffn, width);
    AddMatrix(model, layer + "down", width, ffn);
  }
  AddNorm(model, "norm", width);
  return model;
}

// "ROWSxCOLS" or "ROWSxCOLSxCOUNT" as three positive numbers.
absl::StatusOr<Dims> ParseShape(std::string_view text) {
  const auto bad = [text] {
    return absl::InvalidArgumentError(absl::StrFormat(
        "model custom: \"%s\": expected ROWSxCOLS or ROWSxCOLSxCOUNT, positive numbers", text));
  };
  Dims numbers;
  const char* at = text.data();
  const char* end = text.data() + text.size();
  while (true) {
    std::int64_t number = 0;
    const auto [rest, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number <= 0) return bad();
    numbers.push_back(number);
    if (rest == end) break;
    if (*rest != 'x') return bad();
    at = rest + 1;
  }
  if (numbers.size() == 2) numbers.push_back(1);
  if (numbers.size() != 3 || numbers[2] > kMaxCount) return bad();
  MUOND_RETURN_IF_ERROR(ElementCount(numbers).status());  // all of them together, overflow included
  return numbers;
}

absl::StatusOr<Model> Custom(const std::string& name) {
  Model model{.name = name, .tensors = {}};
  std::string_view list = std::string_view(name).substr(kCustom.size());
  while (true) {
    const std::size_t comma = list.find(',');
    MUOND_ASSIGN_OR_RETURN(const Dims shape, ParseShape(list.substr(0, comma)));
    for (std::int64_t i = 0; i < shape[2]; ++i) {
      AddMatrix(model, absl::StrFormat("w%d", model.tensors.size()), shape[0], shape[1]);
    }
    if (comma == std::string_view::npos) return model;
    list.remove_prefix(comma + 1);
  }
}

}  // namespace

std::int64_t Model::Elements() const {
  std::int64_t sum = 0;
  for (const ModelTensor& tensor : tensors) {
    std::int64_t product = 1;
    for (const std::int64_t dim : tensor.shape) product *= dim;
    sum += product;
  }
  return sum;
}

absl::StatusOr<Model> ParseModel(const std::string& name) {
  if (name == "tiny") return Gpt(name, 2, 64, 256, 32);
  if (name == "gpt2") return Gpt(name, 12, 768, 50304, 1024);
  if (name == "llama1b") return Llama(name, 16, 2048, 512, 8192, 128256);
  if (name == "7b8") return Llama(name, 8, 4096, 4096, 11008, 32000);
  if (name.starts_with(kCustom)) return Custom(name);
  return absl::InvalidArgumentError(absl::StrFormat(
      "model \"%s\": expected tiny, gpt2, llama1b, 7b8 or custom:ROWSxCOLS[xCOUNT],...", name));
}

RunSpec MakeRunSpec(const Model& model, const std::string& run, Dtype dtype) {
  RunSpec spec;
  spec.name = run;
  spec.groups.emplace_back().name = "all";
  for (const ModelTensor& tensor : model.tensors) {
    ParameterSpec& parameter = spec.parameters.emplace_back();
    parameter.name = tensor.name;
    parameter.shape = tensor.shape;
    parameter.dtype = dtype;
    parameter.group = "all";
    parameter.kind = tensor.kind;
    parameter.role = tensor.role;
  }
  return spec;
}

}  // namespace muond::bench
