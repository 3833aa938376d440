// A test.
TEST(Suite, Case) {}
