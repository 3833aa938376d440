#include "client/models/model.h"

#include <charconv>
#include <string_view>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond::models {
namespace {

constexpr std::string_view kCustom = "custom:";
constexpr std::string_view kSynthetic = "synthetic:";
constexpr std::int64_t kMaxCount = 1'000'000;
constexpr std::int64_t kMaxSide = 65'536;

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

// `text` as positive numbers with an x between them; empty when it is anything else.
Dims ParseNumbers(std::string_view text) {
  Dims numbers;
  const char* at = text.data();
  const char* end = text.data() + text.size();
  while (true) {
    std::int64_t number = 0;
    const auto [rest, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number <= 0) return {};
    numbers.push_back(number);
    if (rest == end) return numbers;
    if (*rest != 'x') return {};
    at = rest + 1;
  }
}

// "ROWSxCOLS[xCOUNT][:adamw|:muon]".
absl::Status AddCustom(Model& model, std::string_view item) {
  const std::size_t colon = item.find(':');
  const std::string_view algorithm =
      colon == std::string_view::npos ? "muon" : item.substr(colon + 1);
  Dims numbers = ParseNumbers(item.substr(0, colon));
  if (numbers.size() == 2) numbers.push_back(1);
  if (numbers.size() != 3 || numbers[2] > kMaxCount ||
      (algorithm != "muon" && algorithm != "adamw")) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "model custom: \"%s\": expected ROWSxCOLS[xCOUNT][:adamw], positive numbers", item));
  }
  MUOND_RETURN_IF_ERROR(ElementCount(numbers).status());  // all of them together, overflow included
  for (std::int64_t i = 0; i < numbers[2]; ++i) {
    AddMatrix(model, absl::StrFormat("w%d", model.tensors.size()), numbers[0], numbers[1],
              algorithm == "muon" ? Role::kHidden : Role::kEmbedding);
  }
  return absl::OkStatus();
}

absl::StatusOr<Model> Custom(const std::string& name) {
  Model model{.name = name, .tensors = {}};
  std::string_view list = std::string_view(name).substr(kCustom.size());
  while (true) {
    const std::size_t comma = list.find(',');
    MUOND_RETURN_IF_ERROR(AddCustom(model, list.substr(0, comma)));
    if (comma == std::string_view::npos) return model;
    list.remove_prefix(comma + 1);
  }
}

absl::StatusOr<Model> Synthetic(const std::string& name) {
  Dims numbers = ParseNumbers(std::string_view(name).substr(kSynthetic.size()));
  if (numbers.size() == 1) numbers.push_back(16);
  if (numbers.size() != 2 || numbers[0] > kMaxCount || numbers[1] < 2 || numbers[1] > kMaxSide) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "model \"%s\": expected synthetic:COUNT[xSIDE], COUNT up to %d, SIDE of 2 to %d", name,
        kMaxCount, kMaxSide));
  }
  Model model{.name = name, .tensors = {}};
  for (std::int64_t i = 0; i < numbers[0]; ++i) {
    if (i % 2 == 0) {
      AddMatrix(model, absl::StrFormat("w%d", i), numbers[1], numbers[1]);
    } else {
      AddNorm(model, absl::StrFormat("b%d", i), numbers[1] * numbers[1]);
    }
  }
  return model;
}

}  // namespace

std::int64_t ModelTensor::Elements() const {
  std::int64_t product = 1;
  for (const std::int64_t dim : shape) product *= dim;
  return product;
}

std::int64_t Model::Elements() const {
  std::int64_t sum = 0;
  for (const ModelTensor& tensor : tensors) sum += tensor.Elements();
  return sum;
}

const char* ModelNames() {
  return "tiny, gpt2, llama1b, llama7b, llama70b, 7b8, custom:ROWSxCOLS[xCOUNT][:adamw],... or "
         "synthetic:COUNT[xSIDE]";
}

absl::StatusOr<Model> ParseModel(const std::string& name) {
  if (name == "tiny") return Gpt(name, 2, 64, 256, 32);
  if (name == "gpt2") return Gpt(name, 12, 768, 50304, 1024);
  if (name == "llama1b") return Llama(name, 16, 2048, 512, 8192, 128256);
  if (name == "llama7b") return Llama(name, 32, 4096, 4096, 11008, 32000);
  if (name == "llama70b") return Llama(name, 80, 8192, 1024, 28672, 32000);
  if (name == "7b8") return Llama(name, 8, 4096, 4096, 11008, 32000);
  if (name.starts_with(kCustom)) return Custom(name);
  if (name.starts_with(kSynthetic)) return Synthetic(name);
  return absl::InvalidArgumentError(
      absl::StrFormat("model \"%s\": expected %s", name, ModelNames()));
}

RunSpec MakeRunSpec(const Model& model, const std::string& run, Dtype dtype,
                    Dtype momentum_dtype) {
  RunSpec spec;
  spec.name = run;
  spec.groups.emplace_back().name = "all";
  spec.groups[0].momentum_dtype = momentum_dtype;
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

}  // namespace muond::models
