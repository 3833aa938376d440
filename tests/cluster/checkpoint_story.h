// What tests of checkpoints share: a directory that goes away, and a training whose every step
// matters to what follows.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/checkpoint/store.h"
#include "tests/support/cluster_fixture.h"

namespace muond::cluster {

class CheckpointDirectory {
 public:
  CheckpointDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "muond-ckpt-XXXXXX").string();
    MUOND_CHECK(mkdtemp(pattern.data()) != nullptr, "a directory for checkpoints");
    path_ = pattern;
  }
  ~CheckpointDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

  // Complete ones, newest first.
  std::vector<std::string> Names(const std::string& run = "run") const {
    auto files = Must(checkpoint::OpenFileSystem(path_));
    std::vector<std::string> names;
    const auto listed = Must(checkpoint::Store(*files, run).List());
    for (const auto& one : listed) {
      if (one.status.ok()) names.push_back(one.name);
    }
    return names;
  }
  // Until there is one of that name, and at most `count` of them: older ones go after it has come.
  void WaitFor(const std::string& name, std::size_t count = 100) const {
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    for (;;) {
      const auto names = Names();
      const bool there = std::find(names.begin(), names.end(), name) != names.end();
      if (there && names.size() <= count) return;
      MUOND_CHECK(absl::Now() < deadline, name + " did not come");
      absl::SleepFor(absl::Milliseconds(5));
    }
  }
  // Flips a bit in the middle of a file.
  void Damage(const std::string& file) const {
    const std::string path = path_ + "/" + file;
    FILE* opened = fopen(path.c_str(), "r+b");
    MUOND_CHECK(opened != nullptr, path);
    fseek(opened, static_cast<long>(std::filesystem::file_size(path) / 2), SEEK_SET);
    const int byte = fgetc(opened);
    fseek(opened, -1, SEEK_CUR);
    fputc(byte ^ 1, opened);
    fclose(opened);
  }

 private:
  std::string path_;
};

// As /metrics has it.
inline std::string CheckpointsCounted(const std::string& result, int count) {
  return "muond_checkpoints_total{result=\"" + result + "\",run=\"run\"} " +
         std::to_string(count);
}

inline ServiceOptions WithCheckpoints(const CheckpointDirectory& directory) {
  ServiceOptions options{.threads = 1, .peer_patience = absl::Milliseconds(500)};
  options.checkpoint_dir = directory.path();
  return options;
}

// Matrices for Muon, an odd one and a norm; an embedding that AdamW's owners cut.
inline RunSpec StorySpec(bool large = false) {
  std::vector<ParameterSpec> parameters = {Matrix("a", 16, 8), Matrix("b", 5, 3), Matrix("c", 8, 8),
                                           Vector("v", 7)};
  if (large) parameters.push_back(Vector("embed", 600'000));
  RunSpec spec = SpecOf(std::move(parameters));
  spec.loss_scale = {.mode = LossScaleMode::kDynamic,
                     .policy = LossScalePolicy::kDeepSpeed,
                     .initial = 256,
                     .window = 2};
  return spec;
}

// Steps 2 and 5 overflow; "v" is absent from step 1, "b" from step 3: every t is another.
inline StepOutcome StoryStep(TestRun& run, std::int64_t step) {
  Tensors gradients = NoiseFor(run.spec(), 100 + step);
  if (step == 2 || step == 5) gradients["a"][3] = std::numeric_limits<float>::infinity();
  if (step == 1) gradients.erase("v");
  if (step == 3) gradients.erase("b");
  const StepOutcome outcome = run.Step(gradients);
  EXPECT_EQ(outcome.step, step);
  return outcome;
}

inline std::vector<StepOutcome> Story(TestRun& run, std::int64_t first, std::int64_t end) {
  std::vector<StepOutcome> outcomes;
  for (std::int64_t step = first; step < end; ++step) outcomes.push_back(StoryStep(run, step));
  return outcomes;
}

}  // namespace muond::cluster
