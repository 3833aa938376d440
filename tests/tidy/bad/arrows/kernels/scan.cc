// Kernels know the standard library, BLAS and TBB.
#include "kernels/tensor.h"
#include "absl/status/status.h"
#include "server/step/machine.h"
