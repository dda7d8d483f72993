// Which variants this processor and this operating system can run. Compiled for the baseline of the architecture, so that it
// runs anywhere; nothing else of this project is touched before it has answered.
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t xcr0() {
  uint32_t eax, edx;
  __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (static_cast<uint64_t>(edx) << 32) | eax;
}
#endif

// Bit mask: 1 generic, 2 avx2, 4 avx512, 8 avx512bf16. A bit is set when the CPU has the instructions and the operating
// system saves the registers.
extern "C" __attribute__((visibility("default"))) int vllm_cpu_probe() {
  int mask = 1;
#if defined(__x86_64__)
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return mask;
  const bool osxsave = c & (1u << 27), avx = c & (1u << 28), fma = c & (1u << 12), f16c = c & (1u << 29);
  if (!osxsave || !avx || !fma || !f16c) return mask;
  const uint64_t saved = xcr0();
  if ((saved & 0x6) != 0x6) return mask;
  uint32_t b7, c7, d7;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return mask;
  const uint32_t max_subleaf = a;
  const bool bmi = b7 & (1u << 3), avx2 = b7 & (1u << 5), bmi2 = b7 & (1u << 8);
  if (!avx2 || !bmi || !bmi2) return mask;
  mask |= 2;
  if ((saved & 0xe0) != 0xe0) return mask;
  const uint32_t f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
  if ((b7 & (f | dq | bw | vl)) != (f | dq | bw | vl)) return mask;
  mask |= 4;
  const uint32_t vbmi = 1u << 1, vbmi2 = 1u << 6, vnni = 1u << 11;
  if ((c7 & (vbmi | vbmi2 | vnni)) != (vbmi | vbmi2 | vnni) || max_subleaf < 1) return mask;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return mask;
  if (a & (1u << 5)) mask |= 8;
#endif
  return mask;
}
