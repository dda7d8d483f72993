// What this machine can do at most: reading memory, and multiplying in registers. Measured beside every benchmark's figures
// (vllm/benchmarks/machine.py), each call in one thread; nothing in the engine uses them.
#include <ctime>

#include "common.h"
#include "vec.h"

namespace vllm {
namespace {

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

volatile float sink;

// Every lane counts: the compiler leaves out what nobody looks at.
void use(F value) {
  float values[kLanes];
  store(values, value);
  float sum = 0.0f;
  for (float lane : values) sum += lane;
  sink = sum;
}

#if defined(__AVX512F__)
constexpr int kChains = 10;  // enough to hide the latency of a multiply-add on two ports
#elif defined(__AVX2__)
constexpr int kChains = 6;  // an F is two registers of sixteen
#else
constexpr int kChains = 3;
#endif

// Out of line, with a volatile store at the end, so that the work stays between the two looks at the clock.
__attribute__((noinline)) void multiply_fp32(int64_t rounds, float start) {
  float begin[kChains * kLanes];  // all different: an F may be several registers, and equal ones would be computed once
  for (int i = 0; i < kChains * kLanes; ++i) begin[i] = start * static_cast<float>(i);
  F sums[kChains];
  for (int chain = 0; chain < kChains; ++chain) sums[chain] = load(begin + chain * kLanes);
  const F factor = set1(start);
  for (int64_t round = 0; round < rounds; ++round)
    for (F& sum : sums) sum = fma(sum, factor, factor);
  for (int chain = 1; chain < kChains; ++chain) sums[0] = sums[0] + sums[chain];
  use(sums[0]);
}

#if defined(__AVX512BF16__)
__attribute__((noinline)) void multiply_bf16(int64_t rounds, int pair) {
  __m512 sums[kChains];
  for (int chain = 0; chain < kChains; ++chain) sums[chain] = _mm512_set1_ps(static_cast<float>(chain));
  const __m512i factor = _mm512_set1_epi32(pair);
  for (int64_t round = 0; round < rounds; ++round)
    for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, (__m512bh)factor, (__m512bh)factor);
  for (int chain = 1; chain < kChains; ++chain) sums[0] = _mm512_add_ps(sums[0], sums[chain]);
  use(F{sums[0]});
}
#endif

}  // namespace
}  // namespace vllm

using namespace vllm;

// Seconds to read `count` floats once.
VLLM_EXPORT double vllm_limit_read(const float* data, int64_t count) {
  const double start = now();
  F sums[8];
  for (F& sum : sums) sum = zero();
  int64_t i = 0;
  for (; i + 8 * kLanes <= count; i += 8 * kLanes)
    for (int lane = 0; lane < 8; ++lane) sums[lane] = sums[lane] + load(data + i + lane * kLanes);
  for (int lane = 1; lane < 8; ++lane) sums[0] = sums[0] + sums[lane];
  use(sums[0]);
  return now() - start;
}

// Operations per second (a multiply-add counts as two) of one thread over `rounds` rounds: fp32, or with `bf16` products of
// bf16 pairs where the CPU has them; -1 where it has not.
VLLM_EXPORT double vllm_limit_multiply(int bf16, int64_t rounds) {
#if !defined(__AVX512BF16__)
  if (bf16) return -1.0;
#endif
  volatile float half = 0.5f;
  volatile int pair = 0x3f003f00;  // 0.5 twice
  const double start = now();
  double operations = 2.0 * kLanes * kChains * static_cast<double>(rounds);
#if defined(__AVX512BF16__)
  if (bf16) {
    multiply_bf16(rounds, pair);
    return 2.0 * operations / (now() - start);
  }
#endif
  (void)pair;
  multiply_fp32(rounds, half);
  return operations / (now() - start);
}
