TEST(Step, A1_Works) {}
