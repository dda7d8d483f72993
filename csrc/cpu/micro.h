// The inner loop of every matrix product: a tile of R rows x 32 columns, accumulated over "units".
//
// A unit is 4 bytes of an activation row: one fp32 number, or a pair of neighbouring bf16 numbers. Weights lie so that one
// vector holds the same unit of 16 columns:
//
//     activations  a [R][units]          (rows `lda` units apart)
//     weights      w0, w1 [units][16]    (units `stride` apart; two vectors side by side are 32 columns)
//     result       acc [R][2] vectors of 16 fp32
//
// Each of the R x 32 accumulators takes its units in ascending order, whatever R is: that is what makes a row's result
// independent of the rows beside it. Attention uses the same loop (attention.cpp): q.K with keys as columns, p.V with dimensions
// as columns.
#pragma once

#include "vec.h"

namespace vllm {

// Rows of the largest tile, by the number of registers. Sanitized builds have smaller ones, which compile in a minute.
#if defined(VLLM_SANITIZED)
constexpr int kTileRows = 3;
#elif defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 4;
#else
constexpr int kTileRows = 2;
#endif

struct Fp32 {  // a unit is one number
  static constexpr int kPerUnit = 1;
  static constexpr bool kBf16 = false;
  struct A {
    F v;
  };
  struct W {
    F v;
  };
  static VLLM_INLINE A broadcast(const uint32_t* p) {
    float x;
    std::memcpy(&x, p, 4);
    return {set1(x)};
  }
  static VLLM_INLINE W weights(const uint32_t* p) { return {load(reinterpret_cast<const float*>(p))}; }
  static VLLM_INLINE F dot(F acc, const A& a, const W& w) { return fma(a.v, w.v, acc); }
};

struct Bf16 {  // a unit is two numbers
  static constexpr int kPerUnit = 2;
  static constexpr bool kBf16 = true;
#if defined(__AVX512BF16__)
  struct A {
    __m512i v;
  };
  struct W {
    __m512i v;
  };
  static VLLM_INLINE A broadcast(const uint32_t* p) { return {_mm512_set1_epi32(static_cast<int>(*p))}; }
  static VLLM_INLINE W weights(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
  static VLLM_INLINE F dot(F acc, const A& a, const W& w) {
    return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<const __m512bh&>(a.v), reinterpret_cast<const __m512bh&>(w.v))};
  }
#else
  struct A {
    F even, odd;
  };
  struct W {
    F even, odd;
  };
  static VLLM_INLINE A broadcast(const uint32_t* p) {
    return {as_float(set1(static_cast<int32_t>(*p << 16))), as_float(set1(static_cast<int32_t>(*p & 0xffff0000u)))};
  }
  static VLLM_INLINE W weights(const uint32_t* p) {
    const I pair = load(reinterpret_cast<const int32_t*>(p));
    return {as_float(shift_left<16>(pair)), as_float(pair & set1(static_cast<int32_t>(0xffff0000u)))};
  }
  static VLLM_INLINE F dot(F acc, const A& a, const W& w) { return fma(a.odd, w.odd, fma(a.even, w.even, acc)); }
#endif
};

// Prefetches, one per unit: byte `offset` of `base` on, `step` bytes further each unit. base == nullptr: none.
struct Ahead {
  const char* base = nullptr;
  int64_t step = 0;
};

template <class Op, int R>
VLLM_INLINE void micro(const uint32_t* a, int64_t lda, const uint32_t* w0, const uint32_t* w1, int64_t stride, int64_t units,
                       F (&acc)[R][2]) {
#if defined(__AVX512F__)
  for (int64_t u = 0; u < units; ++u) {
    const typename Op::W x = Op::weights(w0), y = Op::weights(w1);
    w0 += stride;
    w1 += stride;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const typename Op::A b = Op::broadcast(a + u + r * lda);
      acc[r][0] = Op::dot(acc[r][0], b, x);
      acc[r][1] = Op::dot(acc[r][1], b, y);
    }
  }
#else
  // Sixteen registers: one vector of columns after the other.
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const uint32_t* w = half == 0 ? w0 : w1;
    F sum[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum[r] = acc[r][half];
    for (int64_t u = 0; u < units; ++u) {
      const typename Op::W x = Op::weights(w);
      w += stride;
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r] = Op::dot(sum[r], Op::broadcast(a + u + r * lda), x);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[r][half] = sum[r];
  }
#endif
}

// The same with prefetches for the panel that comes next.
template <class Op, int R>
VLLM_INLINE void micro_ahead(const uint32_t* a, int64_t lda, const uint32_t* w, int64_t units, Ahead ahead, F (&acc)[R][2]) {
#if defined(__AVX512F__)
  const char* next = ahead.base;
  for (int64_t u = 0; u < units; ++u) {
    const typename Op::W x = Op::weights(w), y = Op::weights(w + 16);
    w += 32;
    __builtin_prefetch(next, 0, 2);
    if (R <= 2) __builtin_prefetch(next + 64, 0, 2);
    next += ahead.step;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const typename Op::A b = Op::broadcast(a + u + r * lda);
      acc[r][0] = Op::dot(acc[r][0], b, x);
      acc[r][1] = Op::dot(acc[r][1], b, y);
    }
  }
#else
  (void)ahead;
  micro<Op, R>(a, lda, w, w + 16, 32, units, acc);
#endif
}

// Rows are cut into tiles of at most kTileRows that differ by one at most.
struct RowTiles {
  int64_t rows;
  int64_t count;
  explicit RowTiles(int64_t n) : rows(n), count(ceil_div(n, kTileRows)) {}
  int64_t begin(int64_t tile) const { return rows * tile / count; }
};

// Calls body(std::integral_constant<int, R>) for a run-time R in 1 .. kTileRows.
template <class Body>
VLLM_INLINE void with_rows(int64_t rows, Body&& body) {
  switch (rows) {
    case 1: body(std::integral_constant<int, 1>{}); break;
    case 2: body(std::integral_constant<int, 2>{}); break;
#if defined(__AVX2__) || defined(VLLM_SANITIZED)
    case 3: body(std::integral_constant<int, 3>{}); break;
#endif
#if defined(__AVX2__) && !defined(VLLM_SANITIZED)
    case 4: body(std::integral_constant<int, 4>{}); break;
#endif
#if defined(__AVX512F__) && !defined(VLLM_SANITIZED)
    case 5: body(std::integral_constant<int, 5>{}); break;
    case 6: body(std::integral_constant<int, 6>{}); break;
    case 7: body(std::integral_constant<int, 7>{}); break;
    case 8: body(std::integral_constant<int, 8>{}); break;
    case 9: body(std::integral_constant<int, 9>{}); break;
    case 10: body(std::integral_constant<int, 10>{}); break;
    case 11: body(std::integral_constant<int, 11>{}); break;
    case 12: body(std::integral_constant<int, 12>{}); break;
#endif
    default: __builtin_unreachable();
  }
}

}  // namespace vllm
