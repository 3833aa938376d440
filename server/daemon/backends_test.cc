#include "server/daemon/backends.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two H200 and a V100, which this build has no code for.
kernels::CudaDevices ThreeDevices() {
  return {
      .devices = {
          {.ordinal = 0,
           .name = "NVIDIA H200",
           .uuid = "GPU-11112222-0000",
           .capability_major = 9,
           .usable = true},
          {.ordinal = 1, .name = "NVIDIA V100", .uuid = "GPU-33334444-0000", .capability_major = 7},
          {.ordinal = 2,
           .name = "NVIDIA H200",
           .uuid = "GPU-11115555-0000",
           .capability_major = 9,
           .usable = true}}};
}

std::vector<int> Selected(const std::vector<std::string>& wanted) {
  const auto devices = SelectDevices(ThreeDevices(), wanted);
  EXPECT_TRUE(devices.ok()) << devices.status();
  std::vector<int> ordinals;
  for (const kernels::CudaDevice& device : *devices) ordinals.push_back(device.ordinal);
  return ordinals;
}

absl::Status Refused(const kernels::CudaDevices& found, const std::string& word) {
  const auto devices = SelectDevices(found, {word});
  EXPECT_FALSE(devices.ok());
  return devices.status();
}

TEST(SelectDevices, AllAreThoseThatAreUsable) { EXPECT_THAT(Selected({"all"}), ElementsAre(0, 2)); }

TEST(SelectDevices, OrdinalsAndUuidsNameThemInAnyOrder) {
  EXPECT_THAT(Selected({"2", "0"}), ElementsAre(0, 2));
  EXPECT_THAT(Selected({"GPU-11115555-0000"}), ElementsAre(2));
  EXPECT_THAT(Selected({"GPU-11112"}), ElementsAre(0));
}

TEST(SelectDevices, RefusalsNameTheDevice) {
  const absl::Status missing = Refused(ThreeDevices(), "3");
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()),
              HasSubstr("no device \"3\": there is device 0 (NVIDIA H200, GPU-11112222-0000), "));
  EXPECT_EQ(Refused(ThreeDevices(), "all0").code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(Refused(ThreeDevices(), "GPU-1111").message()),
              HasSubstr("\"GPU-1111\" names 2 devices"));
  const absl::Status old = Refused(ThreeDevices(), "1");
  EXPECT_EQ(old.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(old.message()), HasSubstr("compute capability 7.0"));
  EXPECT_THAT(std::string(SelectDevices(ThreeDevices(), {"0", "GPU-11112222"}).status().message()),
              HasSubstr("named twice"));
  EXPECT_THAT(std::string(Refused({.why_none = "no driver"}, "0").message()),
              HasSubstr("no device \"0\": no driver"));
}

TEST(MakeBackends, HostBackendsAreToBeHadAnywhere) {
  for (const char* name : {"cpu", "reference"}) {
    const auto backends = MakeBackends({.backend = name, .options = {.threads = 1}});
    ASSERT_TRUE(backends.ok()) << backends.status();
    ASSERT_EQ(backends->list.size(), 1u);
    EXPECT_EQ(backends->list[0]->name(), name);
  }
}

TEST(MakeBackends, WordsThatMeanNothingAreRefused) {
  EXPECT_EQ(MakeBackends({.backend = "gpu"}).status().message(),
            "backend: expected auto, cuda, cpu or reference, got \"gpu\"");
  EXPECT_EQ(MakeBackends({.backend = "cpu", .devices = {"0"}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeBackends({.backend = "cpu", .cpu_products = "f16"}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// One of the two happens on any machine, and each says why.
TEST(MakeBackends, AutoTakesWhatThereIsAndCudaInsists) {
  const bool there = kernels::ListCudaDevices().devices.size() > 0;
  const auto automatic = MakeBackends({.backend = "auto", .options = {.threads = 1}});
  const auto forced = MakeBackends({.backend = "cuda"});
  const auto named = MakeBackends({.backend = "auto", .devices = {"77"}});
  EXPECT_EQ(named.status().code(), absl::StatusCode::kNotFound) << "never the CPU instead";
  ASSERT_TRUE(automatic.ok()) << automatic.status();
  if (there) {
    EXPECT_EQ(automatic->list[0]->name(), "cuda");
    EXPECT_TRUE(forced.ok()) << forced.status();
    return;
  }
  EXPECT_EQ(automatic->list[0]->name(), "cpu");
  EXPECT_THAT(automatic->why, HasSubstr("no CUDA here: "));
  EXPECT_EQ(forced.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(forced.status().message()), HasSubstr("backend cuda: "));
}

}  // namespace
}  // namespace muond
