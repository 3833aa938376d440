#include "proto/values.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond {
namespace {

using ::testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(ElementCount, IsTheProduct) {
  EXPECT_EQ(*ElementCount({}), 1);
  EXPECT_EQ(*ElementCount({7}), 7);
  EXPECT_EQ(*ElementCount({256, 16, 3, 3}), 36864);
  EXPECT_EQ(*ElementCount({4, 0, 3}), 0);
  EXPECT_EQ(*ElementCount({1, 1, 1, 1, 1, 1, 1, 2}), 2);
}

TEST(ElementCount, RefusesWhatNoMemoryHolds) {
  const std::int64_t big = std::int64_t{1} << 30;
  EXPECT_EQ(*ElementCount({big, big - 1}), big * (big - 1));
  for (const Dims& dims : {Dims{big, big}, Dims{big, big, big}, Dims{std::int64_t{1} << 60},
                           Dims{std::numeric_limits<std::int64_t>::max()},
                           // The product wraps around to 0 in 64 bits.
                           Dims{std::int64_t{1} << 32, std::int64_t{1} << 32},
                           // Empty, but its strides overflow.
                           Dims{0, big, big, big}}) {
    const auto count = ElementCount(dims);
    EXPECT_TRUE(absl::IsInvalidArgument(count.status())) << DimsToString(dims);
    EXPECT_THAT(Message(count.status()), HasSubstr(DimsToString(dims)));
  }
}

TEST(ElementCount, RefusesNegativeDimsAndHighRanks) {
  EXPECT_THAT(Message(ElementCount({4, -1}).status()), HasSubstr("[4, -1] has a negative"));
  EXPECT_THAT(Message(ElementCount(Dims(9, 1)).status()), HasSubstr("rank 9, the largest is 8"));
  // A message stays short whatever was sent.
  EXPECT_LT(Message(ElementCount(Dims(100'000, 1)).status()).size(), 200u);
}

TEST(Box, Text) {
  EXPECT_EQ((Box{{0, 4}, {2, 4}}.ToString()), "[0:2, 4:8]");
  EXPECT_EQ((Box{{0}, {1024}, true}.ToString()), "flat [0:1024]");
  EXPECT_EQ(WholeBox({}).ToString(), "[]");
  EXPECT_EQ(WholeBox({2, 3}), (Box{{0, 0}, {2, 3}}));
}

TEST(ValidateBox, TakesWhatLiesInside) {
  EXPECT_TRUE(ValidateBox(WholeBox({4, 3}), {4, 3}).ok());
  EXPECT_TRUE(ValidateBox(WholeBox({}), {}).ok());
  EXPECT_TRUE(ValidateBox({{2, 1}, {2, 2}}, {4, 3}).ok());
  EXPECT_TRUE(ValidateBox({{4, 0}, {0, 3}}, {4, 3}).ok());
  EXPECT_TRUE(ValidateBox({{5}, {7}, true}, {4, 3}).ok());
  EXPECT_TRUE(ValidateBox({{0}, {1}, true}, {}).ok());
}

TEST(ValidateBox, RefusesWhatDoesNot) {
  const std::int64_t max = std::numeric_limits<std::int64_t>::max();
  for (const Box& box :
       {Box{{2, 1}, {3, 2}}, Box{{0, 0}, {4, 4}}, Box{{-1, 0}, {1, 1}}, Box{{0, 0}, {1, -1}},
        Box{{0}, {4}}, Box{{0, 0, 0}, {1, 1, 1}}, Box{{0, 0}, {1}}, Box{{5}, {8}, true},
        Box{{13}, {0}, true}, Box{{0, 0}, {4, 3}, true}, Box{{}, {}, true}, Box{{max, 0}, {max, 1}},
        Box{{max}, {1}, true}, Box{{1}, {max}, true}}) {
    const absl::Status status = ValidateBox(box, {4, 3});
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << box.ToString();
    EXPECT_THAT(Message(status), HasSubstr("[4, 3]"));
  }
}

// Every index of the box, by counting up the last dimension first.
std::vector<std::int64_t> ElementsOf(const Box& box, const Dims& shape) {
  std::vector<std::int64_t> elements;
  const auto bounds = box.flat ? Dims{*ElementCount(shape)} : shape;
  for (std::int64_t i = 0; i < *ElementCount(bounds); ++i) {
    bool inside = true;
    std::int64_t rest = i;
    for (std::size_t d = bounds.size(); d-- > 0; rest /= bounds[d]) {
      const std::int64_t index = rest % bounds[d];
      inside = inside && index >= box.offset[d] && index < box.offset[d] + box.size[d];
    }
    if (inside) elements.push_back(i);
  }
  return elements;
}

TEST(ForEachRun, VisitsEveryElementOfEveryBoxInOrderInMaximalRuns) {
  std::mt19937 random(7);
  const auto below = [&random](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  for (int round = 0; round < 2000; ++round) {
    Dims shape(below(5));
    for (auto& dim : shape) dim = 1 + below(4);
    Box box;
    box.flat = below(4) == 0;
    for (const std::int64_t bound : box.flat ? Dims{*ElementCount(shape)} : shape) {
      box.offset.push_back(below(bound));
      box.size.push_back(1 + below(bound - box.offset.back()));
    }
    const auto expected = ElementsOf(box, shape);
    ASSERT_EQ(box.Elements(), static_cast<std::int64_t>(expected.size()));
    const std::int64_t first = below(box.Elements());
    const std::int64_t count = below(box.Elements() - first + 1);
    std::int64_t at = first;
    std::int64_t last_end = -1;
    ForEachRun(box, shape, first, count,
               [&](std::int64_t tensor, std::int64_t in_box, std::int64_t n) {
                 EXPECT_EQ(in_box, at);
                 EXPECT_NE(tensor, last_end) << "two runs where one would do";
                 for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(tensor + i, expected[at + i]);
                 at += n;
                 last_end = tensor + n;
               });
    ASSERT_EQ(at, first + count) << box.ToString() << " of " << DimsToString(shape);
  }
}

TEST(ForEachRun, EmptyBoxesHaveNoRuns) {
  const auto fail = [](std::int64_t, std::int64_t, std::int64_t) { ADD_FAILURE(); };
  ForEachRun(Box{{0, 0}, {0, 3}}, {4, 3}, 0, 0, fail);
  ForEachRun(WholeBox({0, 3}), {0, 3}, 0, 0, fail);
}

TEST(ValidateHyperparameters, NamesGroupFieldAndValue) {
  EXPECT_TRUE(ValidateHyperparameters("g", Hyperparameters{}).ok());
  EXPECT_TRUE(ValidateHyperparameters("g", {0, 0, 0, 0, 0, 1e-30}).ok());
  const double nan = std::nan("");
  const double inf = std::numeric_limits<double>::infinity();
  const struct {
    Hyperparameters value;
    const char* says;
  } cases[] = {
      {{.lr = -1}, "group \"g\": lr: expected a number from 0 to 1e30, got -1"},
      {{.lr = nan}, "lr: expected a number from 0 to 1e30, got nan"},
      {{.lr = 1e300}, "lr: expected a number from 0 to 1e30, got 1e+300"},
      {{.weight_decay = inf}, "weight_decay: expected a number from 0 to 1e30, got inf"},
      {{.momentum = 1}, "momentum: expected 0 <= value < 1, got 1"},
      {{.momentum = nan}, "momentum"},
      {{.beta1 = -0.1}, "beta1"},
      {{.beta2 = 1.5}, "beta2"},
      {{.eps = 0}, "eps: expected a finite number > 0, got 0"},
      {{.eps = inf}, "eps"},
  };
  for (const auto& c : cases) {
    const absl::Status status = ValidateHyperparameters("g", c.value);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << c.says;
    EXPECT_THAT(Message(status), HasSubstr(c.says));
  }
}

TEST(ValidateName, FollowsThePattern) {
  for (const char* name : {"a", "7", "run-1.b_C"})
    EXPECT_TRUE(ValidateName("run", name).ok()) << name;
  EXPECT_TRUE(ValidateName("run", std::string(128, 'a')).ok());
  for (const std::string& name :
       {std::string(), std::string(".."), std::string("-a"), std::string("a/b"), std::string("a b"),
        std::string(129, 'a'), std::string("a\0", 2)}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ValidateName("run", name))) << name;
  }
  EXPECT_THAT(Message(ValidateName("run", "a\n")), HasSubstr("run name \"a\\n\""));
  EXPECT_LT(Message(ValidateName("run", std::string(1 << 20, '\x01'))).size(), 500u);
}

TEST(ValidateParameterName, TakesWhatFrameworksCallTensors) {
  for (const char* name : {"layers.0/w:0", "model.layers[3].mlp w", "~"}) {
    EXPECT_TRUE(ValidateParameterName(name).ok()) << name;
  }
  EXPECT_TRUE(ValidateParameterName(std::string(256, 'a')).ok());
  for (const std::string& name :
       {std::string(), std::string(257, 'a'), std::string("a\"b"), std::string("a'b"),
        std::string("a\\b"), std::string("a\tb"), std::string("\xc3\xa9"), std::string("a\x7f")}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ValidateParameterName(name))) << name;
  }
}

}  // namespace
}  // namespace muond
