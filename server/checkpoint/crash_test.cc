// The power goes, the disk fills, the device fails: after every single operation of a save, what-
// ever of it survives, the newest complete checkpoint loads and nothing partial is visible.
#include <string>
#include <tuple>

#include "server/checkpoint/checkpoint_for_test.h"
#include "server/checkpoint/memory_file_system_for_test.h"

namespace muond::checkpoint {
namespace {

constexpr int kSeeds = 12;

MemoryFileSystem::Fault PowerOffAfter(int operations) {
  return [operations](int number, const std::string&) {
    return number < operations ? absl::OkStatus() : absl::UnavailableError("the power is off");
  };
}

// Two checkpoints are there, of steps 1 and 2, by two daemons.
class Crash : public ::testing::Test {
 protected:
  void Prepare() {
    files_ = std::make_unique<MemoryFileSystem>();
    ASSERT_TRUE(Save(*files_, 1).ok());
    ASSERT_TRUE(Save(*files_, 2).ok());
  }

  int OperationsOfASave() {
    Prepare();
    files_->SetFault(PowerOffAfter(1 << 20));
    EXPECT_TRUE(Save(*files_, 3).ok());
    return files_->operations();
  }

  // Every complete one holds what was saved, bit for bit; the newest is of one of the steps.
  void ExpectWhole(std::int64_t oldest, std::int64_t newest, const std::string& story) {
    SCOPED_TRACE(story);
    const auto listed = Store(*files_, "r").List();
    ASSERT_TRUE(listed.ok()) << listed.status();
    ASSERT_FALSE(listed->empty());
    for (const Listed& one : *listed) {
      EXPECT_TRUE(one.status.ok()) << one.name << " is visible in part: " << one.status;
      if (!one.status.ok()) continue;
      const absl::Status loaded = LoadAndCompare(*files_, {"r", one.name}, *one.manifest);
      EXPECT_TRUE(loaded.ok()) << one.name << ": " << loaded;
    }
    const std::int64_t step = listed->front().manifest->control.step;
    EXPECT_GE(step, oldest);
    EXPECT_LE(step, newest);
  }

  // Life goes on: a later save succeeds, and nothing is left of the earlier one.
  void ExpectGoesOn(const std::string& story) {
    SCOPED_TRACE(story);
    files_->SetFault(nullptr);
    const auto saved = Save(*files_, 4);
    ASSERT_TRUE(saved.ok()) << saved.status();
    ExpectWhole(4, 4, story);
    EXPECT_EQ(files_->List({"r"})->size(), 2u);
  }

  std::unique_ptr<MemoryFileSystem> files_;
};

TEST_F(Crash, PowerCutAfterEveryOperation) {
  const int operations = OperationsOfASave();
  ASSERT_GT(operations, 20);
  for (int cut = 0; cut <= operations; ++cut) {
    for (int seed = 0; seed < kSeeds; ++seed) {
      Prepare();
      files_->SetFault(PowerOffAfter(cut));
      const bool saved = Save(*files_, 3).ok();
      files_->CutPower(seed);
      const std::string story = absl::StrFormat("cut after %d, seed %d", cut, seed);
      ExpectWhole(saved ? 3 : 2, 3, story);
      ExpectGoesOn(story);
      if (HasFailure()) return;
    }
  }
}

// Once it was published it stays, though nothing was written since.
TEST_F(Crash, APublishedCheckpointSurvivesAnyCut) {
  for (int seed = 0; seed < 100; ++seed) {
    Prepare();
    files_->CutPower(seed);
    ExpectWhole(2, 2, absl::StrFormat("seed %d", seed));
    if (HasFailure()) return;
  }
}

using Failing = std::tuple<const char*, absl::StatusCode, bool>;
class Failure : public Crash, public ::testing::WithParamInterface<Failing> {};

// One operation of the kind fails, or all from there on; then the power goes as well.
TEST_P(Failure, OfEveryOperationLeavesTheOthersAlone) {
  const auto& [kind, code, lasting] = GetParam();
  const int operations = OperationsOfASave();
  int failed = 0;
  for (int at = 0; at < operations; ++at) {
    Prepare();
    bool hit = false;
    files_->SetFault([&, kind = kind, code = code, lasting = lasting](
                         int number, const std::string& operation) {
      const bool now = lasting ? number >= at : number == at;
      if (!now || (std::string(kind) != "any" && operation != kind)) return absl::OkStatus();
      hit = true;
      return absl::Status(code, "injected");
    });
    const auto saved = Save(*files_, 3);
    if (!hit) continue;
    ++failed;
    const std::string story = absl::StrFormat("%s fails at %d", kind, at);
    EXPECT_FALSE(saved.ok()) << story;
    files_->SetFault(nullptr);
    ExpectWhole(2, 3, story);
    files_->CutPower(at);
    ExpectWhole(2, 3, story);
    ExpectGoesOn(story);
    if (HasFailure()) return;
  }
  EXPECT_GT(failed, 0);
}
INSTANTIATE_TEST_SUITE_P(
    Kinds, Failure,
    ::testing::Values(Failing{"any", absl::StatusCode::kDataLoss, false},  // EIO
                      Failing{"any", absl::StatusCode::kPermissionDenied, true},  // read-only
                      Failing{"write", absl::StatusCode::kResourceExhausted, true},  // disk full
                      Failing{"mkdir", absl::StatusCode::kResourceExhausted, true},
                      Failing{"fsync", absl::StatusCode::kDataLoss, false},
                      Failing{"syncdir", absl::StatusCode::kDataLoss, false},
                      Failing{"rename", absl::StatusCode::kDataLoss, false},
                      Failing{"remove", absl::StatusCode::kDataLoss, true}));

// A bit that flips in any byte of the newest is found, and the one before still loads.
TEST_F(Crash, EveryFlippedBitIsFound) {
  for (const char* name : {"manifest.json", "part-0-0.safetensors", "part-1-0.safetensors"}) {
    Prepare();
    const auto size = static_cast<std::size_t>((*files_->Open({"r", "ckpt-2", name}))->size());
    for (std::size_t byte = 0; byte < size; byte += 11) {
      files_->Damage({"r", "ckpt-2", name}, byte);
      const auto listed = Store(*files_, "r").List();
      ASSERT_EQ(listed->size(), 2u);
      const auto damaged = std::find_if(listed->begin(), listed->end(),
                                        [](const Listed& one) { return one.name == "ckpt-2"; });
      const bool found = !damaged->status.ok() ||
                         !Verify(*files_, {"r", "ckpt-2"}, *damaged->manifest).ok();
      ASSERT_TRUE(found) << name << ", byte " << byte;
      const Listed& before = listed->front().name == "ckpt-1" ? listed->front() : listed->back();
      ASSERT_TRUE(LoadAndCompare(*files_, {"r", "ckpt-1"}, *before.manifest).ok());
      files_->Damage({"r", "ckpt-2", name}, byte);  // flipped back
    }
  }
}

}  // namespace
}  // namespace muond::checkpoint
