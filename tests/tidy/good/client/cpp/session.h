// A seat in a run.
#pragma once

#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/values.h"
