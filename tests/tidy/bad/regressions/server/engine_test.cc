TEST(Engine, Dion76_NanIsRedone) {}
TEST(Engine, TakesTwo) {}
TEST_P(Engine, Dion80_StandsInNoRow) {}
