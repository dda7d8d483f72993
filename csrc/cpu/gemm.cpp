#include "gemm.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace vllm {
namespace {

constexpr int64_t kInt8Block = 144;  // units widened at a time: 18 KB of bf16, stays in the first-level cache

// A unit of int8 is 64 bytes: 32 outputs with two inputs each. They lie so that unpacking within lanes of 128 bits (which is
// what the instructions do) gives outputs 0 .. 15 and 16 .. 31 in order: four outputs of the first half, then four of the second.
inline int64_t int8_place(int64_t output) { return (output % 16) / 4 * 16 + (output / 16) * 8 + (output % 4) * 2; }

#if defined(__AVX512VBMI__)
// int8 to bf16 by table: the two bytes of |x| (0 .. 127), and the sign.
struct Int8Table {
  __m512i high0, high1, low0, low1;
  Int8Table() {
    alignas(64) uint8_t high[128], low[128];
    for (int i = 0; i < 128; ++i) {
      const uint16_t bits = bf16_bits(static_cast<float>(i));
      high[i] = static_cast<uint8_t>(bits >> 8);
      low[i] = static_cast<uint8_t>(bits);
    }
    high0 = _mm512_load_si512(high);
    high1 = _mm512_load_si512(high + 64);
    low0 = _mm512_load_si512(low);
    low1 = _mm512_load_si512(low + 64);
  }
  VLLM_INLINE void widen(const void* from, __m512i& first, __m512i& second) const {
    const __m512i x = _mm512_loadu_si512(from), size = _mm512_abs_epi8(x);
    const __m512i low = _mm512_permutex2var_epi8(low0, size, low1);
    const __m512i high = _mm512_permutex2var_epi8(high0, size, high1);
    const __m512i signed_high = _mm512_ternarylogic_epi32(high, x, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // | (&)
    first = _mm512_unpacklo_epi8(low, signed_high);
    second = _mm512_unpackhi_epi8(low, signed_high);
  }
};
#endif

// Units of int8 to units of bf16, exactly (|x| <= 127).
void widen(const int8_t* from, uint32_t* to, int64_t units) {
#if defined(__AVX512VBMI__)
  const Int8Table table;
  for (int64_t u = 0; u < units; ++u) {
    __builtin_prefetch(from + u * 64 + 4096, 0, 2);
    __m512i first, second;
    table.widen(from + u * 64, first, second);
    _mm512_store_si512(to + u * 32, first);
    _mm512_store_si512(to + u * 32 + 16, second);
  }
#else
  for (int64_t u = 0; u < units; ++u) {
    __builtin_prefetch(from + u * 64 + 4096, 0, 2);
    alignas(64) uint16_t wide[64];
    for (int lane = 0; lane < 4; ++lane)
      for (int i = 0; i < 8; ++i) {
        wide[lane * 8 + i] = bf16_bits(static_cast<float>(from[u * 64 + lane * 16 + i]));
        wide[32 + lane * 8 + i] = bf16_bits(static_cast<float>(from[u * 64 + lane * 16 + 8 + i]));
      }
    std::memcpy(to + u * 32, wide, 128);
  }
#endif
}

template <class Op, int R>
VLLM_INLINE void load_tile(F (&acc)[R][2], const float* tile) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    acc[r][0] = load(tile + r * 32);
    acc[r][1] = load(tile + r * 32 + 16);
  }
}
template <int R>
VLLM_INLINE void clear_tile(F (&acc)[R][2]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
}
template <int R>
VLLM_INLINE void store_tile(const F (&acc)[R][2], float* tile) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store(tile + r * 32, acc[r][0]);
    store(tile + r * 32 + 16, acc[r][1]);
  }
}

// One panel times rows begin .. end of `a`.
template <class Op>
void panel_rows(const Matrix& w, const uint32_t* a, int64_t lda, int64_t begin, int64_t end, int64_t panel, const Epilogue& e) {
  const uint32_t* weights = reinterpret_cast<const uint32_t*>(w.data + panel * w.panel_bytes());
  const RowTiles tiles(end - begin);
  alignas(64) float tile[kTileRows * 32];
  const int64_t bytes = w.panel_bytes();
  for (int64_t t = 0; t < tiles.count; ++t) {
    const int64_t row = begin + tiles.begin(t), rows = begin + tiles.begin(t + 1) - row;
    // The tiles of this panel share the work of fetching the next one into the second-level cache.
    const Ahead ahead{reinterpret_cast<const char*>(weights) + bytes + bytes * t / tiles.count, 128 / tiles.count};
    with_rows(rows, [&](auto constant) {
      constexpr int R = decltype(constant)::value;
      F acc[R][2];
      clear_tile<R>(acc);
      micro_ahead<Op, R>(a + row * lda, lda, weights, w.units, ahead, acc);
      store_tile<R>(acc, tile);
    });
    e.fn(e, row, rows, panel, tile);
  }
}

#if defined(__AVX512VBMI__)
// int8 with few rows: widened in registers, bound by memory.
constexpr int64_t kInt8Direct = 4;
template <int R>
VLLM_INLINE void micro_int8(const uint32_t* a, int64_t lda, const int8_t* w, int64_t units, F (&acc)[R][2]) {
  const Int8Table table;
  for (int64_t u = 0; u < units; ++u) {
    __builtin_prefetch(w + 4096, 0, 2);
    Bf16::W x, y;
    table.widen(w, x.v, y.v);
    w += 64;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Bf16::A b = Bf16::broadcast(a + u + r * lda);
      acc[r][0] = Bf16::dot(acc[r][0], b, x);
      acc[r][1] = Bf16::dot(acc[r][1], b, y);
    }
  }
}
template <int R>
void panel_rows_int8_direct(const Matrix& w, const uint32_t* a, int64_t lda, int64_t begin, int64_t panel, const Epilogue& e) {
  alignas(64) float tile[R * 32];
  F acc[R][2];
  clear_tile<R>(acc);
  micro_int8<R>(a + begin * lda, lda, reinterpret_cast<const int8_t*>(w.data + panel * w.panel_bytes()), w.units, acc);
  store_tile<R>(acc, tile);
  e.fn(e, begin, R, panel, tile);
}
#endif

// The same for int8: blocks of units are widened once for all rows; sums wait in `tile` between the blocks.
void panel_rows_int8(const Matrix& w, const uint32_t* a, int64_t lda, int64_t begin, int64_t end, int64_t panel,
                     const Epilogue& e) {
#if defined(__AVX512VBMI__)
  static_assert(kInt8Direct == 4);
  switch (end - begin) {
    case 1: return panel_rows_int8_direct<1>(w, a, lda, begin, panel, e);
    case 2: return panel_rows_int8_direct<2>(w, a, lda, begin, panel, e);
    case 3: return panel_rows_int8_direct<3>(w, a, lda, begin, panel, e);
    case 4: return panel_rows_int8_direct<4>(w, a, lda, begin, panel, e);
    default: break;
  }
#endif
  const int8_t* weights = reinterpret_cast<const int8_t*>(w.data + panel * w.panel_bytes());
  constexpr int64_t kRows = 96;
  alignas(64) float sums[kRows * 32];
  alignas(64) uint32_t wide[kInt8Block * 32];
  for (int64_t chunk = begin; chunk < end; chunk += kRows) {
    const int64_t count = std::min(kRows, end - chunk);
    const RowTiles tiles(count);
    for (int64_t unit = 0; unit < w.units; unit += kInt8Block) {
      const int64_t units = std::min(kInt8Block, w.units - unit);
      widen(weights + unit * 64, wide, units);
      for (int64_t t = 0; t < tiles.count; ++t) {
        const int64_t row = tiles.begin(t), rows = tiles.begin(t + 1) - row;
        with_rows(rows, [&](auto constant) {
          constexpr int R = decltype(constant)::value;
          F acc[R][2];
          if (unit == 0)
            clear_tile<R>(acc);
          else
            load_tile<Bf16, R>(acc, sums + row * 32);
          micro<Bf16, R>(a + (chunk + row) * lda + unit, lda, wide, wide + 16, 32, units, acc);
          store_tile<R>(acc, sums + row * 32);
        });
      }
    }
    for (int64_t t = 0; t < tiles.count; ++t)
      e.fn(e, chunk + tiles.begin(t), tiles.begin(t + 1) - tiles.begin(t), panel, sums + tiles.begin(t) * 32);
  }
}

VLLM_INLINE void finish(const Epilogue& e, int64_t column, F& x, F& y) {
  if (e.scales != nullptr) {
    x = x * load(e.scales + column);
    y = y * load(e.scales + column + 16);
  }
  if (e.bias != nullptr) {
    x = x + load(e.bias + column);
    y = y + load(e.bias + column + 16);
  }
}

// Calls body(row, sums 0..15, sums 16..31) for each row of a tile, scaled and biased.
template <class Body>
VLLM_INLINE void each_row(const Epilogue& e, int64_t row, int64_t rows, int64_t panel, const float* tile, Body&& body) {
  for (int64_t r = 0; r < rows; ++r) {
    F x = load(tile + r * 32), y = load(tile + r * 32 + 16);
    finish(e, panel * 32, x, y);
    body(row + r, x, y);
  }
}

VLLM_INLINE F activate(int kind, F x) {
  if (kind == 0) return silu(x);
  if (kind == 1) return gelu_tanh(x);
  return gelu(x);
}

}  // namespace

Matrix Matrix::describe(WeightKind kind, int64_t n, int64_t k, bool interleaved) {
  Matrix m;
  m.kind = kind;
  m.n = n;
  m.k = k;
  m.units = kind == WeightKind::kFp32 ? k : ceil_div(k, 2);
  m.panels = interleaved ? ceil_div(n / 2, 16) : ceil_div(n, kPanel);
  m.interleaved = interleaved;
  return m;
}

void pack(Matrix& m, int64_t first, int64_t count, const void* source, SourceType type) {
  require(first >= 0 && count >= 0 && first + count <= m.n, "pack: outputs outside the matrix");
  const int64_t bytes = row_bytes(type, m.k);
  const char* rows = static_cast<const char*>(source);
  constexpr int64_t kGroup = 16;  // outputs packed together: neighbours in a panel, so that a line is written at one time
  const int64_t width = round_up(2 * m.units, 32);
  parallel_for(static_cast<int>(ceil_div(count, kGroup)), [&](int group, int) {
    const int64_t begin = group * kGroup, outputs = std::min(count - begin, kGroup);
    static thread_local std::vector<float> wide;      // [outputs][width]
    static thread_local std::vector<uint16_t> narrow;  // [outputs][width]
    const bool raw = m.kind == WeightKind::kBf16 && type == SourceType::kBf16;
    if (!raw) wide.assign(kGroup * width, 0.0f);
    if (m.kind == WeightKind::kBf16) narrow.assign(kGroup * width, 0);
    for (int64_t i = 0; i < outputs; ++i) {
      const char* row = rows + (begin + i) * bytes;
      if (raw) {
        std::memcpy(narrow.data() + i * width, row, bytes);
        continue;
      }
      decode_row(type, row, m.k, wide.data() + i * width);
      if (m.kind == WeightKind::kBf16)
        for (int64_t j = 0; j < width; j += 16) store_bf16(narrow.data() + i * width + j, load(wide.data() + i * width + j));
    }
    if (m.kind == WeightKind::kInt8) {
      for (int64_t i = 0; i < outputs; ++i) {
        const float* row = wide.data() + i * width;
        float biggest = 0.0f;
        for (int64_t j = 0; j < m.k; ++j) biggest = std::max(biggest, std::fabs(row[j]));
        const float scale = biggest > 0.0f ? biggest / 127.0f : 1.0f;
        const int64_t column = m.column(first + begin + i);
        m.scales[column] = scale;
        int8_t* out = reinterpret_cast<int8_t*>(m.data + (column / 32) * m.panel_bytes() + int8_place(column % 32));
        for (int64_t j = 0; j < 2 * m.units; ++j)
          out[(j / 2) * 64 + (j & 1)] = static_cast<int8_t>(std::min(127.0f, std::max(-127.0f, std::nearbyint(row[j] / scale))));
      }
      return;
    }
    // Unit by unit across the outputs: each line of the panel is written once.
    const uint32_t* from[kGroup];
    uint32_t* to[kGroup];
    for (int64_t i = 0; i < outputs; ++i) {
      const int64_t column = m.column(first + begin + i);
      to[i] = reinterpret_cast<uint32_t*>(m.data + (column / 32) * m.panel_bytes()) + column % 32;
      from[i] = m.kind == WeightKind::kFp32 ? reinterpret_cast<const uint32_t*>(wide.data() + i * width)
                                            : reinterpret_cast<const uint32_t*>(narrow.data() + i * width);
    }
    for (int64_t unit = 0; unit < m.units; unit += 16) {
      const int64_t stop = std::min(m.units, unit + 16);
      for (int64_t i = 0; i < outputs; ++i)
        for (int64_t u = unit; u < stop; ++u) to[i][u * 32] = from[i][u];
    }
  });
}

void unpack_row(const Matrix& m, int64_t output, float scale, float* out) {
  const int64_t column = m.column(output);
  const uint8_t* panel = m.data + (column / 32) * m.panel_bytes();
  if (m.kind == WeightKind::kFp32) {
    const float* w = reinterpret_cast<const float*>(panel) + column % 32;
    for (int64_t j = 0; j < m.k; ++j) out[j] = w[j * 32] * scale;
  } else if (m.kind == WeightKind::kBf16) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(panel) + (column % 32) * 2;
    for (int64_t j = 0; j < m.k; ++j) out[j] = bf16_value(w[(j / 2) * 64 + (j & 1)]) * scale;
  } else {
    const int8_t* w = reinterpret_cast<const int8_t*>(panel) + int8_place(column % 32);
    const float factor = m.scales[column];
    for (int64_t j = 0; j < m.k; ++j) out[j] = static_cast<float>(w[(j / 2) * 64 + (j & 1)]) * factor * scale;
  }
}

void multiply(const Matrix& w, const uint32_t* a, int64_t lda, int64_t m, Epilogue e) {
  if (m <= 0) return;
  e.n = w.n;
  e.scales = w.kind == WeightKind::kInt8 ? w.scales : nullptr;
  // Rows in chunks whose activations stay in the second-level cache beside a panel; panels in groups of about 64 KB.
  const int64_t row_bytes = w.units * 4;
  const int64_t chunk_limit = std::max<int64_t>(4 * kTileRows, std::min<int64_t>(384, (size_t{384} << 10) / row_bytes));
  const int64_t chunks = ceil_div(m, chunk_limit);
  const int64_t group = std::max<int64_t>(1, std::min<int64_t>(m <= kTileRows ? (64 << 10) / w.panel_bytes() : 1,
                                                              w.panels / (4 * session_threads())));
  const int64_t groups = ceil_div(w.panels, group);
  parallel_for(static_cast<int>(chunks * groups), [&](int task, int) {
    const int64_t chunk = task / groups, first = (task % groups) * group, last = std::min(w.panels, first + group);
    const int64_t begin = m * chunk / chunks, end = m * (chunk + 1) / chunks;
    for (int64_t panel = first; panel < last; ++panel) {
      if (w.kind == WeightKind::kBf16)
        panel_rows<Bf16>(w, a, lda, begin, end, panel, e);
      else if (w.kind == WeightKind::kFp32)
        panel_rows<Fp32>(w, a, lda, begin, end, panel, e);
      else
        panel_rows_int8(w, a, lda, begin, end, panel, e);
    }
  });
}

void store_sums(const Epilogue& e, int64_t row, int64_t rows, int64_t panel, const float* tile) {
  float* out = static_cast<float*>(e.out);
  const int64_t column = panel * 32, count = std::min<int64_t>(32, e.n - column);
  each_row(e, row, rows, panel, tile, [&](int64_t r, F x, F y) {
    float* to = out + r * e.stride + column;
    if (count == 32) {
      store(to, x);
      store(to + 16, y);
    } else {
      store_some(to, x, static_cast<int>(std::min<int64_t>(16, count)));
      if (count > 16) store_some(to + 16, y, static_cast<int>(count - 16));
    }
  });
}

void add_sums(const Epilogue& e, int64_t row, int64_t rows, int64_t panel, const float* tile) {
  float* out = static_cast<float*>(e.out);
  const int64_t column = panel * 32, count = std::min<int64_t>(32, e.n - column);
  each_row(e, row, rows, panel, tile, [&](int64_t r, F x, F y) {
    float* to = out + r * e.stride + column;
    if (count == 32) {
      store(to, load(to) + x);
      store(to + 16, load(to + 16) + y);
    } else {
      const int low = static_cast<int>(std::min<int64_t>(16, count)), high = static_cast<int>(count - 16);
      store_some(to, load_some(to, low) + x, low);
      if (high > 0) store_some(to + 16, load_some(to + 16, high) + y, high);
    }
  });
}

void store_logits(const Epilogue& e, int64_t row, int64_t rows, int64_t panel, const float* tile) {
  float* out = static_cast<float*>(e.out);
  const int64_t column = panel * 32, count = std::min<int64_t>(32, e.n - column);
  const auto shape = [&](F x) {
    if (e.scale != 1.0f) x = x * set1(e.scale);
    if (e.softcap > 0.0f) x = tanh(x / set1(e.softcap)) * set1(e.softcap);
    return x;
  };
  each_row(e, row, rows, panel, tile, [&](int64_t r, F x, F y) {
    float* to = out + r * e.stride + column;
    x = shape(x);
    y = shape(y);
    if (count == 32) {
      store(to, x);
      store(to + 16, y);
    } else {
      store_some(to, x, static_cast<int>(std::min<int64_t>(16, count)));
      if (count > 16) store_some(to + 16, y, static_cast<int>(count - 16));
    }
  });
}

// A panel holds 16 gates and their 16 ups. Rows of `out` are padded to whole vectors, so nothing is cut.
void store_gated_fp32(const Epilogue& e, int64_t row, int64_t rows, int64_t panel, const float* tile) {
  float* out = static_cast<float*>(e.out);
  each_row(e, row, rows, panel, tile,
           [&](int64_t r, F gate, F up) { store(out + r * e.stride + panel * 16, activate(e.activation, gate) * up); });
}
void store_gated_bf16(const Epilogue& e, int64_t row, int64_t rows, int64_t panel, const float* tile) {
  uint16_t* out = static_cast<uint16_t*>(e.out);
  each_row(e, row, rows, panel, tile,
           [&](int64_t r, F gate, F up) { store_bf16(out + r * e.stride + panel * 16, activate(e.activation, gate) * up); });
}

}  // namespace vllm

// ------------------------------------------------------------------------------------------------ C face, for tests and speed

namespace {
struct Handle {
  vllm::Matrix matrix;
  vllm::Buffer data, scales, rows;
};
}  // namespace

VLLM_EXPORT void* vllm_matrix_create(int kind, int64_t n, int64_t k, int interleaved) {
  try {
    vllm::require(n > 0 && k > 0 && kind >= 0 && kind <= 2, "matrix: bad shape or kind");
    auto handle = std::make_unique<Handle>();
    handle->matrix = vllm::Matrix::describe(static_cast<vllm::WeightKind>(kind), n, k, interleaved != 0);
    handle->data = vllm::Buffer(handle->matrix.bytes() + 4096);
    handle->scales = vllm::Buffer(handle->matrix.panels * 32 * sizeof(float));
    handle->matrix.data = handle->data.as<uint8_t>();
    handle->matrix.scales = handle->scales.as<float>();
    return handle.release();
  } catch (const std::exception& error) {
    vllm::last_error() = error.what();
    return nullptr;
  }
}
VLLM_EXPORT void vllm_matrix_free(void* handle) { delete static_cast<Handle*>(handle); }

VLLM_EXPORT int vllm_matrix_pack(void* handle, int64_t first, int64_t count, const void* source, int type, int threads) {
  return vllm::guarded([&] {
    vllm::require(vllm::known_source(type), "matrix: no such source type");
    vllm::Session session(threads);
    vllm::pack(static_cast<Handle*>(handle)->matrix, first, count, source, static_cast<vllm::SourceType>(type));
  });
}
VLLM_EXPORT int vllm_matrix_row(void* handle, int64_t output, float* out) {
  return vllm::guarded([&] {
    const auto& m = static_cast<Handle*>(handle)->matrix;
    vllm::require(output >= 0 && output < m.n, "matrix: no such output");
    vllm::unpack_row(m, output, 1.0f, out);
  });
}
// activation < 0: out [m, n]. Otherwise out [m, n / 2] = act(gate) * up. `seconds`, if given, takes the time of the product.
VLLM_EXPORT int vllm_matrix_multiply(void* handle, const float* a, int64_t m, float* out, const float* bias, int activation,
                                     int threads, double* seconds) {
  return vllm::guarded([&] {
    auto& h = *static_cast<Handle*>(handle);
    const auto& w = h.matrix;
    vllm::require(m >= 0, "multiply: negative row count");
    vllm::require((activation >= 0) == w.interleaved, "multiply: an activation needs an interleaved matrix");
    vllm::Session session(threads);
    const int64_t lda = vllm::round_up(w.units, 16);
    h.rows.reserve(m * lda * 4);
    if (m > 0) std::memset(h.rows.data(), 0, m * lda * 4);
    for (int64_t r = 0; r < m; ++r)
      for (int64_t j = 0; j < w.k; ++j) {
        if (w.kind == vllm::WeightKind::kFp32)
          h.rows.as<float>()[r * lda + j] = a[r * w.k + j];
        else
          h.rows.as<uint16_t>()[r * lda * 2 + j] = vllm::bf16_bits(a[r * w.k + j]);
      }
    std::vector<float> columns(bias != nullptr ? w.panels * 32 : 0);
    for (int64_t i = 0; bias != nullptr && i < w.n; ++i) columns[w.column(i)] = bias[i];
    vllm::Epilogue e;
    e.bias = bias != nullptr ? columns.data() : nullptr;
    e.activation = activation;
    std::vector<float> gated;
    if (activation >= 0) {
      e.fn = vllm::store_gated_fp32;
      e.stride = w.panels * 16;
      gated.resize(m * e.stride);
      e.out = gated.data();
    } else {
      e.fn = vllm::store_sums;
      e.out = out;
      e.stride = w.n;
    }
    timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    vllm::multiply(w, h.rows.as<uint32_t>(), lda, m, e);
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (seconds != nullptr)
      *seconds = static_cast<double>(end.tv_sec - start.tv_sec) + 1e-9 * static_cast<double>(end.tv_nsec - start.tv_nsec);
    if (activation >= 0)
      for (int64_t r = 0; r < m; ++r) std::memcpy(out + r * (w.n / 2), gated.data() + r * e.stride, w.n / 2 * sizeof(float));
  });
}
