// Every trajectory of tests/golden on every backend, step by step, against its fp64 oracle.
//
// Tolerance per step taken, of docs/semantics.md section 8: 5e-6 |update| + 1.2e-7 |W|.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/conformance/kernels_driver.h"
#include "tests/support/golden.h"

namespace muond::kernels {
namespace {

using ::muond::testing::GoldenCase;
using ::muond::testing::GoldenTensor;
using ::muond::testing::ReadGoldenCase;
using testing::BackendCase;
using testing::BackendCases;
using testing::Buffer;
using testing::MuonParameter;
using testing::MuonSettings;

const char* const kCases[] = {"adamw_default",        "adamw_llm",
                              "adamw_tiny_gradients", "muon_default",
                              "muon_large_gradients", "muon_match_rms_adamw",
                              "muon_plain_momentum",  "muon_tiny_gradients"};

std::vector<float> Narrow(const GoldenTensor& tensor) {
  return {tensor.values.begin(), tensor.values.end()};
}

double Norm(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}

// |to - factor from|: the update that the oracle made.
double UpdateNorm(const std::vector<double>& to, const std::vector<double>& from, double factor) {
  std::vector<double> update(to.size());
  for (std::size_t i = 0; i < to.size(); ++i) update[i] = to[i] - factor * from[i];
  return Norm(update);
}

std::string Key(const char* name, std::size_t step, std::size_t parameter) {
  return std::string(name) + "." + std::to_string(step) + "." + std::to_string(parameter);
}

// One parameter of one case, and how far it may be from its oracle by now.
class Trajectory {
 public:
  // `relative`: how far from the oracle's an update may be.
  Trajectory(const GoldenCase& golden, std::size_t parameter, double relative)
      : golden_(golden),
        relative_(relative),
        parameter_(parameter),
        oracle_(golden.at("param." + std::to_string(parameter)).values),
        lr_(golden.settings.at("lr").get<std::vector<double>>()),
        weight_decay_(golden.settings.at("weight_decay").get<double>()) {}

  std::size_t steps() const { return lr_.size(); }
  double lr(std::size_t step) const { return lr_[step]; }
  double weight_decay() const { return weight_decay_; }
  std::vector<float> Start() const {
    return Narrow(golden_.at("param." + std::to_string(parameter_)));
  }
  std::vector<float> Gradient(std::size_t step) const {
    return Narrow(golden_.at(Key("grad", step, parameter_)));
  }

  // `closer`: how much nearer to the oracle than PyTorch's own result we must be.
  void Compare(std::size_t step, const std::vector<float>& w, double closer) {
    const std::vector<double>& next = golden_.at(Key("oracle", step, parameter_)).values;
    allowed_ +=
        relative_ * UpdateNorm(next, oracle_, 1 - lr(step) * weight_decay_) + 1.2e-7 * Norm(next);
    oracle_ = next;
    const double distance = testing::Distance(w, oracle_);
    EXPECT_LE(distance, allowed_) << golden_.name << " parameter " << parameter_ << " step "
                                  << step;
    const std::vector<float> torch = Narrow(golden_.at(Key("param_after", step, parameter_)));
    EXPECT_LE(distance, closer * testing::Distance(torch, oracle_) + 1e-7 * Norm(oracle_))
        << golden_.name << " parameter " << parameter_ << " step " << step << ", against PyTorch";
  }

 private:
  const GoldenCase& golden_;
  double relative_;
  std::size_t parameter_;
  std::vector<double> oracle_;
  std::vector<double> lr_;
  double weight_decay_;
  double allowed_ = 0;
};

void RunMuon(Backend& backend, double floor, const GoldenCase& golden) {
  const nlohmann::json& settings = golden.settings;
  const auto shapes = settings.at("shapes").get<std::vector<std::vector<std::int64_t>>>();
  ASSERT_EQ(settings.at("momentum_form"), "ema");
  const auto coefficients = settings.at("ns_coefficients").get<std::vector<double>>();
  MuonSettings muon;
  muon.momentum.beta = settings.at("momentum").get<double>();
  muon.momentum.nesterov = settings.at("nesterov").get<bool>();
  muon.match_rms_adamw = settings.at("adjust_lr") == "match_rms_adamw";
  muon.newton_schulz.steps.assign(settings.at("ns_steps").get<std::size_t>(),
                                  {coefficients[0], coefficients[1], coefficients[2]});
  muon.newton_schulz.norm_floor = settings.at("eps").get<double>();
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    Trajectory trajectory(golden, i, std::max(5e-6, floor));
    MuonParameter parameter(backend, shapes[i][0], shapes[i][1], trajectory.Start());
    muon.weight_decay = trajectory.weight_decay();
    for (std::size_t step = 0; step < trajectory.steps(); ++step) {
      muon.lr = trajectory.lr(step);
      parameter.Step(trajectory.Gradient(step), muon);
      // PyTorch iterates in bf16: a twentieth of its error is still twenty times that of fp32.
      trajectory.Compare(step, parameter.w(), floor > 0 ? 2 : 0.05);
    }
    const auto& momentum = golden.at("oracle_momentum." + std::to_string(i)).values;
    EXPECT_LE(testing::Distance(parameter.m(), momentum),
              1.2e-7 * static_cast<double>(trajectory.steps()) * Norm(momentum))
        << golden.name << " momentum " << i;
  }
}

void RunAdamW(Backend& backend, const GoldenCase& golden) {
  const nlohmann::json& settings = golden.settings;
  const auto betas = settings.at("betas").get<std::vector<double>>();
  for (std::size_t i = 0; i < settings.at("shapes").size(); ++i) {
    Trajectory trajectory(golden, i, 5e-6);
    const std::vector<float> start = trajectory.Start();
    const Buffer w(backend, start), m(backend, start.size()), v(backend, start.size());
    for (std::size_t step = 0; step < trajectory.steps(); ++step) {
      const AdamWRule rule{.lr = trajectory.lr(step),
                           .beta1 = betas[0],
                           .beta2 = betas[1],
                           .eps = settings.at("eps").get<double>(),
                           .decay = 1 - trajectory.lr(step) * trajectory.weight_decay(),
                           .t = static_cast<std::int64_t>(step) + 1};
      const Buffer gradient(backend, trajectory.Gradient(step));
      testing::AdamWOne(backend, {.gradient = {gradient.get(), Dtype::kF32, start.size(), 1},
                                  .rule = rule,
                                  .state = {w.get(), m.get(), v.get()}});
      trajectory.Compare(step, w.Read(), 2);
    }
    const std::string index = std::to_string(i);
    const auto& exp_avg = golden.at("exp_avg_after." + index).values;
    const auto& exp_avg_sq = golden.at("exp_avg_sq_after." + index).values;
    EXPECT_LE(testing::Distance(m.Read(), exp_avg), 5e-7 * Norm(exp_avg)) << golden.name;
    EXPECT_LE(testing::Distance(v.Read(), exp_avg_sq), 5e-7 * Norm(exp_avg_sq)) << golden.name;
  }
}

class Golden : public ::testing::TestWithParam<std::tuple<BackendCase, const char*>> {};

INSTANTIATE_TEST_SUITE_P(Backends, Golden,
                         ::testing::Combine(::testing::ValuesIn(BackendCases()),
                                            ::testing::ValuesIn(kCases)),
                         [](const ::testing::TestParamInfo<Golden::ParamType>& info) {
                           return std::string(std::get<0>(info.param).name) + "_" +
                                  std::get<1>(info.param);
                         });

TEST_P(Golden, FollowsTheOracle) {
  const auto& [backend_case, name] = GetParam();
  const GoldenCase golden = ReadGoldenCase(name);
  const std::unique_ptr<Backend> backend = testing::MakeOrSkip(backend_case);
  if (backend == nullptr) return;
  if (golden.settings.at("optimizer") == "muon") {
    RunMuon(*backend, backend_case.floor, golden);
  } else {
    RunAdamW(*backend, golden);
  }
}

TEST(GoldenFiles, EveryCaseOfTheFolderIsRun) {
  EXPECT_EQ(::muond::testing::GoldenCaseNames(),
            std::vector<std::string>(std::begin(kCases), std::end(kCases)));
}

}  // namespace
}  // namespace muond::kernels
