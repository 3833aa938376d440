// The machine under test.
#include "gtest/gtest.h"
#include "proto/values.h"
#include "server/daemon/embedded.h"

TEST(Machine, Runs) {}
