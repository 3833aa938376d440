// The transpose of a tile by shuffles, for sources that are compiled for one instruction set.
//
// Everything here has internal linkage: each source keeps its own copy, or the linker could pick
// one that the running processor lacks.
#pragma once

#include <cstdint>

namespace muond::kernels::cpu {
namespace {  // NOLINT(google-build-namespaces): see above

typedef std::uint16_t U16x16 __attribute__((vector_size(32)));
typedef float F32x16 __attribute__((vector_size(64)));
typedef float F32x8 __attribute__((vector_size(32)));
typedef float F32x4 __attribute__((vector_size(16)));

#define MUOND_LOW_16 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define MUOND_HIGH_16 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

// The elements of `a` and `b` in turn, from their lower or upper halves.
template <typename Row>
void Zip(const Row& a, const Row& b, Row& low, Row& high) {
  constexpr std::int64_t kSide = sizeof(Row) / sizeof(a[0]);
  if constexpr (kSide == 16) {
    low = __builtin_shufflevector(a, b, MUOND_LOW_16);
    high = __builtin_shufflevector(a, b, MUOND_HIGH_16);
  } else if constexpr (kSide == 8) {
    low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  } else {
    low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  }
}

#undef MUOND_LOW_16
#undef MUOND_HIGH_16

// Zipping row i with row i + half, log2(rows) times over, transposes a square.
template <typename Row, typename Element>
void TransposeSquare(const Element* src, std::int64_t src_stride, Element* dst,
                     std::int64_t dst_stride) {
  constexpr std::int64_t kSide = sizeof(Row) / sizeof(Element);
  Row rows[2][kSide];
  for (std::int64_t i = 0; i < kSide; ++i) {
    __builtin_memcpy(&rows[0][i], src + i * src_stride, sizeof(Row));
  }
  int from = 0;
  for (std::int64_t size = kSide; size > 1; size /= 2) {
    for (std::int64_t i = 0; i < kSide / 2; ++i) {
      Zip(rows[from][i], rows[from][i + kSide / 2], rows[1 - from][2 * i],
          rows[1 - from][2 * i + 1]);
    }
    from = 1 - from;
  }
  for (std::int64_t i = 0; i < kSide; ++i) {
    __builtin_memcpy(dst + i * dst_stride, &rows[from][i], sizeof(Row));
  }
}

// dst (cols x rows) = src^T (rows x cols).
template <typename Row, typename Element>
void TransposeAny(const Element* src, std::int64_t src_stride, std::int64_t rows, std::int64_t cols,
                  Element* dst, std::int64_t dst_stride) {
  constexpr std::int64_t kSide = sizeof(Row) / sizeof(Element);
  for (std::int64_t j = 0; j < cols; j += kSide) {
    for (std::int64_t i = 0; i < rows; i += kSide) {
      const Element* from = src + i * src_stride + j;
      Element* to = dst + j * dst_stride + i;
      if (i + kSide <= rows && j + kSide <= cols) {
        TransposeSquare<Row>(from, src_stride, to, dst_stride);
        continue;
      }
      for (std::int64_t k = 0; k < kSide && i + k < rows; ++k) {
        for (std::int64_t l = 0; l < kSide && j + l < cols; ++l) {
          to[l * dst_stride + k] = from[k * src_stride + l];
        }
      }
    }
  }
}

}  // namespace
}  // namespace muond::kernels::cpu
