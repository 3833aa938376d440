// Everything that the pure machine must not know.
#include <grpcpp/grpcpp.h>
#include "muond/v1/types.pb.h"
#include "machine.h"
#include <server/step/machine.h>
#include "server/step/missing.h"
#include "gtest/gtest.h"
