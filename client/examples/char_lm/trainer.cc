#include "client/examples/char_lm/trainer.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>
#include <random>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/cpp/admin.h"
#include "kernels/tensor.h"
#include "proto/check.h"

namespace muond::char_lm {
namespace {

constexpr char kGroup[] = "weights";
constexpr std::int64_t kValidationBatch = 1024;
constexpr std::int64_t kWarmupSteps = 20;
constexpr double kWeightDecay = 0.01;

// Batches at random places of the training text, the same for every run with the same seed.
class Sampler {
 public:
  Sampler(const Corpus& corpus, const TrainSettings& settings)
      : text_(corpus.train), settings_(settings), random_(settings.seed + 1) {}

  Batch Next() {
    Batch batch{.text = &text_};
    const auto places = static_cast<std::uint64_t>(text_.size()) -
                        static_cast<std::uint64_t>(settings_.shape.context);
    for (std::int64_t i = 0; i < settings_.batch; ++i) {
      batch.starts.push_back(static_cast<std::int64_t>(random_() % places));
    }
    return batch;
  }

 private:
  const Tokens& text_;
  const TrainSettings& settings_;
  std::mt19937_64 random_;
};

RunSpec Spec(const Model& model, const TrainSettings& settings, const TrainJob& job) {
  RunSpec spec;
  spec.name = job.run;
  for (const ModelParameter& parameter : model.parameters()) {
    spec.parameters.push_back({.name = parameter.name,
                               .shape = parameter.shape,
                               .dtype = Dtype::kF16,
                               .group = kGroup,
                               .role = parameter.role});
  }
  spec.groups.push_back(
      {.name = kGroup,
       .algorithm = job.optimizer == Optimizer::kMuon ? Algorithm::kAuto : Algorithm::kAdamW,
       .shape_factor = ShapeFactor::kMatchRmsAdamW});
  spec.loss_scale = {.mode = LossScaleMode::kDynamic,
                     .policy = LossScalePolicy::kTorch,
                     .initial = settings.initial_loss_scale,
                     .window = settings.loss_scale_window};
  return spec;
}

// One run from Register to Close.
class Trainer {
 public:
  Trainer(const Corpus& corpus, const TrainSettings& settings, const TrainJob& job)
      : corpus_(corpus), settings_(settings), job_(job), model_(settings.shape, settings.seed),
        sampler_(corpus, settings) {
    for (const ModelParameter& parameter : model_.parameters()) {
      initial_.push_back(parameter.value);
      half_.emplace_back(parameter.value.size());
    }
  }

  absl::Status Open(const client::SessionOptions& options) {
    RankSlices slices;
    std::vector<client::SliceSource> sources;
    for (const ModelParameter& parameter : model_.parameters()) {
      slices[parameter.name] = {WholeBox(parameter.shape)};
      sources.push_back({.parameter = parameter.name,
                         .data = parameter.value.data(),
                         .elements = static_cast<std::int64_t>(parameter.value.size()),
                         .dtype = Dtype::kF32});
    }
    MUOND_ASSIGN_OR_RETURN(
        session_, client::Session::Open(Spec(model_, settings_, job_), 0, slices, options));
    if (session_->registered().rejoined()) {
      return absl::AlreadyExistsError(absl::StrFormat(
          "run \"%s\": the daemon has it from an earlier start; choose another name with --run",
          job_.run));
    }
    result_.routing = session_->routing();
    MUOND_ASSIGN_OR_RETURN(const bool complete, session_->Initialize(sources));
    if (!complete) {
      return absl::InternalError(absl::StrFormat(
          "run \"%s\": initialize: every value was sent, the daemon misses some", job_.run));
    }
    return Pull(0);
  }

  absl::Status Run(const OnStep& on_step) {
    Validate(0);
    for (std::int64_t step = 1; step <= job_.steps; ++step) {
      const absl::Time start = absl::Now();
      const Batch batch = sampler_.Next();
      const double loss = model_.Gradient(batch, session_->loss_scale(),
                                          ActivationGradients::kF16, gradients_);
      if (step == 1) result_.curve.back().train = loss;
      train_sum_ += loss;
      MUOND_RETURN_IF_ERROR(Step());
      seconds_ += absl::ToDoubleSeconds(absl::Now() - start);
      on_step(step, loss, result_.loss_scale.back());
      if (step % job_.validation_every == 0 || step == job_.steps) Validate(step);
    }
    result_.steps_per_second = static_cast<double>(job_.steps) / seconds_;
    return absl::OkStatus();
  }

  // What the daemon says of the run; then leaves it.
  absl::StatusOr<TrainResult> Conclude(client::Admin& admin) {
    MUOND_ASSIGN_OR_RETURN(const v1::StatusReply status, admin.Status(job_.run));
    if (status.runs_size() != 1) {
      return absl::InternalError(
          absl::StrFormat("run \"%s\": status of %d runs", job_.run, status.runs_size()));
    }
    result_.status = status.runs(0);
    MUOND_ASSIGN_OR_RETURN(const v1::DigestReply digest, admin.Digest(job_.run));
    result_.tensor_digest = digest.tensor_digest();
    result_.control_digest = digest.control_digest();
    MUOND_RETURN_IF_ERROR(FindUnmoved());
    if (!job_.keep_open) MUOND_RETURN_IF_ERROR(session_->Close().status());
    return std::move(result_);
  }

 private:
  absl::Status Step() {
    std::vector<client::SliceSource> sources;
    for (std::size_t p = 0; p < gradients_.size(); ++p) {
      std::transform(gradients_[p].begin(), gradients_[p].end(), half_[p].begin(),
                     kernels::FloatToF16);
      sources.push_back({.parameter = model_.parameters()[p].name,
                         .data = half_[p].data(),
                         .elements = static_cast<std::int64_t>(half_[p].size()),
                         .dtype = Dtype::kF16});
    }
    const Hyperparameters muon{.lr = LearningRate(job_.muon_lr, applied_, job_.steps),
                               .weight_decay = kWeightDecay,
                               .momentum = 0.95};
    const Hyperparameters adamw{.lr = LearningRate(job_.adamw_lr, applied_, job_.steps),
                                .weight_decay = kWeightDecay,
                                .beta2 = 0.99};
    result_.loss_scale.push_back(session_->loss_scale());
    MUOND_ASSIGN_OR_RETURN(
        const StepOutcome outcome,
        session_->Step({.loss_scale = 0, .muon = {{kGroup, muon}}, .adamw = {{kGroup, adamw}}},
                       sources));
    if (!outcome.applied) return absl::OkStatus();  // the parameters are as they were
    ++applied_;
    return Pull(outcome.version);
  }

  absl::Status Pull(std::int64_t version) {
    std::vector<client::SliceSink> sinks;
    for (std::size_t p = 0; p < half_.size(); ++p) {
      sinks.push_back({.parameter = model_.parameters()[p].name,
                       .data = half_[p].data(),
                       .elements = static_cast<std::int64_t>(half_[p].size()),
                       .dtype = Dtype::kF16});
    }
    MUOND_RETURN_IF_ERROR(session_->Pull(version, sinks));
    for (std::size_t p = 0; p < half_.size(); ++p) {
      std::transform(half_[p].begin(), half_[p].end(), model_.parameters()[p].value.begin(),
                     kernels::F16ToFloat);
    }
    return absl::OkStatus();
  }

  void Validate(std::int64_t step) {
    const auto places = static_cast<std::int64_t>(corpus_.validation.size()) -
                        settings_.shape.context;
    const std::int64_t examples = std::min(settings_.validation_examples, places);
    double sum = 0;
    for (std::int64_t first = 0; first < examples; first += kValidationBatch) {
      const std::int64_t end = std::min(first + kValidationBatch, examples);
      Batch batch{.text = &corpus_.validation};
      for (std::int64_t i = first; i < end; ++i) batch.starts.push_back(i * places / examples);
      sum += model_.Loss(batch) * static_cast<double>(end - first);
    }
    const std::int64_t since = result_.curve.empty() ? 0 : step - result_.curve.back().step;
    result_.curve.push_back({.step = step,
                             .train = since > 0 ? train_sum_ / static_cast<double>(since) : 0,
                             .validation = sum / static_cast<double>(examples)});
    train_sum_ = 0;
  }

  absl::Status FindUnmoved() {
    std::vector<client::SliceSink> sinks;
    std::vector<std::vector<float>> masters;
    for (const auto& value : initial_) masters.emplace_back(value.size());
    for (std::size_t p = 0; p < masters.size(); ++p) {
      sinks.push_back({.parameter = model_.parameters()[p].name,
                       .data = masters[p].data(),
                       .elements = static_cast<std::int64_t>(masters[p].size()),
                       .dtype = Dtype::kF32});
    }
    MUOND_RETURN_IF_ERROR(session_->Pull(session_->next_step(), sinks, /*master=*/true));
    for (std::size_t p = 0; p < masters.size(); ++p) {
      if (masters[p] == initial_[p]) result_.unmoved.push_back(model_.parameters()[p].name);
    }
    return absl::OkStatus();
  }

  const Corpus& corpus_;
  const TrainSettings& settings_;
  const TrainJob& job_;
  Model model_;
  Sampler sampler_;
  std::unique_ptr<client::Session> session_;
  std::vector<std::vector<float>> initial_, gradients_;
  std::vector<std::vector<std::uint16_t>> half_;  // gradients on the way out, parameters back
  TrainResult result_;
  std::int64_t applied_ = 0;
  double train_sum_ = 0;  // since the last validation
  double seconds_ = 0;
};

}  // namespace

const char* OptimizerName(Optimizer optimizer) {
  return optimizer == Optimizer::kMuon ? "muon" : "adamw";
}

double LearningRate(double peak, std::int64_t done, std::int64_t steps) {
  const double warmup =
      std::min(1.0, static_cast<double>(done + 1) / static_cast<double>(kWarmupSteps));
  const double phase = std::min(1.0, static_cast<double>(done) / static_cast<double>(steps));
  return peak * warmup * (0.55 + 0.45 * std::cos(std::numbers::pi * phase));
}

absl::StatusOr<TrainResult> Train(const Corpus& corpus, const TrainSettings& settings,
                                  const TrainJob& job, const client::SessionOptions& options,
                                  const OnStep& on_step) {
  Trainer trainer(corpus, settings, job);
  client::Admin admin = options.channel != nullptr
                            ? client::Admin(options.channel, options.call_timeout)
                            : client::Admin(options.endpoint, options.call_timeout, options.tls);
  MUOND_RETURN_IF_ERROR(trainer.Open(options));
  MUOND_RETURN_IF_ERROR(trainer.Run(on_step));
  return trainer.Conclude(admin);
}

double FindOverflowingScale(const Corpus& corpus, const TrainSettings& settings, double from) {
  Model model(settings.shape, settings.seed);
  for (ModelParameter& parameter : model.parameters()) {
    for (float& value : parameter.value) value = kernels::F16ToFloat(kernels::FloatToF16(value));
  }
  const Batch batch = Sampler(corpus, settings).Next();
  std::vector<std::vector<float>> gradients;
  const auto overflows = [](const std::vector<float>& gradient) {
    return std::any_of(gradient.begin(), gradient.end(), [](float value) {
      return !std::isfinite(kernels::F16ToFloat(kernels::FloatToF16(value)));
    });
  };
  double scale = from;
  for (;; scale *= 2) {
    model.Gradient(batch, scale, ActivationGradients::kF16, gradients);
    if (std::any_of(gradients.begin(), gradients.end(), overflows)) return scale;
  }
}

}  // namespace muond::char_lm
