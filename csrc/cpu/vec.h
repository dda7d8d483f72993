// Sixteen fp32 numbers at a time, the same operations in every variant: AVX-512 (one register), AVX2 (two), generic (the
// compiler's vector extension). What is not an exact operation (exp, tanh, …) is our own polynomial, the same everywhere in a
// variant, so that every path of a kernel gives the same bits.
#pragma once

#include "common.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace vllm {

// ------------------------------------------------------------------------------------------------ the types
// F: 16 floats. I: 16 int32. M: 16 truth values.

#if defined(__AVX512F__)

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct M {
  __mmask16 v;
};

VLLM_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
VLLM_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
VLLM_INLINE F set1(float a) { return {_mm512_set1_ps(a)}; }
VLLM_INLINE F zero() { return {_mm512_setzero_ps()}; }
VLLM_INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
VLLM_INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
VLLM_INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
VLLM_INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
VLLM_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
VLLM_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
VLLM_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
VLLM_INLINE F sqrt(F a) { return {_mm512_sqrt_ps(a.v)}; }
VLLM_INLINE F round(F a) { return {_mm512_roundscale_ps(a.v, 0x08)}; }  // to nearest even integer
VLLM_INLINE M operator<(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
VLLM_INLINE M operator>(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
VLLM_INLINE M operator>=(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
VLLM_INLINE M operator==(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
VLLM_INLINE M is_nan(F a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
VLLM_INLINE F select(M m, F yes, F no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }

VLLM_INLINE I load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
VLLM_INLINE void store(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
VLLM_INLINE I set1(int32_t a) { return {_mm512_set1_epi32(a)}; }
VLLM_INLINE I iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
VLLM_INLINE I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
VLLM_INLINE I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
VLLM_INLINE I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
VLLM_INLINE I operator|(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
VLLM_INLINE I operator^(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
VLLM_INLINE M operator<(I a, I b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
VLLM_INLINE M operator>(I a, I b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }
VLLM_INLINE M operator==(I a, I b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
template <int N> VLLM_INLINE I shift_left(I a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> VLLM_INLINE I shift_right(I a) { return {_mm512_srli_epi32(a.v, N)}; }  // logical
VLLM_INLINE I select(M m, I yes, I no) { return {_mm512_mask_blend_epi32(m.v, no.v, yes.v)}; }
VLLM_INLINE F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
VLLM_INLINE I as_int(F a) { return {_mm512_castps_si512(a.v)}; }
VLLM_INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
VLLM_INLINE I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // rounds to nearest even

VLLM_INLINE M operator&(M a, M b) { return {static_cast<__mmask16>(a.v & b.v)}; }
VLLM_INLINE M operator|(M a, M b) { return {static_cast<__mmask16>(a.v | b.v)}; }
VLLM_INLINE uint32_t bits(M m) { return m.v; }
VLLM_INLINE M mask_of_bits(uint32_t b) { return {static_cast<__mmask16>(b)}; }

#elif defined(__AVX2__)

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct M {
  __m256 a, b;
};

VLLM_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
VLLM_INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
VLLM_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
VLLM_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
VLLM_INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
VLLM_INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
VLLM_INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
VLLM_INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
VLLM_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
VLLM_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
VLLM_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
VLLM_INLINE F sqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
VLLM_INLINE F round(F x) { return {_mm256_round_ps(x.a, 0x08), _mm256_round_ps(x.b, 0x08)}; }
#define VLLM_COMPARE(OP, CODE) \
  VLLM_INLINE M OP(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, CODE), _mm256_cmp_ps(x.b, y.b, CODE)}; }
VLLM_COMPARE(operator<, _CMP_LT_OQ)
VLLM_COMPARE(operator>, _CMP_GT_OQ)
VLLM_COMPARE(operator>=, _CMP_GE_OQ)
VLLM_COMPARE(operator==, _CMP_EQ_OQ)
#undef VLLM_COMPARE
VLLM_INLINE M is_nan(F x) { return {_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)}; }
VLLM_INLINE F select(M m, F yes, F no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }

VLLM_INLINE I load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
VLLM_INLINE void store(int32_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
VLLM_INLINE I set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
VLLM_INLINE I iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }
VLLM_INLINE I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
VLLM_INLINE I operator-(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
VLLM_INLINE I operator&(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
VLLM_INLINE I operator|(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
VLLM_INLINE I operator^(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
VLLM_INLINE M as_mask(__m256i a, __m256i b) { return {_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)}; }
VLLM_INLINE M operator>(I x, I y) { return as_mask(_mm256_cmpgt_epi32(x.a, y.a), _mm256_cmpgt_epi32(x.b, y.b)); }
VLLM_INLINE M operator<(I x, I y) { return y > x; }
VLLM_INLINE M operator==(I x, I y) { return as_mask(_mm256_cmpeq_epi32(x.a, y.a), _mm256_cmpeq_epi32(x.b, y.b)); }
template <int N> VLLM_INLINE I shift_left(I x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> VLLM_INLINE I shift_right(I x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
VLLM_INLINE F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
VLLM_INLINE I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
VLLM_INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
VLLM_INLINE I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
VLLM_INLINE I select(M m, I yes, I no) { return as_int(select(m, as_float(yes), as_float(no))); }

VLLM_INLINE M operator&(M x, M y) { return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }
VLLM_INLINE M operator|(M x, M y) { return {_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)}; }
VLLM_INLINE uint32_t bits(M m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a)) | (static_cast<uint32_t>(_mm256_movemask_ps(m.b)) << 8);
}
VLLM_INLINE M mask_of_bits(uint32_t b) {
  const I one_bit = {_mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128),
                     _mm256_setr_epi32(1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15)};
  return (set1(static_cast<int32_t>(b)) & one_bit) == one_bit;
}

#else  // generic: the compiler's vectors of 64 bytes, lowered to what there is

typedef float GenericF __attribute__((vector_size(64)));
typedef int32_t GenericI __attribute__((vector_size(64)));
struct F {
  GenericF v;
};
struct I {
  GenericI v;
};
struct M {
  GenericI v;  // 0 or -1
};

VLLM_INLINE F load(const float* p) {
  F x;
  std::memcpy(&x, p, 64);
  return x;
}
VLLM_INLINE void store(float* p, F x) { std::memcpy(p, &x, 64); }
VLLM_INLINE F set1(float x) { return {x - GenericF{}}; }
VLLM_INLINE F zero() { return {GenericF{}}; }
VLLM_INLINE F operator+(F x, F y) { return {x.v + y.v}; }
VLLM_INLINE F operator-(F x, F y) { return {x.v - y.v}; }
VLLM_INLINE F operator*(F x, F y) { return {x.v * y.v}; }
VLLM_INLINE F operator/(F x, F y) { return {x.v / y.v}; }
VLLM_INLINE F fma(F x, F y, F z) {
#if defined(__aarch64__)
  F out;
  const float32x4_t* a = reinterpret_cast<const float32x4_t*>(&x);
  const float32x4_t* b = reinterpret_cast<const float32x4_t*>(&y);
  const float32x4_t* c = reinterpret_cast<const float32x4_t*>(&z);
  float32x4_t* o = reinterpret_cast<float32x4_t*>(&out);
  for (int i = 0; i < 4; ++i) o[i] = vfmaq_f32(c[i], a[i], b[i]);
  return out;
#else
  return {x.v * y.v + z.v};
#endif
}
VLLM_INLINE F select(M m, F yes, F no) { return {m.v ? yes.v : no.v}; }
VLLM_INLINE F max(F x, F y) { return {x.v > y.v ? x.v : y.v}; }
VLLM_INLINE F min(F x, F y) { return {x.v < y.v ? x.v : y.v}; }
VLLM_INLINE F sqrt(F x) {
  F out;
  for (int i = 0; i < 16; ++i) out.v[i] = __builtin_sqrtf(x.v[i]);
  return out;
}
VLLM_INLINE M operator<(F x, F y) { return {x.v < y.v}; }
VLLM_INLINE M operator>(F x, F y) { return {x.v > y.v}; }
VLLM_INLINE M operator>=(F x, F y) { return {x.v >= y.v}; }
VLLM_INLINE M operator==(F x, F y) { return {x.v == y.v}; }
VLLM_INLINE M is_nan(F x) { return {x.v != x.v}; }

VLLM_INLINE I load(const int32_t* p) {
  I x;
  std::memcpy(&x, p, 64);
  return x;
}
VLLM_INLINE void store(int32_t* p, I x) { std::memcpy(p, &x, 64); }
VLLM_INLINE I set1(int32_t x) { return {x - GenericI{}}; }
VLLM_INLINE I iota() { return {GenericI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}; }
typedef uint32_t GenericU __attribute__((vector_size(64)));
VLLM_INLINE I operator+(I x, I y) { return {(GenericI)((GenericU)x.v + (GenericU)y.v)}; }
VLLM_INLINE I operator-(I x, I y) { return {(GenericI)((GenericU)x.v - (GenericU)y.v)}; }
VLLM_INLINE I operator&(I x, I y) { return {x.v & y.v}; }
VLLM_INLINE I operator|(I x, I y) { return {x.v | y.v}; }
VLLM_INLINE I operator^(I x, I y) { return {x.v ^ y.v}; }
VLLM_INLINE M operator<(I x, I y) { return {x.v < y.v}; }
VLLM_INLINE M operator>(I x, I y) { return {x.v > y.v}; }
VLLM_INLINE M operator==(I x, I y) { return {x.v == y.v}; }
template <int N> VLLM_INLINE I shift_left(I x) { return {(GenericI)((GenericU)x.v << N)}; }
template <int N> VLLM_INLINE I shift_right(I x) { return {(GenericI)((GenericU)x.v >> N)}; }
VLLM_INLINE I select(M m, I yes, I no) { return {m.v ? yes.v : no.v}; }
VLLM_INLINE F as_float(I x) { return {(GenericF)x.v}; }
VLLM_INLINE I as_int(F x) { return {(GenericI)x.v}; }
VLLM_INLINE F to_float(I x) { return {__builtin_convertvector(x.v, GenericF)}; }
// Adding and taking away 1.5 * 2^23 rounds to the nearest even integer; exact for |x| < 2^22, and larger ones are integers.
VLLM_INLINE F round(F x) {
  const F magic = set1(12582912.0f);
  const F near = (x + magic) - magic;
  const F size = as_float(as_int(x) & set1(0x7fffffff));
  return select(size < set1(4194304.0f), near, x);
}
VLLM_INLINE I to_int(F x) { return {__builtin_convertvector(round(x).v, GenericI)}; }
VLLM_INLINE M operator&(M x, M y) { return {x.v & y.v}; }
VLLM_INLINE M operator|(M x, M y) { return {x.v | y.v}; }
VLLM_INLINE uint32_t bits(M m) {
  uint32_t out = 0;
  for (int i = 0; i < 16; ++i) out |= static_cast<uint32_t>(m.v[i] != 0) << i;
  return out;
}
VLLM_INLINE M mask_of_bits(uint32_t b) {
  const GenericI one_bit{1,      2,      4,       8,       16,      32,      64,      128,
                         1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  return {(set1(static_cast<int32_t>(b)).v & one_bit) != 0};
}

#endif

// ------------------------------------------------------------------------------------------------ the same for all variants

VLLM_INLINE bool any(M m) { return bits(m) != 0; }
VLLM_INLINE M first_lanes(int count) {  // lanes 0 .. count - 1
  return iota() < set1(static_cast<int32_t>(count));
}
VLLM_INLINE F load_some(const float* p, int count, float rest = 0.0f) {  // count <= 16
  alignas(64) float copy[16];
  for (int i = 0; i < 16; ++i) copy[i] = i < count ? p[i] : rest;
  return load(copy);
}
VLLM_INLINE void store_some(float* p, F a, int count) {
  alignas(64) float copy[16];
  store(copy, a);
  for (int i = 0; i < count; ++i) p[i] = copy[i];
}
VLLM_INLINE F abs(F a) { return as_float(as_int(a) & set1(static_cast<int32_t>(0x7fffffff))); }
VLLM_INLINE F neg(F a) { return as_float(as_int(a) ^ set1(static_cast<int32_t>(0x80000000))); }

// One fixed tree: lane i with i + 8, then + 4, + 2, + 1.
VLLM_INLINE float reduce_add(F a) {
#if defined(__AVX512F__)
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#elif defined(__AVX2__)
  const __m256 half = _mm256_add_ps(a.a, a.b);
#endif
#if defined(__AVX2__)
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
#else
  alignas(64) float x[16];
  store(x, a);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = x[i] + x[i + width];
  return x[0];
#endif
}
VLLM_INLINE float reduce_max(F a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(a.v);
#else
  alignas(64) float x[16];
  store(x, a);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
#endif
}

// exp, for any argument: 0 below -87.3 (no denormals), inf above 88.7, NaN for NaN, exactly 1 at 0. Relative error under 2 ulp.
// Range reduction by ln 2 in two parts and the degree-5 polynomial of Cephes' expf.
VLLM_INLINE F exp(F x) {
  const F low = set1(-87.33654f), high = set1(88.722839f);
  const F n = round(max(min(x, high), low) * set1(1.44269504088896341f));
  const F clipped = max(min(x, high), low);
  F r = fma(n, set1(-0.693359375f), clipped);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  // 2^n in two factors, because n may be 128.
  const I whole = to_int(n);
  const I half = as_int(as_float(shift_right<1>(whole + set1(256)))) - set1(128);  // floor(n / 2)
  const F scale_a = as_float(shift_left<23>(half + set1(127)));
  const F scale_b = as_float(shift_left<23>(whole - half + set1(127)));
  F y = p * scale_a * scale_b;
  y = select(x < low, zero(), y);
  y = select(x > high, set1(__builtin_inff()), y);
  return select(is_nan(x), x, y);
}

// 2^x for finite x <= 0 (a little above is fine); 0 below -126, exactly 1 at 0. Relative error 2e-7. For softmax, where x is a
// score less the greatest one, already in powers of two.
VLLM_INLINE F exp2_nonpositive(F x) {
  const F n = round(x), f = x - n;
  F p = set1(0x1.5bba14p-10f);
  p = fma(p, f, set1(0x1.3cea88p-7f));
  p = fma(p, f, set1(0x1.c6b752p-5f));
  p = fma(p, f, set1(0x1.ebf9bcp-3f));
  p = fma(p, f, set1(0x1.62e42ap-1f));
  p = fma(p, f, set1(1.0f));
#if defined(__AVX512F__)
  return {_mm512_scalef_ps(p.v, n.v)};
#else
  const F low = set1(-126.0f);
  const F raised = as_float(as_int(p) + shift_left<23>(to_int(max(n, low))));
  return select(x < low, zero(), raised);
#endif
}

VLLM_INLINE F tanh(F x) {
  // Odd polynomial near zero (Cephes' tanhf), 1 - 2 / (exp(2|x|) + 1) elsewhere.
  const F size = abs(x), square = x * x;
  F p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  const F near = fma(p * square, x, x);
  const F far = set1(1.0f) - set1(2.0f) / (exp(size + size) + set1(1.0f));
  const F sign = as_float(as_int(x) & set1(static_cast<int32_t>(0x80000000)));
  return select(size < set1(0.625f), near, as_float(as_int(far) | as_int(sign)));
}

VLLM_INLINE F silu(F x) { return x / (set1(1.0f) + exp(neg(x))); }

VLLM_INLINE F gelu_tanh(F x) {
  const F inner = set1(0.7978845608028654f) * fma(set1(0.044715f) * x, x * x, x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

// erf by Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7).
VLLM_INLINE F gelu(F x) {
  const F z = abs(x) * set1(0.70710678118654752f);
  const F t = set1(1.0f) / fma(set1(0.3275911f), z, set1(1.0f));
  F p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const F tail = p * t * exp(neg(z * z));  // 1 - erf(z)
  const F erf_size = set1(1.0f) - tail;
  const F sign = as_float(as_int(x) & set1(static_cast<int32_t>(0x80000000)));
  return set1(0.5f) * x * (set1(1.0f) + as_float(as_int(erf_size) | as_int(sign)));
}

// ------------------------------------------------------------------------------------------------ bf16

// 16 floats rounded to bf16 (nearest even), as 16 uint16.
VLLM_INLINE void store_bf16(uint16_t* p, F a) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh(a.v);
  std::memcpy(p, &narrow, 32);
#elif defined(__AVX512F__)
  const __m512i x = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(x, 16), _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
#else
  alignas(64) float x[16];
  store(x, a);
  for (int i = 0; i < 16; ++i) p[i] = bf16_bits(x[i]);
#endif
}
VLLM_INLINE F load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
#elif defined(__AVX2__)
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(low), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16))};
#else
  F x;
  for (int i = 0; i < 16; ++i) x.v[i] = bf16_value(p[i]);
  return x;
#endif
}

}  // namespace vllm
