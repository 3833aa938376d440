#include "client/bench/reference_step.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace muond::bench {
namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
constexpr int kSteps = 5;

Doubles Transposed(const Doubles& x, std::int64_t rows, std::int64_t cols) {
  Doubles y(x.size());
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) y[j * rows + i] = x[i * cols + j];
  }
  return y;
}

// z = x y for row-major x (m x k) and y (k x n), or y^T for y (n x k).
Doubles Product(const Doubles& x, const Doubles& y, bool transpose_y, std::int64_t m,
                std::int64_t k, std::int64_t n) {
  Doubles z(static_cast<std::size_t>(m * n));
  cblas_dgemm(CblasRowMajor, CblasNoTrans, transpose_y ? CblasTrans : CblasNoTrans,
              static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), 1.0, x.data(),
              static_cast<int>(k), y.data(), static_cast<int>(transpose_y ? k : n), 0.0, z.data(),
              static_cast<int>(n));
  return z;
}

}  // namespace

Doubles ReferenceNewtonSchulz(const Doubles& u, std::int64_t rows, std::int64_t cols) {
  const bool tall = rows > cols;
  const std::int64_t m = std::min(rows, cols);
  const std::int64_t n = std::max(rows, cols);
  Doubles x = tall ? Transposed(u, rows, cols) : u;
  double squares = 0;
  for (const double value : x) squares += value * value;
  if (squares == 0) return u;
  for (double& value : x) value /= std::sqrt(squares);
  for (int step = 0; step < kSteps; ++step) {
    const Doubles a = Product(x, x, true, m, n, m);
    Doubles polynomial = Product(a, a, false, m, m, m);  // b A + c A^2
    for (std::size_t i = 0; i < a.size(); ++i) polynomial[i] = kB * a[i] + kC * polynomial[i];
    const Doubles change = Product(polynomial, x, false, m, m, n);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = kA * x[i] + change[i];
  }
  return tall ? Transposed(x, m, n) : x;
}

void ReferenceMomentum(const ReferenceMuon& rule, const Doubles& gradient, Doubles& m) {
  for (std::size_t i = 0; i < m.size(); ++i) m[i] += (1 - rule.momentum) * (gradient[i] - m[i]);
}

Doubles ReferenceMuonStep(const ReferenceMuon& rule, const Doubles& weights,
                          const Doubles& gradient, const Doubles& m, std::int64_t rows,
                          std::int64_t cols) {
  Doubles u(m.size());
  for (std::size_t i = 0; i < u.size(); ++i) {
    u[i] = (1 - rule.momentum) * gradient[i] + rule.momentum * m[i];
  }
  const Doubles o = ReferenceNewtonSchulz(u, rows, cols);
  const double ratio = static_cast<double>(rows) / static_cast<double>(cols);
  const double step = rule.lr * std::sqrt(std::max(1.0, ratio));
  Doubles result(weights.size());
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = (1 - rule.lr * rule.weight_decay) * weights[i] - step * o[i];
  }
  return result;
}

void ReferenceMoments(const ReferenceAdamW& rule, const Doubles& gradient, Doubles& m, Doubles& v) {
  for (std::size_t i = 0; i < m.size(); ++i) {
    m[i] = rule.beta1 * m[i] + (1 - rule.beta1) * gradient[i];
    v[i] = rule.beta2 * v[i] + (1 - rule.beta2) * gradient[i] * gradient[i];
  }
}

Doubles ReferenceAdamWStep(const ReferenceAdamW& rule, const Doubles& weights, const Doubles& m,
                           const Doubles& v, std::int64_t t) {
  const double m_correction = 1 - std::pow(rule.beta1, static_cast<double>(t));
  const double v_correction = 1 - std::pow(rule.beta2, static_cast<double>(t));
  Doubles result(weights.size());
  for (std::size_t i = 0; i < result.size(); ++i) {
    const double denominator = std::sqrt(v[i] / v_correction) + rule.eps;
    result[i] = (1 - rule.lr * rule.weight_decay) * weights[i] -
                rule.lr * (m[i] / m_correction) / denominator;
  }
  return result;
}

}  // namespace muond::bench
