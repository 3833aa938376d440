#include "server/registry/spec_diff.h"

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace muond {
namespace {

std::string Text(bool value) { return value ? "true" : "false"; }
std::string Text(std::int64_t value) { return absl::StrCat(value); }
std::string Text(double value) { return absl::StrFormat("%.17g", value); }
std::string Text(const std::string& value) { return absl::StrFormat("\"%s\"", value); }
std::string Text(const Dims& value) { return DimsToString(value); }
std::string Text(Dtype value) { return std::string(kernels::DtypeName(value)); }
std::string Text(Kind value) { return std::string(KindName(value)); }
std::string Text(Role value) { return std::string(RoleName(value)); }
std::string Text(Algorithm value) { return std::string(AlgorithmName(value)); }
std::string Text(TieReduction value) { return value == TieReduction::kSum ? "sum" : "same"; }
std::string Text(ClipPolicy value) { return value == ClipPolicy::kAll ? "all" : "adamw_only"; }
std::string Text(Reduction value) { return value == Reduction::kMean ? "mean" : "sum"; }

std::string Text(WeightDecayForm value) {
  return value == WeightDecayForm::kDecoupled ? "decoupled" : "independent";
}

std::string Text(ShapeFactor value) {
  switch (value) {
    case ShapeFactor::kOriginal:
      return "original";
    case ShapeFactor::kMatchRmsAdamW:
      return "match_rms_adamw";
    case ShapeFactor::kUnitRms:
      return "unit_rms";
    case ShapeFactor::kSpectralMax:
      return "spectral_max";
    case ShapeFactor::kNone:
      return "none";
  }
  return "unknown";
}

std::string Text(LossScaleMode value) {
  switch (value) {
    case LossScaleMode::kNone:
      return "none";
    case LossScaleMode::kStatic:
      return "static";
    case LossScaleMode::kDynamic:
      return "dynamic";
    case LossScaleMode::kExternal:
      return "external";
  }
  return "unknown";
}

std::string Text(LossScalePolicy value) {
  switch (value) {
    case LossScalePolicy::kTorch:
      return "torch";
    case LossScalePolicy::kDeepSpeed:
      return "deepspeed";
    case LossScalePolicy::kMegatron:
      return "megatron";
  }
  return "unknown";
}

std::string Text(const std::optional<Dims>& value) {
  return value.has_value() ? DimsToString(*value) : "none";
}

std::string Text(const std::vector<double>& value) {
  std::string text = "[";
  for (const double number : value) absl::StrAppend(&text, text == "[" ? "" : ", ", Text(number));
  return text + "]";
}

// Keeps the first difference that it is shown.
class Differ {
 public:
  bool found() const { return !text_.empty(); }
  const std::string& text() const { return text_; }

  template <typename T>
  void Field(const std::string& field, const T& run, const T& sent) {
    if (found() || run == sent) return;
    text_ = absl::StrFormat("%s: the run has %s, this rank sent %s", field, Text(run), Text(sent));
  }

  // Two lists of named things, in order: `each` compares two of the same name.
  template <typename T, typename Each>
  void List(const char* what, const std::vector<T>& run, const std::vector<T>& sent, Each&& each) {
    for (std::size_t i = 0; !found() && i < run.size() && i < sent.size(); ++i) {
      if (run[i] == sent[i]) continue;
      const std::string number = absl::StrFormat("%s %d", what, i);
      if constexpr (std::is_same_v<T, RoutingRule>) {
        each(number, run[i], sent[i]);
      } else {
        Field(number, run[i].name, sent[i].name);
        each(absl::StrFormat("%s \"%s\"", what, run[i].name), run[i], sent[i]);
      }
    }
    Field(absl::StrFormat("number of %ss", what), static_cast<std::int64_t>(run.size()),
          static_cast<std::int64_t>(sent.size()));
  }

 private:
  std::string text_;
};

void DiffParameter(const std::string& at, const ParameterSpec& run, const ParameterSpec& sent,
                   Differ* differ) {
  differ->Field(at + ": shape", run.shape, sent.shape);
  differ->Field(at + ": allow_empty", run.allow_empty, sent.allow_empty);
  differ->Field(at + ": dtype", run.dtype, sent.dtype);
  differ->Field(at + ": group", run.group, sent.group);
  differ->Field(at + ": kind", run.kind, sent.kind);
  differ->Field(at + ": role", run.role, sent.role);
  differ->Field(at + ": exclude", run.exclude, sent.exclude);
  differ->Field(at + ": replicated", run.replicated, sent.replicated);
  differ->Field(at + ": tie", run.tie, sent.tie);
  differ->Field(at + ": tie_reduction", run.tie_reduction, sent.tie_reduction);
  differ->Field(at + ": split: sizes", run.split.sizes, sent.split.sizes);
  differ->Field(at + ": split: groups", run.split.groups, sent.split.groups);
  differ->Field(at + ": split: interleaved", run.split.interleaved, sent.split.interleaved);
  differ->Field(at + ": split: per_head", run.split.per_head, sent.split.per_head);
}

void DiffHyperparameters(const std::string& at, const Hyperparameters& run,
                         const Hyperparameters& sent, Differ* differ) {
  differ->Field(at + ": lr", run.lr, sent.lr);
  differ->Field(at + ": weight_decay", run.weight_decay, sent.weight_decay);
  differ->Field(at + ": momentum", run.momentum, sent.momentum);
  differ->Field(at + ": beta1", run.beta1, sent.beta1);
  differ->Field(at + ": beta2", run.beta2, sent.beta2);
  differ->Field(at + ": eps", run.eps, sent.eps);
}

void DiffGroup(const std::string& at, const GroupSpec& run, const GroupSpec& sent, Differ* differ) {
  differ->Field(at + ": algorithm", run.algorithm, sent.algorithm);
  DiffHyperparameters(at + ": muon", run.muon, sent.muon, differ);
  DiffHyperparameters(at + ": adamw", run.adamw, sent.adamw, differ);
  differ->Field(at + ": nesterov", run.nesterov, sent.nesterov);
  differ->Field(at + ": momentum_sum_form", run.momentum_sum_form, sent.momentum_sum_form);
  differ->Field(at + ": momentum_dtype", run.momentum_dtype, sent.momentum_dtype);
  differ->Field(at + ": coefficients", run.coefficients, sent.coefficients);
  differ->Field(at + ": custom_steps", run.custom_steps, sent.custom_steps);
  differ->Field(at + ": ns_steps", run.ns_steps, sent.ns_steps);
  differ->Field(at + ": ns_method", run.ns_method, sent.ns_method);
  differ->Field(at + ": norm_floor", run.norm_floor, sent.norm_floor);
  differ->Field(at + ": shape_factor", run.shape_factor, sent.shape_factor);
  differ->Field(at + ": extra_factor", run.extra_factor, sent.extra_factor);
  differ->Field(at + ": weight_decay_form", run.weight_decay_form, sent.weight_decay_form);
}

void DiffLossScale(const LossScaleSpec& run, const LossScaleSpec& sent, Differ* differ) {
  differ->Field("loss_scale: mode", run.mode, sent.mode);
  differ->Field("loss_scale: policy", run.policy, sent.policy);
  differ->Field("loss_scale: initial", run.initial, sent.initial);
  differ->Field("loss_scale: growth_factor", run.growth_factor, sent.growth_factor);
  differ->Field("loss_scale: backoff_factor", run.backoff_factor, sent.backoff_factor);
  differ->Field("loss_scale: window", run.window, sent.window);
  differ->Field("loss_scale: hysteresis", run.hysteresis, sent.hysteresis);
  differ->Field("loss_scale: minimum", run.minimum, sent.minimum);
  differ->Field("loss_scale: error_after", run.error_after, sent.error_after);
}

}  // namespace

std::string FirstDifference(const RunSpec& run, const RunSpec& sent) {
  if (run == sent) return "";
  Differ differ;
  differ.Field("name", run.name, sent.name);
  differ.Field("world_size", run.world_size, sent.world_size);
  differ.List("parameter", run.parameters, sent.parameters,
              [&](const std::string& at, const ParameterSpec& a, const ParameterSpec& b) {
                DiffParameter(at, a, b, &differ);
              });
  differ.List("group", run.groups, sent.groups,
              [&](const std::string& at, const GroupSpec& a, const GroupSpec& b) {
                DiffGroup(at, a, b, &differ);
              });
  differ.List("rule", run.rules, sent.rules,
              [&](const std::string& at, const RoutingRule& a, const RoutingRule& b) {
                differ.Field(at + ": pattern", a.pattern, b.pattern);
                differ.Field(at + ": algorithm", a.algorithm, b.algorithm);
              });
  DiffLossScale(run.loss_scale, sent.loss_scale, &differ);
  differ.Field("max_grad_norm", run.max_grad_norm, sent.max_grad_norm);
  differ.Field("clip_policy", run.clip_policy, sent.clip_policy);
  differ.Field("grad_norm_skip_threshold", run.grad_norm_skip_threshold,
               sent.grad_norm_skip_threshold);
  differ.Field("reduce_ranks", run.reduce_ranks, sent.reduce_ranks);
  differ.Field("reduce_micro_batches", run.reduce_micro_batches, sent.reduce_micro_batches);
  // The specs differ, so silence means that a field is missing above; refuse all the same.
  return differ.found() ? differ.text() : "the specifications differ";
}

}  // namespace muond
