// Sixteen fp32 lanes, the same operations in the same order on every ISA.
//
// The sampler's results are defined bit for bit (vllm/v1/sample/reference.py), so this file offers no fused
// multiply-add, and sampling.cpp is compiled with -ffp-contract=off. A variant may differ only in speed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SAMPLING_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__)
#define SAMPLING_AVX2 1
#include <immintrin.h>
#endif

namespace vllm::sampling {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

#if defined(SAMPLING_AVX512)

struct F16 {
  __m512 v;
};
struct Mask {
  __mmask16 m;
};
// Sums of 2**44-scaled weights; lanes are folded only at the end because integer addition has no order.
struct Mass {
  __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
};

inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load_tail(const float* p, int count, float fill) {
  return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), static_cast<__mmask16>((1u << count) - 1u), p)};
}
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 larger(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 round_even(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Mask ge(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask gt(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
inline Mask unordered(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)}; }
inline Mask operator|(Mask a, Mask b) { return {static_cast<__mmask16>(a.m | b.m)}; }
inline Mask operator&(Mask a, Mask b) { return {static_cast<__mmask16>(a.m & b.m)}; }
inline Mask no_lanes() { return {0}; }
inline uint32_t bits(Mask m) { return m.m; }
inline Mask lanes(uint32_t b) { return {static_cast<__mmask16>(b)}; }
inline F16 keep(Mask m, F16 x) { return {_mm512_maskz_mov_ps(m.m, x.v)}; }
inline F16 choose(Mask m, F16 yes, F16 no) { return {_mm512_mask_mov_ps(no.v, m.m, yes.v)}; }
// p * 2**n for the lanes of m, 0 elsewhere; n is integral, in -126 .. 0, and p in 0.7 .. 1.42.
inline F16 scale_by_power(Mask m, F16 p, F16 n) { return {_mm512_maskz_scalef_ps(m.m, p.v, n.v)}; }
inline int compress(float* out, Mask m, F16 x) {
  // A register compress and a full store: the memory form of vcompressps is microcoded on Zen 4.
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps(m.m, x.v));
  return __builtin_popcount(m.m);
}
inline int compress_ids(int32_t* out, Mask m, int32_t first) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(m.m, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
  return __builtin_popcount(m.m);
}
inline float fold_sum(F16 x) {
  const __m256 h8 = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
  const __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
  return _mm_cvtss_f32(_mm_add_ss(h2, _mm_shuffle_ps(h2, h2, 1)));
}
inline float fold_max(F16 x) { return _mm512_reduce_max_ps(x.v); }
inline void add_mass(Mass& s, F16 w) {
  const __m512 q = _mm512_mul_ps(w.v, _mm512_set1_ps(17592186044416.0f));
  s.a = _mm512_add_epi64(s.a, _mm512_cvttps_epi64(_mm512_castps512_ps256(q)));
  s.b = _mm512_add_epi64(s.b, _mm512_cvttps_epi64(_mm512_extractf32x8_ps(q, 1)));
}
inline int64_t total(const Mass& s) { return _mm512_reduce_add_epi64(_mm512_add_epi64(s.a, s.b)); }

#elif defined(SAMPLING_AVX2)

struct F16 {
  __m256 a, b;
};
struct Mask {
  __m256 a, b;
};
struct Mass {
  __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
};

inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F16 load_tail(const float* p, int count, float fill) {
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = i < count ? p[i] : fill;
  return load(t);
}
inline void store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 larger(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 round_even(F16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline Mask ge(F16 x, F16 y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)}; }
inline Mask gt(F16 x, F16 y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)}; }
inline Mask unordered(F16 x, F16 y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q)};
}
inline Mask operator|(Mask x, Mask y) { return {_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)}; }
inline Mask operator&(Mask x, Mask y) { return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }
inline Mask no_lanes() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline uint32_t bits(Mask m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a)) | static_cast<uint32_t>(_mm256_movemask_ps(m.b)) << 8;
}
inline Mask lanes(uint32_t b) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i lo = _mm256_set1_epi32(static_cast<int>(b & 255u)), hi = _mm256_set1_epi32(static_cast<int>(b >> 8 & 255u));
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(lo, bit), bit)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(hi, bit), bit))};
}
inline F16 keep(Mask m, F16 x) { return {_mm256_and_ps(m.a, x.a), _mm256_and_ps(m.b, x.b)}; }
inline F16 choose(Mask m, F16 yes, F16 no) {
  return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
inline __m256 raise_exponent(__m256 p, __m256 n) {
  const __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e));
}
inline F16 scale_by_power(Mask m, F16 p, F16 n) { return keep(m, {raise_exponent(p.a, n.a), raise_exponent(p.b, n.b)}); }
inline int compress(float* out, Mask m, F16 x) {
  float t[16];
  store(t, x);
  int count = 0;
  for (uint32_t b = bits(m); b != 0; b &= b - 1) out[count++] = t[__builtin_ctz(b)];
  return count;
}
inline int compress_ids(int32_t* out, Mask m, int32_t first) {
  int count = 0;
  for (uint32_t b = bits(m); b != 0; b &= b - 1) out[count++] = first + __builtin_ctz(b);
  return count;
}
inline float fold_sum(F16 x) {
  const __m256 h8 = _mm256_add_ps(x.a, x.b);
  const __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
  const __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
  return _mm_cvtss_f32(_mm_add_ss(h2, _mm_shuffle_ps(h2, h2, 1)));
}
inline float fold_max(F16 x) {
  const __m256 h8 = _mm256_max_ps(x.a, x.b);
  const __m128 h4 = _mm_max_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
  const __m128 h2 = _mm_max_ps(h4, _mm_movehl_ps(h4, h4));
  return _mm_cvtss_f32(_mm_max_ss(h2, _mm_shuffle_ps(h2, h2, 1)));
}
inline void add_mass4(__m256i& s, __m128 q) {
  // Integers below 2**52 sit in the mantissa of 2**52 + q.
  const __m256d magic = _mm256_set1_pd(4503599627370496.0);
  const __m256d whole = _mm256_round_pd(_mm256_cvtps_pd(q), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __m256i value = _mm256_xor_si256(_mm256_castpd_si256(_mm256_add_pd(whole, magic)), _mm256_castpd_si256(magic));
  s = _mm256_add_epi64(s, value);
}
inline void add_mass(Mass& s, F16 w) {
  const __m256 scale = _mm256_set1_ps(17592186044416.0f);
  const __m256 qa = _mm256_mul_ps(w.a, scale), qb = _mm256_mul_ps(w.b, scale);
  add_mass4(s.a, _mm256_castps256_ps128(qa));
  add_mass4(s.b, _mm256_extractf128_ps(qa, 1));
  add_mass4(s.a, _mm256_castps256_ps128(qb));
  add_mass4(s.b, _mm256_extractf128_ps(qb, 1));
}
inline int64_t total(const Mass& s) {
  alignas(32) int64_t t[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(t), _mm256_add_epi64(s.a, s.b));
  return t[0] + t[1] + t[2] + t[3];
}

#else  // plain C++; the compiler vectorizes the lane loops with what it has

struct F16 {
  float v[16];
};
struct Mask {
  uint32_t m;
};
struct Mass {
  int64_t s = 0;
};

#define SAMPLING_LANES(expression)              \
  F16 out;                                      \
  for (int i = 0; i < 16; ++i) out.v[i] = expression; \
  return out
#define SAMPLING_MASK(condition)                \
  uint32_t out = 0;                             \
  for (int i = 0; i < 16; ++i) out |= static_cast<uint32_t>(condition) << i; \
  return {out}

inline F16 splat(float x) { SAMPLING_LANES(x); }
inline F16 load(const float* p) { SAMPLING_LANES(p[i]); }
inline F16 load_tail(const float* p, int count, float fill) { SAMPLING_LANES(i < count ? p[i] : fill); }
inline void store(float* p, F16 x) { std::memcpy(p, x.v, sizeof x.v); }
inline F16 operator+(F16 x, F16 y) { SAMPLING_LANES(x.v[i] + y.v[i]); }
inline F16 operator-(F16 x, F16 y) { SAMPLING_LANES(x.v[i] - y.v[i]); }
inline F16 operator*(F16 x, F16 y) { SAMPLING_LANES(x.v[i] * y.v[i]); }
inline F16 operator/(F16 x, F16 y) { SAMPLING_LANES(x.v[i] / y.v[i]); }
inline F16 larger(F16 x, F16 y) { SAMPLING_LANES(x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
// Rounds to nearest even for |x| < 2**22 by adding 1.5 * 2**23; the sampler rounds only -126 .. 0 (others are masked).
inline F16 round_even(F16 x) { SAMPLING_LANES((x.v[i] + 12582912.0f) - 12582912.0f); }
inline Mask ge(F16 x, F16 y) { SAMPLING_MASK(x.v[i] >= y.v[i]); }
inline Mask gt(F16 x, F16 y) { SAMPLING_MASK(x.v[i] > y.v[i]); }
inline Mask unordered(F16 x, F16 y) { SAMPLING_MASK(x.v[i] != x.v[i] || y.v[i] != y.v[i]); }
inline Mask operator|(Mask a, Mask b) { return {a.m | b.m}; }
inline Mask operator&(Mask a, Mask b) { return {a.m & b.m}; }
inline Mask no_lanes() { return {0}; }
inline uint32_t bits(Mask m) { return m.m; }
inline Mask lanes(uint32_t b) { return {b}; }
inline F16 keep(Mask m, F16 x) { SAMPLING_LANES((m.m >> i & 1u) != 0 ? x.v[i] : 0.0f); }
inline F16 choose(Mask m, F16 yes, F16 no) { SAMPLING_LANES((m.m >> i & 1u) != 0 ? yes.v[i] : no.v[i]); }
inline F16 scale_by_power(Mask m, F16 p, F16 n) {
  F16 out;
  for (int i = 0; i < 16; ++i) {
    const float bounded = n.v[i] >= -126.0f ? n.v[i] : -126.0f;  // a conversion of -inf or NaN would be undefined
    uint32_t word;
    std::memcpy(&word, &p.v[i], 4);
    word += static_cast<uint32_t>(static_cast<int32_t>(bounded)) << 23;
    std::memcpy(&out.v[i], &word, 4);
  }
  return keep(m, out);
}
inline int compress(float* out, Mask m, F16 x) {
  int count = 0;
  for (uint32_t b = m.m; b != 0; b &= b - 1) out[count++] = x.v[__builtin_ctz(b)];
  return count;
}
inline int compress_ids(int32_t* out, Mask m, int32_t first) {
  int count = 0;
  for (uint32_t b = m.m; b != 0; b &= b - 1) out[count++] = first + __builtin_ctz(b);
  return count;
}
inline float fold_sum(F16 x) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x.v[i] = x.v[i] + x.v[i + half];
  return x.v[0];
}
inline float fold_max(F16 x) {
  float best = x.v[0];
  for (int i = 1; i < 16; ++i) best = x.v[i] > best ? x.v[i] : best;
  return best;
}
inline void add_mass(Mass& s, F16 w) {
  for (int i = 0; i < 16; ++i) s.s += static_cast<int64_t>(w.v[i] * 17592186044416.0f);
}
inline int64_t total(const Mass& s) { return s.s; }

#undef SAMPLING_LANES
#undef SAMPLING_MASK

#endif

// exp((l - m) / temperature) relative to the maximum m, where r = log2(e) / temperature: 2**y by a polynomial of degree
// five on -0.5 .. 0.5 (relative error 1.9e-7, 2**0 == 1 exactly), 0 below 2**-126.
inline F16 weight(F16 l, F16 m, F16 r) {
  const F16 y = (l - m) * r;
  const Mask live = ge(y, splat(-126.0f));
  const F16 n = round_even(y);
  const F16 f = y - n;
  F16 p = splat(0x1.5bba14p-10f);
  p = p * f + splat(0x1.3cea88p-7f);
  p = p * f + splat(0x1.c6b752p-5f);
  p = p * f + splat(0x1.ebf9bcp-3f);
  p = p * f + splat(0x1.62e42ap-1f);
  p = p * f + splat(1.0f);
  return scale_by_power(live, p, n);
}

}  // namespace vllm::sampling
