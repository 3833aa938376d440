// One step of Muon and of AdamW in fp64, straight from the formulas: what the benchmark checks a
// daemon's result against. Written for this alone; it shares no code with any backend.
//
// Formulas: docs/semantics.md with the defaults of a group: ema momentum, Nesterov, coefficient set
// `simple`, shape factor `original`, decoupled weight decay.
#pragma once

#include <cstdint>
#include <vector>

namespace muond::bench {

using Doubles = std::vector<double>;

struct ReferenceMuon {
  double lr = 1e-3;
  double weight_decay = 0.1;
  double momentum = 0.95;
};

struct ReferenceAdamW {
  double lr = 1e-3;
  double weight_decay = 0.01;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
};

// O of a row-major rows x cols matrix; zero for zero.
Doubles ReferenceNewtonSchulz(const Doubles& u, std::int64_t rows, std::int64_t cols);

// M <- M + (1 - beta)(G - M).
void ReferenceMomentum(const ReferenceMuon& rule, const Doubles& gradient, Doubles& m);

// The new weights of a matrix; `m` is the momentum with this step's gradient in it.
Doubles ReferenceMuonStep(const ReferenceMuon& rule, const Doubles& weights,
                          const Doubles& gradient, const Doubles& m, std::int64_t rows,
                          std::int64_t cols);

// m and v of a step.
void ReferenceMoments(const ReferenceAdamW& rule, const Doubles& gradient, Doubles& m, Doubles& v);

// The new weights; `m` and `v` have this step's gradient in them, `t` counts this step too.
Doubles ReferenceAdamWStep(const ReferenceAdamW& rule, const Doubles& weights, const Doubles& m,
                           const Doubles& v, std::int64_t t);

}  // namespace muond::bench
