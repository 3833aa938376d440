// The reference against the numbers of docs/semantics.md.
#include "client/bench/reference_step.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::bench {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;
using testing::Pointwise;

TEST(ReferenceStep, NewtonSchulz) {
  EXPECT_THAT(ReferenceNewtonSchulz({1, 0, 0, 1}, 2, 2),
              ElementsAre(DoubleNear(1.1081112, 1e-7), 0, 0, DoubleNear(1.1081112, 1e-7)));
  EXPECT_THAT(ReferenceNewtonSchulz({3, 0, 0, 4}, 2, 2),
              ElementsAre(DoubleNear(.7228761, 1e-7), 0, 0, DoubleNear(1.1192039, 1e-7)));
  const Doubles wide = {-.5682901, .0577419, .6837740, .5633547, .4056128, .2478710};
  EXPECT_THAT(ReferenceNewtonSchulz({1, 2, 3, 4, 5, 6}, 2, 3), Pointwise(DoubleNear(1e-7), wide));
  const Doubles tall = {-.5682901, .5633547, .0577419, .4056128, .6837740, .2478710};
  EXPECT_THAT(ReferenceNewtonSchulz({1, 4, 2, 5, 3, 6}, 3, 2), Pointwise(DoubleNear(1e-7), tall));
  EXPECT_THAT(ReferenceNewtonSchulz({0, 0, 0, 0}, 2, 2), ElementsAre(0, 0, 0, 0));
}

TEST(ReferenceStep, ThreeMuonSteps) {
  const ReferenceMuon rule{.lr = 0.1, .weight_decay = 0.1};
  Doubles weights = {1, 0, 0, 1}, m(4);
  const Doubles gradients[] = {{3, 0, 0, 4}, {1, 0, 0, 1}, {0, 0, 0, 0}};
  const double diagonals[][2] = {{.9177124, .8780796}, {.8088734, .7635475}, {.7138857, .6478689}};
  for (int i = 0; i < 3; ++i) {
    ReferenceMomentum(rule, gradients[i], m);
    weights = ReferenceMuonStep(rule, weights, gradients[i], m, 2, 2);
    EXPECT_NEAR(weights[0], diagonals[i][0], 1e-6) << i;  // those numbers were made in fp32
    EXPECT_NEAR(weights[3], diagonals[i][1], 1e-6) << i;
  }
}

TEST(ReferenceStep, TallMatricesMoveFurther) {
  const Doubles zero(8);
  const Doubles gradient = {1, 0, 0, 1, 0, 0, 0, 0};
  Doubles m(8);
  ReferenceMomentum({}, gradient, m);
  const Doubles tall = ReferenceMuonStep({.lr = 1}, zero, gradient, m, 4, 2);
  const Doubles o = ReferenceNewtonSchulz(gradient, 4, 2);
  EXPECT_NEAR(tall[0], -1.4142135623730951 * o[0], 1e-12);
}

TEST(ReferenceStep, TwoAdamWSteps) {
  const ReferenceAdamW rule{.lr = 0.1};
  Doubles weights = {1}, m(1), v(1);
  const double wanted[] = {.8990000005, .798101001};
  for (int t = 1; t <= 2; ++t) {
    ReferenceMoments(rule, {2}, m, v);
    weights = ReferenceAdamWStep(rule, weights, m, v, t);
    EXPECT_NEAR(weights[0], wanted[t - 1], 1e-9);
  }
}

}  // namespace
}  // namespace muond::bench
