// Matrix products with packed weights: out[M, N] = a[M, K] w[N, K]^T.
//
// The weights lie in panels of 32 outputs, unit after unit (micro.h), so that a panel is one stream through memory:
//
//     panel p:  unit 0: outputs 32p .. 32p+31 | unit 1: … | …        bf16: 128 bytes a unit (two inputs), fp32: 128 (one input),
//                                                                    int8: 64 (two inputs)
//
// int8 weights become bf16 exactly (|w| <= 127) in a small buffer on their way into the same loop; the scale of an output is
// applied to its finished sum.
#pragma once

#include <memory>

#include "encoded.h"
#include "micro.h"
#include "pool.h"

namespace vllm {

enum class WeightKind : int { kFp32 = 0, kBf16 = 1, kInt8 = 2 };

struct Matrix {
  WeightKind kind = WeightKind::kFp32;
  int64_t n = 0, k = 0;
  int64_t units = 0;   // per output: ceil(k / 2), or k in fp32
  int64_t panels = 0;  // ceil(n / 32); missing outputs are zero
  uint8_t* data = nullptr;
  float* scales = nullptr;  // [panels * 32], int8 only
  bool interleaved = false;  // gate and up: 16 outputs of the first half, then 16 of the second, in each panel

  int64_t unit_bytes() const { return kind == WeightKind::kInt8 ? 64 : 128; }
  int64_t panel_bytes() const { return units * unit_bytes(); }
  int64_t bytes() const { return panels * panel_bytes(); }
  // Where output i is: its panel and its place there.
  int64_t column(int64_t i) const {
    if (!interleaved) return i;
    const int64_t half = n / 2, j = i < half ? i : i - half;
    return (j / 16) * 32 + (i < half ? 0 : 16) + j % 16;
  }

  static Matrix describe(WeightKind kind, int64_t n, int64_t k, bool interleaved = false);
};

// Packs outputs first .. first + count - 1 from rows of `source`, row_bytes(type, k) each. Needs a Session.
void pack(Matrix& matrix, int64_t first, int64_t count, const void* source, SourceType type);

// One output's weights as fp32 (an embedding row): out[k] * scale.
void unpack_row(const Matrix& matrix, int64_t output, float scale, float* out);

// What happens to a finished tile of `rows` x 32 sums (row-major, 32 apart): rows `row` on, panel `panel`. Runs on any thread.
// A plain function with a context keeps the loop's code in one place (gemm.cpp).
struct Epilogue {
  void (*fn)(const Epilogue& self, int64_t row, int64_t rows, int64_t panel, const float* tile) = nullptr;
  const float* bias = nullptr;  // by column, may be nullptr
  const float* scales = nullptr;  // by column, may be nullptr (set by multiply() for int8)
  void* out = nullptr;
  int64_t stride = 0;  // of out, in its elements
  int64_t n = 0;
  float scale = 1.0f, softcap = 0.0f;
  int activation = 0;
};

// rows `a` [m][lda units]; needs a Session.
void multiply(const Matrix& matrix, const uint32_t* a, int64_t lda, int64_t m, Epilogue epilogue);

// Ready epilogues.
void store_sums(const Epilogue& e, int64_t row, int64_t rows, int64_t panel, const float* tile);     // fp32 out = sum (+ bias)
void add_sums(const Epilogue& e, int64_t row, int64_t rows, int64_t panel, const float* tile);       // fp32 out += sum (+ bias)
void store_logits(const Epilogue& e, int64_t row, int64_t rows, int64_t panel, const float* tile);   // scale, soft-cap
void store_gated_fp32(const Epilogue& e, int64_t row, int64_t rows, int64_t panel, const float* tile);  // act(gate) * up
void store_gated_bf16(const Epilogue& e, int64_t row, int64_t rows, int64_t panel, const float* tile);

}  // namespace vllm
