// Newton-Schulz in plain fp64 loops, after KellerJordan/Muon.
#include "kernels/reference/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "kernels/coefficients.h"

namespace muond::kernels::reference {
namespace {

// A dense row-major matrix.
struct Matrix {
  Matrix(std::size_t rows, std::size_t cols) : m(rows), n(cols), data(rows * cols) {}
  double& at(std::size_t i, std::size_t j) { return data[i * n + j]; }
  double at(std::size_t i, std::size_t j) const { return data[i * n + j]; }

  std::size_t m, n;
  std::vector<double> data;
};

// The wide view: transposed iff rows > cols, strictly.
Matrix WideView(const MatrixJob& job) {
  const auto rows = static_cast<std::size_t>(job.rows);
  const auto cols = static_cast<std::size_t>(job.cols);
  const auto* u = static_cast<const float*>(job.u);
  const bool transposed = rows > cols;
  Matrix x(std::min(rows, cols), std::max(rows, cols));
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < cols; ++j) {
      (transposed ? x.at(j, i) : x.at(i, j)) = u[i * cols + j];
    }
  }
  return x;
}

// X X^T.
Matrix Gram(const Matrix& x) {
  Matrix result(x.m, x.m);
  for (std::size_t i = 0; i < x.m; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (std::size_t k = 0; k < x.n; ++k) sum += x.at(i, k) * x.at(j, k);
      result.at(i, j) = result.at(j, i) = sum;
    }
  }
  return result;
}

Matrix Product(const Matrix& a, const Matrix& b) {
  Matrix result(a.m, b.n);
  for (std::size_t i = 0; i < a.m; ++i) {
    for (std::size_t k = 0; k < a.n; ++k) {
      const double factor = a.at(i, k);
      for (std::size_t j = 0; j < b.n; ++j) result.at(i, j) += factor * b.at(k, j);
    }
  }
  return result;
}

// a X + (b A + c A^2) X with A = X X^T.
Matrix Step(const Matrix& x, const NewtonSchulzStep& step) {
  const Matrix a = Gram(x);
  Matrix b = Product(a, a);
  for (std::size_t i = 0; i < b.data.size(); ++i) {
    b.data[i] = step.b * a.data[i] + step.c * b.data[i];
  }
  Matrix result = Product(b, x);
  for (std::size_t i = 0; i < x.data.size(); ++i) result.data[i] += step.a * x.data[i];
  return result;
}

double SumSquares(const Matrix& x) {
  double sum = 0;
  for (const double value : x.data) sum += value * value;
  return sum;
}

}  // namespace

NewtonSchulzResult NewtonSchulz(const MatrixJob& job, const NewtonSchulzRule& rule) {
  NewtonSchulzResult result;
  auto* o = static_cast<float*>(job.o);
  Matrix x = WideView(job);
  // fp64 holds the square of any fp32 number, so no scaling by max |U| is needed first.
  const double norm = std::sqrt(SumSquares(x));
  if (norm == 0) {
    std::fill_n(o, x.data.size(), 0.0f);
    result.zero_input = true;
    return result;
  }
  const double divisor = std::max(norm, rule.norm_floor * job.u_scale);
  for (double& value : x.data) value /= divisor;
  for (const NewtonSchulzStep& step : rule.steps) x = Step(x, step);

  const double sum_squares = SumSquares(x);
  result.output_norm = std::sqrt(sum_squares);
  result.failed = !IsPlausibleNorm(sum_squares, static_cast<std::int64_t>(x.m), rule.residual_max);
  const bool transposed = job.rows > job.cols;
  const auto cols = static_cast<std::size_t>(job.cols);
  for (std::size_t i = 0; i < static_cast<std::size_t>(job.rows); ++i) {
    for (std::size_t j = 0; j < cols; ++j) {
      o[i * cols + j] = static_cast<float>(transposed ? x.at(j, i) : x.at(i, j));
    }
  }
  return result;
}

}  // namespace muond::kernels::reference
