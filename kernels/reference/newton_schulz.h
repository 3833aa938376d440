// Newton-Schulz in plain fp64 loops: the definition that every fast path is held against.
#pragma once

#include "kernels/backend.h"

namespace muond::kernels::reference {

// Orthogonalizes one matrix by the standard form, whatever `rule.method` says: the Gram form is the
// same function in exact arithmetic. O is rounded to fp32 once, at the end. There is no fast path,
// so `fallback` is never set; `failed` is, when U is not finite. Any thread.
NewtonSchulzResult NewtonSchulz(const MatrixJob& job, const NewtonSchulzRule& rule);

}  // namespace muond::kernels::reference
