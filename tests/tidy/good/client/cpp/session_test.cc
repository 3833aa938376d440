// A session against a service in the same process.
#include "client/cpp/session.h"

#include "server/daemon/embedded.h"

TEST_F(Session, Opens) {}
