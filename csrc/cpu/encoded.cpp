#include "encoded.h"

#include <cmath>

namespace vllm {
namespace {

struct Format {
  int64_t numbers, bytes;
  void (*decode)(const uint8_t* block, float* out);
};

inline float half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return half_value(bits);
}

void q4_0(const uint8_t* b, float* out) {
  const float d = half_at(b);
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>((b[2 + i] & 15) - 8) * d;
    out[16 + i] = static_cast<float>((b[2 + i] >> 4) - 8) * d;
  }
}
void q4_1(const uint8_t* b, float* out) {
  const float d = half_at(b), m = half_at(b + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>(b[4 + i] & 15) * d + m;
    out[16 + i] = static_cast<float>(b[4 + i] >> 4) * d + m;
  }
}
void q5_0(const uint8_t* b, float* out) {
  const float d = half_at(b);
  uint32_t high;
  std::memcpy(&high, b + 2, 4);
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>(static_cast<int>((b[6 + i] & 15) | (((high >> i) & 1) << 4)) - 16) * d;
    out[16 + i] = static_cast<float>(static_cast<int>((b[6 + i] >> 4) | (((high >> (16 + i)) & 1) << 4)) - 16) * d;
  }
}
void q5_1(const uint8_t* b, float* out) {
  const float d = half_at(b), m = half_at(b + 2);
  uint32_t high;
  std::memcpy(&high, b + 4, 4);
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>(static_cast<int>((b[8 + i] & 15) | (((high >> i) & 1) << 4))) * d + m;
    out[16 + i] = static_cast<float>(static_cast<int>((b[8 + i] >> 4) | (((high >> (16 + i)) & 1) << 4))) * d + m;
  }
}
void q8_0(const uint8_t* b, float* out) {
  const float d = half_at(b);
  const int8_t* q = reinterpret_cast<const int8_t*>(b + 2);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(q[i]) * d;
}

// The eight six-bit scales and minima of a K block, from its 12 bytes.
void k_scales(const uint8_t* p, int* scales, int* minima) {
  for (int j = 0; j < 4; ++j) {
    scales[j] = p[j] & 63;
    minima[j] = p[4 + j] & 63;
    scales[4 + j] = (p[8 + j] & 15) | ((p[j] >> 2) & 48);
    minima[4 + j] = (p[8 + j] >> 4) | ((p[4 + j] >> 2) & 48);
  }
}
void q4_k(const uint8_t* b, float* out) {
  const float d = half_at(b), dmin = half_at(b + 2);
  int scales[8], minima[8];
  k_scales(b + 4, scales, minima);
  for (int j = 0; j < 8; ++j) {
    const float scale = d * static_cast<float>(scales[j]), minimum = dmin * static_cast<float>(minima[j]);
    const uint8_t* q = b + 16 + 32 * (j / 2);
    const int shift = 4 * (j & 1);
    for (int i = 0; i < 32; ++i) out[32 * j + i] = static_cast<float>((q[i] >> shift) & 15) * scale - minimum;
  }
}
void q5_k(const uint8_t* b, float* out) {
  const float d = half_at(b), dmin = half_at(b + 2);
  int scales[8], minima[8];
  k_scales(b + 4, scales, minima);
  for (int j = 0; j < 8; ++j) {
    const float scale = d * static_cast<float>(scales[j]), minimum = dmin * static_cast<float>(minima[j]);
    const uint8_t* q = b + 48 + 32 * (j / 2);
    const int shift = 4 * (j & 1);
    for (int i = 0; i < 32; ++i)
      out[32 * j + i] = static_cast<float>(((q[i] >> shift) & 15) | (((b[16 + i] >> j) & 1) << 4)) * scale - minimum;
  }
}
void q6_k(const uint8_t* b, float* out) {
  const float d = half_at(b + 208);
  const int8_t* scales = reinterpret_cast<const int8_t*>(b + 192);
  for (int part = 0; part < 8; ++part) {  // 32 numbers each; four parts share 64 low bytes and 32 high ones
    const uint8_t* low = b + 64 * (part / 4) + 32 * (part & 1);
    const uint8_t* high = b + 128 + 32 * (part / 4);
    const int low_shift = 4 * ((part / 2) & 1), high_shift = 2 * (part & 3);
    for (int half = 0; half < 2; ++half) {
      const float scale = d * static_cast<float>(scales[2 * part + half]);
      for (int i = 16 * half; i < 16 * half + 16; ++i) {
        const int q = ((low[i] >> low_shift) & 15) | (((high[i] >> high_shift) & 3) << 4);
        out[32 * part + i] = static_cast<float>(q - 32) * scale;
      }
    }
  }
}

const Format* format_of(SourceType type) {
  static const Format formats[] = {{32, 18, q4_0}, {32, 20, q4_1},   {32, 22, q5_0},   {32, 24, q5_1},
                                   {32, 34, q8_0}, {256, 144, q4_k}, {256, 176, q5_k}, {256, 210, q6_k}};
  const int index = static_cast<int>(type) - static_cast<int>(SourceType::kQ4_0);
  return index >= 0 && index < 8 ? &formats[index] : nullptr;
}

}  // namespace

float half_value(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  float value;
  if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -value : value;
  }
  const uint32_t bits = exponent == 31 ? sign | 0x7f800000u | (fraction << 13) : sign | ((exponent + 112) << 23) | (fraction << 13);
  std::memcpy(&value, &bits, 4);
  return value;
}

bool known_source(int type) { return (type >= 0 && type <= 2) || format_of(static_cast<SourceType>(type)) != nullptr; }
bool is_encoded(SourceType type) { return format_of(type) != nullptr; }

int64_t block_size(SourceType type) {
  const Format* format = format_of(type);
  return format == nullptr ? 1 : format->numbers;
}

int64_t row_bytes(SourceType type, int64_t k) {
  const Format* format = format_of(type);
  if (format == nullptr) return k * (type == SourceType::kFp32 ? 4 : 2);
  require(k % format->numbers == 0, "a row of this format must be whole blocks");
  return k / format->numbers * format->bytes;
}

void decode_row(SourceType type, const void* row, int64_t k, float* out) {
  if (const Format* format = format_of(type)) {
    const uint8_t* block = static_cast<const uint8_t*>(row);
    for (int64_t i = 0; i < k; i += format->numbers, block += format->bytes) format->decode(block, out + i);
  } else if (type == SourceType::kFp32) {
    std::memcpy(out, row, k * 4);
  } else {
    const uint16_t* bits = static_cast<const uint16_t*>(row);
    if (type == SourceType::kBf16)
      for (int64_t i = 0; i < k; ++i) out[i] = bf16_value(bits[i]);
    else
      for (int64_t i = 0; i < k; ++i) out[i] = half_value(bits[i]);
  }
}

}  // namespace vllm
