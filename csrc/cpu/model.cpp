#include "model.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "sampling.h"

namespace vllm {

// ------------------------------------------------------------------------------------------------ description
// The numbers that Python sends (cpu_backend.py, `encode_spec`): two flat lists, read in one order on both sides.

struct Rope {
  std::vector<float> inv_freq;
  float factor = 1.0f;
  Buffer table;  // this step's [tokens][2 * half]: cosines, then sines
};

// What a parameter is; the numbers are shared with cpu_backend.py.
enum Slot : int {
  kEmbed, kHead, kFinalNorm,
  kQ, kK, kV, kO, kGate, kUp, kDown,
  kInputNorm, kFfnNorm, kPostMixerNorm, kPostFfnNorm, kQNorm, kKNorm,
  kQBias, kKBias, kVBias, kOBias, kGateBias, kUpBias, kDownBias,
  kSlots
};

struct Layer {
  int num_heads = 0, kv_heads = 0, head_dim = 0, rope = -1, window = 0;
  bool qkv_bias = false, out_bias = false, qk_norm = false, ffn_bias = false, post_mixer_norm = false, post_ffn_norm = false;
  int64_t intermediate = 0;
  int activation = 0;
  float scale = 1.0f, softcap = 0.0f;

  Matrix qkv, o, gate_up, down;
  std::vector<float> input_norm, ffn_norm, post_mixer, post_ffn, q_norm, k_norm;
  std::vector<float> qkv_bias_values, o_bias_values, gate_up_bias_values, down_bias_values;  // by column

  CacheLayout layout;
  uint32_t* cache = nullptr;
  int plan = 0;  // index of the tile plan for its group size

  int64_t q_size() const { return int64_t{num_heads} * head_dim; }
  int64_t kv_size() const { return int64_t{kv_heads} * head_dim; }
};

class Reader {
 public:
  Reader(const int64_t* ints, int64_t n, const double* floats, int64_t m) : ints_(ints), n_(n), floats_(floats), m_(m) {}
  int64_t integer(int64_t low, int64_t high) {
    require(i_ < n_, "model description is too short");
    const int64_t value = ints_[i_++];
    require(value >= low && value <= high, "model description: a size is out of range");
    return value;
  }
  bool flag() { return integer(0, 1) != 0; }
  float number() {
    require(j_ < m_, "model description is too short");
    return static_cast<float>(floats_[j_++]);
  }
  void finish() const { require(i_ == n_ && j_ == m_, "model description is too long"); }

 private:
  const int64_t* ints_;
  int64_t n_, i_ = 0;
  const double* floats_;
  int64_t m_, j_ = 0;
};

// Where a step's time goes, for `vllm_model_profile`.
enum Phase : int { kPhaseEmbed, kPhaseNorm, kPhaseQkv, kPhaseRope, kPhaseAttention, kPhaseOut, kPhaseGateUp, kPhaseDown, kPhaseHead, kPhases };

class Model {
 public:
  int64_t vocab = 0, hidden = 0;
  int threads = 1;
  float eps = 1e-6f, embed_scale = 1.0f, logits_softcap = 0.0f, logits_scale = 1.0f;
  bool tied = true, bf16 = true;
  WeightKind kind = WeightKind::kBf16;
  std::vector<Layer> layers;
  std::vector<Rope> ropes;
  std::vector<int> groups;  // distinct group sizes
  Matrix embed, head;       // head is unused when tied
  std::vector<float> final_norm;
  Buffer weights, scales;

  int64_t num_blocks = 0, block_words = 0;
  int block_size = 0;
  Buffer cache;

  // Step memory. Rows of x are padded to 16 with zeros that nobody overwrites.
  Buffer x, h, qkv, q, mixed, gated, extra, tail_x, tail_mixed;
  mutable Buffer head_rows, logits;
  AttentionScratch attention_scratch;
  std::vector<std::vector<QueryTile>> plans;
  mutable double seconds[kPhases] = {};

  int64_t per_unit() const { return bf16 ? 2 : 1; }
  int64_t x_stride() const { return round_up(hidden, 16); }
  int64_t lda(int64_t k) const { return round_up(k, 32) / per_unit(); }  // units of a row of k inputs
  const Matrix& head_matrix() const { return tied ? embed : head; }

  void build(Reader& in);
  void set(int layer, int slot, int64_t first, int64_t count, const void* data, SourceType type);
  void make_cache(int64_t blocks, int size);
  void forward(const StepShape& step, const int32_t* token_ids, const int32_t* hidden_rows, int32_t count, void* out);

 private:
  void check_step(const StepShape& step, const int32_t* token_ids, const int32_t* hidden_rows, int32_t count) const;
  void norm_rows(const float* rows, int64_t stride, int64_t count, const std::vector<float>& weight, void* out, int64_t out_stride);
  void add_normed(const float* rows, int64_t stride, int64_t count, const std::vector<float>& weight, float* to);
  void rope_and_cache(const Layer& layer, const StepShape& step, int32_t row, int32_t token);
  void prefetch_slot(const Layer& layer, const StepShape& step, int32_t row, int32_t token) const;
};

namespace {

struct Timer {
  double* to;
  timespec start;
  explicit Timer(double& place) : to(&place) { clock_gettime(CLOCK_MONOTONIC, &start); }
  ~Timer() {
    timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    *to += static_cast<double>(end.tv_sec - start.tv_sec) + 1e-9 * static_cast<double>(end.tv_nsec - start.tv_nsec);
  }
};

// Rows in one task of the cheap row-by-row phases; a step of few rows does them on the calling thread.
constexpr int64_t kRowGrain = 8;
template <class Body>
void over_rows(int64_t count, Body&& body) {
  if (count <= 3) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(kRowGrain, count / (2 * session_threads())));
  parallel_for(static_cast<int>(ceil_div(count, grain)), [&](int task, int) {
    const int64_t end = std::min(count, (task + 1) * grain);
    for (int64_t i = task * grain; i < end; ++i) body(i);
  });
}

// 1 / sqrt(mean of squares + eps) over `n` numbers, in 16 lanes x 4 sums in a fixed order. The row is padded to 16 with zeros.
VLLM_INLINE float inverse_rms(const float* x, int64_t n, float eps) {
  F sum[4] = {zero(), zero(), zero(), zero()};
  const int64_t vectors = ceil_div(n, 16);
  int64_t i = 0;
  for (; i + 4 <= vectors; i += 4)
    for (int j = 0; j < 4; ++j) {
      const F v = load(x + (i + j) * 16);
      sum[j] = fma(v, v, sum[j]);
    }
  for (; i < vectors; ++i) {
    const F v = load(x + i * 16);
    sum[i & 3] = fma(v, v, sum[i & 3]);
  }
  const float total = reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
  return 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
}

std::vector<float> padded(int64_t n) { return std::vector<float>(round_up(n, 32), 0.0f); }

void copy_vector(std::vector<float>& to, int64_t offset, int64_t size, int64_t first, int64_t count, const void* data,
                 SourceType type) {
  require(type == SourceType::kFp32, "a norm weight or bias must come as fp32");
  require(first == 0 && count == size, "a norm weight or bias must come whole");
  std::memcpy(to.data() + offset, data, count * sizeof(float));
}

}  // namespace

void Model::build(Reader& in) {
  constexpr int64_t kMany = int64_t{1} << 31;
  vocab = in.integer(1, kMany);
  hidden = in.integer(1, kMany);
  const int64_t count = in.integer(0, 100000);
  tied = in.flag();
  kind = static_cast<WeightKind>(in.integer(0, 2));
  bf16 = kind != WeightKind::kFp32;
  eps = in.number();
  embed_scale = in.number();
  logits_softcap = in.number();
  logits_scale = in.number();
  const int64_t rope_count = in.integer(0, 100000);
  for (int64_t i = 0; i < rope_count; ++i) {
    Rope rope;
    rope.factor = in.number();
    const int64_t half = in.integer(1, 65536);
    for (int64_t j = 0; j < half; ++j) rope.inv_freq.push_back(in.number());
    ropes.push_back(std::move(rope));
  }
  const WeightKind embed_kind = kind == WeightKind::kInt8 && !tied ? WeightKind::kBf16 : kind;
  embed = Matrix::describe(embed_kind, vocab, hidden);
  if (!tied) head = Matrix::describe(kind, vocab, hidden);
  final_norm = padded(hidden);
  layers.resize(count);
  for (Layer& l : layers) {
    l.num_heads = static_cast<int>(in.integer(1, 65536));
    l.kv_heads = static_cast<int>(in.integer(1, 65536));
    l.head_dim = static_cast<int>(in.integer(1, 4096));
    l.rope = static_cast<int>(in.integer(-1, rope_count - 1));
    l.window = static_cast<int>(in.integer(0, kMany - 1));
    l.qkv_bias = in.flag();
    l.out_bias = in.flag();
    l.qk_norm = in.flag();
    l.intermediate = in.integer(1, kMany);
    l.activation = static_cast<int>(in.integer(0, 2));
    l.ffn_bias = in.flag();
    l.post_mixer_norm = in.flag();
    l.post_ffn_norm = in.flag();
    l.scale = in.number();
    l.softcap = in.number();
    require(l.num_heads % l.kv_heads == 0, "heads must be a multiple of kv heads");
    require(l.rope < 0 || static_cast<int64_t>(2 * ropes[l.rope].inv_freq.size()) <= l.head_dim, "rope is wider than a head");
    require(l.scale > 0.0f, "attention scale must be positive");
    l.qkv = Matrix::describe(kind, l.q_size() + 2 * l.kv_size(), hidden);
    l.o = Matrix::describe(kind, hidden, l.q_size());
    l.gate_up = Matrix::describe(kind, 2 * l.intermediate, hidden, true);
    l.down = Matrix::describe(kind, hidden, l.intermediate);
    l.input_norm = l.ffn_norm = padded(hidden);
    if (l.post_mixer_norm) l.post_mixer = padded(hidden);
    if (l.post_ffn_norm) l.post_ffn = padded(hidden);
    if (l.qk_norm) l.q_norm = l.k_norm = padded(l.head_dim);
    if (l.qkv_bias) l.qkv_bias_values.assign(l.qkv.panels * 32, 0.0f);
    if (l.out_bias) l.o_bias_values.assign(l.o.panels * 32, 0.0f);
    if (l.ffn_bias) {
      l.gate_up_bias_values.assign(l.gate_up.panels * 32, 0.0f);
      l.down_bias_values.assign(l.down.panels * 32, 0.0f);
    }
    const int group = l.num_heads / l.kv_heads;
    const auto known = std::find(groups.begin(), groups.end(), group);
    l.plan = static_cast<int>(known - groups.begin());
    if (known == groups.end()) groups.push_back(group);
  }
  in.finish();
  plans.resize(groups.size());

  // All weights in one mapping, in the order in which a step reads them.
  std::vector<Matrix*> order;
  for (Layer& l : layers)
    for (Matrix* m : {&l.qkv, &l.o, &l.gate_up, &l.down}) order.push_back(m);
  if (!tied) order.push_back(&head);
  order.push_back(&embed);
  int64_t bytes = 0, columns = 0;
  for (const Matrix* m : order) bytes += round_up(m->bytes(), 4096), columns += m->panels * 32;
  weights = Buffer(bytes + 8192);  // prefetches run a little past the end
  if (kind == WeightKind::kInt8) scales = Buffer(columns * sizeof(float));
  bytes = columns = 0;
  for (Matrix* m : order) {
    m->data = weights.as<uint8_t>() + bytes;
    if (kind == WeightKind::kInt8) m->scales = scales.as<float>() + columns;
    bytes += round_up(m->bytes(), 4096), columns += m->panels * 32;
  }
}

void Model::set(int index, int slot, int64_t first, int64_t count, const void* data, SourceType type) {
  require(slot >= 0 && slot < kSlots, "no such parameter");
  require(data != nullptr || count == 0, "no data");
  const auto part = [&](Matrix& matrix, int64_t offset, int64_t size) {
    require(first >= 0 && count >= 0 && first + count <= size, "rows outside the parameter");
    pack(matrix, offset + first, count, data, type);
  };
  const auto vector = [&](std::vector<float>& to, int64_t size) {
    require(!to.empty(), "the model has no such parameter");
    copy_vector(to, 0, size, first, count, data, type);
  };
  if (slot == kEmbed) return part(embed, 0, vocab);
  if (slot == kHead) {
    require(!tied, "the head is tied to the embedding");
    return part(head, 0, vocab);
  }
  if (slot == kFinalNorm) return vector(final_norm, hidden);
  require(index >= 0 && index < static_cast<int>(layers.size()), "no such layer");
  Layer& l = layers[index];
  const int64_t q = l.q_size(), kv = l.kv_size();
  // A bias of gate or up goes to its columns of the interleaved matrix.
  const auto gate_bias = [&](int64_t offset) {
    require(!l.gate_up_bias_values.empty(), "the model has no such parameter");
    require(type == SourceType::kFp32 && first == 0 && count == l.intermediate, "a bias must come whole, as fp32");
    for (int64_t i = 0; i < count; ++i)
      l.gate_up_bias_values[l.gate_up.column(offset + i)] = static_cast<const float*>(data)[i];
  };
  const auto qkv_bias = [&](int64_t offset, int64_t size) {
    require(!l.qkv_bias_values.empty(), "the model has no such parameter");
    copy_vector(l.qkv_bias_values, offset, size, first, count, data, type);
  };
  switch (slot) {
    case kQ: return part(l.qkv, 0, q);
    case kK: return part(l.qkv, q, kv);
    case kV: return part(l.qkv, q + kv, kv);
    case kO: return part(l.o, 0, hidden);
    case kGate: return part(l.gate_up, 0, l.intermediate);
    case kUp: return part(l.gate_up, l.intermediate, l.intermediate);
    case kDown: return part(l.down, 0, hidden);
    case kInputNorm: return vector(l.input_norm, hidden);
    case kFfnNorm: return vector(l.ffn_norm, hidden);
    case kPostMixerNorm: return vector(l.post_mixer, hidden);
    case kPostFfnNorm: return vector(l.post_ffn, hidden);
    case kQNorm: return vector(l.q_norm, l.head_dim);
    case kKNorm: return vector(l.k_norm, l.head_dim);
    case kQBias: return qkv_bias(0, q);
    case kKBias: return qkv_bias(q, kv);
    case kVBias: return qkv_bias(q + kv, kv);
    case kOBias: return vector(l.o_bias_values, hidden);
    case kGateBias: return gate_bias(0);
    case kUpBias: return gate_bias(l.intermediate);
    case kDownBias: return vector(l.down_bias_values, hidden);
    default: throw Error("no such parameter");
  }
}

void Model::make_cache(int64_t blocks, int size) {
  require(blocks > 0 && blocks < (int64_t{1} << 31), "the cache needs at least one block");
  require(size > 0 && kPartition % size == 0, "block size must divide 256");
  int64_t words = 0;
  for (Layer& l : layers) {
    l.layout = CacheLayout::describe(bf16, size, l.kv_heads, l.head_dim);
    words += round_up(l.layout.layer_words, 16);
  }
  // An odd number of pages, so that the same head of many blocks spreads over all sets of the caches.
  block_words = (ceil_div(words, 1024) | 1) * 1024;
  if (words < 1024) block_words = words;
  Buffer fresh(blocks * block_words * 4 + 4096);
  cache = std::move(fresh);
  words = 0;
  for (Layer& l : layers) {
    l.layout.block_words = block_words;
    l.cache = cache.as<uint32_t>() + words;
    words += round_up(l.layout.layer_words, 16);
  }
  num_blocks = blocks;
  block_size = size;
}

void Model::check_step(const StepShape& s, const int32_t* token_ids, const int32_t* hidden_rows, int32_t count) const {
  require(num_blocks > 0, "forward: no cache");
  require(s.rows >= 0 && s.tokens >= 0 && s.max_blocks >= 0 && s.sets >= 0 && count >= 0, "forward: negative size");
  require(s.query_start[0] == 0 && s.query_start[s.rows] == s.tokens, "forward: query_start does not span the tokens");
  for (int32_t t = 0; t < s.tokens; ++t) require(token_ids[t] >= 0 && token_ids[t] < vocab, "forward: token id outside the vocabulary");
  for (int32_t r = 0; r < s.rows; ++r) {
    const int64_t length = s.seq_lens[r], queries = int64_t{s.query_start[r + 1]} - s.query_start[r];
    require(queries >= 1 && queries <= length, "forward: a row needs at least one token and no more than its length");
    require(ceil_div(length, block_size) <= s.max_blocks, "forward: block table too short");
    for (int64_t i = 0; i < queries; ++i)
      require(s.positions[s.query_start[r] + i] == length - queries + i, "forward: positions do not end at the row's length");
    const int32_t* table = s.block_tables + static_cast<int64_t>(r) * s.max_blocks;
    bool inside = true;
    for (int64_t b = 0; b < ceil_div(length, block_size); ++b)
      inside &= static_cast<uint32_t>(table[b]) < static_cast<uint64_t>(num_blocks);
    require(inside, "forward: block outside the cache");
  }
  for (int32_t i = 0; i < count; ++i) {
    require(hidden_rows[i] >= 0 && hidden_rows[i] < s.tokens, "forward: hidden row outside the step");
    require(i == 0 || hidden_rows[i] > hidden_rows[i - 1], "forward: hidden rows must ascend");
  }
  int32_t next = 0;
  for (int32_t g = 0; g < s.sets; ++g) {
    const int32_t first = s.shared_rows[2 * g], rows = s.shared_rows[2 * g + 1];
    require(first >= next && rows >= 2 && first + rows <= s.rows, "forward: sharing sets must be disjoint, ascending, of two rows or more");
    next = first + rows;
    for (int32_t r = first; r < next; ++r) {
      require(int64_t{s.shared_blocks[g]} * block_size <= s.seq_lens[r] && s.shared_blocks[g] >= 0, "forward: more shared blocks than a row has");
      check(std::memcmp(s.block_tables + int64_t{r} * s.max_blocks, s.block_tables + int64_t{first} * s.max_blocks,
                        s.shared_blocks[g] * 4) == 0,
            "forward: shared blocks differ");
    }
  }
}

void Model::norm_rows(const float* rows, int64_t stride, int64_t count, const std::vector<float>& weight, void* out,
                      int64_t out_stride) {
  over_rows(count, [&](int64_t i) {
    const float* row = rows + i * stride;
    const F scale = set1(inverse_rms(row, hidden, eps));
    for (int64_t c = 0; c < x_stride(); c += 16) {
      const F y = (load(row + c) * scale) * load(weight.data() + c);
      if (bf16)
        store_bf16(static_cast<uint16_t*>(out) + i * out_stride * 2 + c, y);
      else
        store(static_cast<float*>(out) + i * out_stride + c, y);
    }
  });
}

void Model::add_normed(const float* rows, int64_t stride, int64_t count, const std::vector<float>& weight, float* to) {
  over_rows(count, [&](int64_t i) {
    const float* row = rows + i * stride;
    float* x_row = to + i * x_stride();
    const F scale = set1(inverse_rms(row, hidden, eps));
    for (int64_t c = 0; c < x_stride(); c += 16)
      store(x_row + c, load(x_row + c) + (load(row + c) * scale) * load(weight.data() + c));
  });
}

void Model::prefetch_slot(const Layer& l, const StepShape& step, int32_t row, int32_t token) const {
  const int32_t position = step.positions[token];
  const int64_t block = step.block_tables[static_cast<int64_t>(row) * step.max_blocks + position / block_size];
  prefetch_key_value(l.layout, l.cache, block, position % block_size);
}

// One token: q/k norm and rope, the query to `q`, key and value to the cache.
void Model::rope_and_cache(const Layer& l, const StepShape& step, int32_t row, int32_t token) {
  const int64_t dim = l.head_dim, q_size = l.q_size(), total = q_size + 2 * l.kv_size();
  float* values = qkv.as<float>() + token * round_up(total, 16);
  const int32_t position = step.positions[token];
  const int64_t block = step.block_tables[static_cast<int64_t>(row) * step.max_blocks + position / block_size];
  const int offset = position % block_size;
  const bool last = token + 1 == step.query_start[row + 1];
  const int64_t half = l.rope < 0 ? 0 : static_cast<int64_t>(ropes[l.rope].inv_freq.size());
  const float* cosines = l.rope < 0 ? nullptr : ropes[l.rope].table.as<float>() + token * 2 * half;
  const float* sines = cosines + half;
  alignas(64) float head[4096];
  for (int i = 0; i < l.num_heads + l.kv_heads; ++i) {
    const bool is_query = i < l.num_heads;
    float* from = values + i * dim;
    if (l.qk_norm) {
      // Heads need not be whole vectors: normed in a padded copy.
      std::memcpy(head, from, dim * 4);
      for (int64_t c = dim; c < round_up(dim, 16); ++c) head[c] = 0.0f;
      const F scale = set1(inverse_rms(head, dim, eps));
      const float* weight = (is_query ? l.q_norm : l.k_norm).data();
      for (int64_t c = 0; c < dim; c += 16) store(head + c, (load(head + c) * scale) * load(weight + c));
      std::memcpy(from, head, dim * 4);
    }
    if (half % 16 == 0) {
      for (int64_t c = 0; c < half; c += 16) {
        const F a = load(from + c), b = load(from + half + c), cosine = load(cosines + c), sine = load(sines + c);
        store(from + c, a * cosine - b * sine);
        store(from + half + c, b * cosine + a * sine);
      }
    } else {
      for (int64_t c = 0; c < half; ++c) {
        const float a = from[c], b = from[half + c];
        from[c] = a * cosines[c] - b * sines[c];
        from[half + c] = b * cosines[c] + a * sines[c];
      }
    }
    if (is_query) {
      uint32_t* to = q.as<uint32_t>() + (token * l.num_heads + i) * l.layout.k_units;
      if (!bf16) {
        std::memcpy(to, from, dim * 4);
      } else {
        alignas(64) uint16_t narrow[16];
        for (int64_t c = 0; c < dim; c += 16) {
          const int64_t count = std::min<int64_t>(16, dim - c);
          if (count == 16) {
            store_bf16(reinterpret_cast<uint16_t*>(to) + c, load(from + c));
          } else {
            store_bf16(narrow, load_some(from + c, static_cast<int>(count)));
            std::memcpy(reinterpret_cast<uint16_t*>(to) + c, narrow, count * 2);
          }
        }
      }
    } else {
      const int kv = i - l.num_heads;
      write_key_value(l.layout, l.cache, block, offset, kv, from, values + q_size + l.kv_size() + kv * dim, last);
    }
  }
}

void Model::forward(const StepShape& step, const int32_t* token_ids, const int32_t* hidden_rows, int32_t count, void* out) {
  check_step(step, token_ids, hidden_rows, count);
  if (step.tokens == 0) return;
  Session session(threads);
  int64_t tokens = step.tokens;
  const int64_t stride = x_stride(), h_stride = lda(hidden);

  x.reserve(tokens * stride * 4);
  h.reserve(tokens * h_stride * 4);
  int64_t qkv_words = 0, q_words = 0, mixed_words = 0, gated_words = 0;
  for (const Layer& l : layers) {
    qkv_words = std::max(qkv_words, round_up(l.q_size() + 2 * l.kv_size(), 16));
    q_words = std::max(q_words, l.num_heads * l.layout.k_units);
    mixed_words = std::max(mixed_words, lda(l.q_size()));
    gated_words = std::max(gated_words, lda(l.intermediate));
  }
  qkv.reserve(tokens * qkv_words * 4);
  q.reserve(tokens * q_words * 4);
  mixed.reserve(tokens * mixed_words * 4);
  gated.reserve(tokens * gated_words * 4);
  extra.reserve(tokens * stride * 4);

  float* rows = x.as<float>();
  const void* mixed_rows = mixed.data();
  std::vector<int32_t> row_of(tokens);
  for (int32_t r = 0; r < step.rows; ++r)
    for (int32_t t = step.query_start[r]; t < step.query_start[r + 1]; ++t) row_of[t] = r;
  {
    Timer timer(seconds[kPhaseEmbed]);
    for (size_t i = 0; i < groups.size(); ++i) plan_tiles(step, groups[i], block_size, plans[i]);
    for (Rope& rope : ropes) rope.table.reserve(tokens * rope.inv_freq.size() * 8);
    over_rows(tokens, [&](int64_t t) {
      unpack_row(embed, token_ids[t], embed_scale, rows + t * stride);
      for (Rope& rope : ropes) {
        const int64_t half = static_cast<int64_t>(rope.inv_freq.size());
        float* to = rope.table.as<float>() + t * 2 * half;
        for (int64_t i = 0; i < half; ++i) {
          const float angle = static_cast<float>(step.positions[t]) * rope.inv_freq[i];
          to[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * rope.factor;
          to[half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * rope.factor;
        }
      }
    });
  }

  for (size_t index = 0; index < layers.size(); ++index) {
    const Layer& l = layers[index];
    const int64_t qkv_stride = round_up(l.q_size() + 2 * l.kv_size(), 16);
    {
      Timer timer(seconds[kPhaseNorm]);
      norm_rows(rows, stride, tokens, l.input_norm, h.data(), h_stride);
    }
    {
      Timer timer(seconds[kPhaseQkv]);
      Epilogue e;
      e.fn = store_sums;
      e.bias = l.qkv_bias ? l.qkv_bias_values.data() : nullptr;
      e.out = qkv.data();
      e.stride = qkv_stride;
      multiply(l.qkv, h.as<uint32_t>(), h_stride, tokens, e);
    }
    {
      Timer timer(seconds[kPhaseRope]);
      over_rows(tokens, [&](int64_t t) {
        if (t + 1 < tokens) prefetch_slot(l, step, row_of[t + 1], static_cast<int32_t>(t + 1));
        rope_and_cache(l, step, row_of[t], static_cast<int32_t>(t));
      });
    }
    {
      Timer timer(seconds[kPhaseAttention]);
      AttentionLayer a;
      a.layout = l.layout;
      a.cache = l.cache;
      a.num_heads = l.num_heads;
      a.scale = l.scale;
      a.softcap = l.softcap;
      a.window = l.window;
      attention(a, step, plans[l.plan], q.as<uint32_t>(), l.num_heads * l.layout.k_units, mixed.data(),
                lda(l.q_size()) * per_unit(), attention_scratch);
    }
    if (index + 1 == layers.size() && count < tokens) {
      // After the last layer's attention only the rows that are asked for go on.
      if (count == 0) return;
      const int64_t words = lda(l.q_size());
      tail_x.reserve(count * stride * 4);
      tail_mixed.reserve(count * words * 4);
      for (int32_t i = 0; i < count; ++i) {
        std::memcpy(tail_x.as<float>() + i * stride, rows + hidden_rows[i] * stride, stride * 4);
        std::memcpy(tail_mixed.as<uint32_t>() + i * words, mixed.as<uint32_t>() + hidden_rows[i] * words, words * 4);
      }
      rows = tail_x.as<float>();
      mixed_rows = tail_mixed.data();
      tokens = count;
    }
    {
      Timer timer(seconds[kPhaseOut]);
      Epilogue e;
      e.bias = l.out_bias ? l.o_bias_values.data() : nullptr;
      e.fn = l.post_mixer_norm ? store_sums : add_sums;
      e.out = l.post_mixer_norm ? extra.data() : rows;
      e.stride = stride;
      multiply(l.o, static_cast<const uint32_t*>(mixed_rows), lda(l.q_size()), tokens, e);
      if (l.post_mixer_norm) add_normed(extra.as<float>(), stride, tokens, l.post_mixer, rows);
    }
    {
      Timer timer(seconds[kPhaseNorm]);
      norm_rows(rows, stride, tokens, l.ffn_norm, h.data(), h_stride);
    }
    {
      Timer timer(seconds[kPhaseGateUp]);
      Epilogue e;
      e.fn = bf16 ? store_gated_bf16 : store_gated_fp32;
      e.bias = l.ffn_bias ? l.gate_up_bias_values.data() : nullptr;
      e.activation = l.activation;
      e.out = gated.data();
      e.stride = lda(l.intermediate) * per_unit();
      multiply(l.gate_up, h.as<uint32_t>(), h_stride, tokens, e);
    }
    {
      Timer timer(seconds[kPhaseDown]);
      Epilogue e;
      e.bias = l.ffn_bias ? l.down_bias_values.data() : nullptr;
      e.fn = l.post_ffn_norm ? store_sums : add_sums;
      e.out = l.post_ffn_norm ? extra.data() : rows;
      e.stride = stride;
      multiply(l.down, gated.as<uint32_t>(), lda(l.intermediate), tokens, e);
      if (l.post_ffn_norm) add_normed(extra.as<float>(), stride, tokens, l.post_ffn, rows);
    }
  }
  Timer timer(seconds[kPhaseNorm]);
  if (layers.empty() && count < tokens)
    for (int32_t i = 0; i < count; ++i) std::memmove(rows + i * stride, rows + hidden_rows[i] * stride, stride * 4);
  norm_rows(rows, stride, count, final_norm, out, h_stride);
  const int64_t used = stride * 4 / per_unit();  // the caller's memory need not be clear
  for (int32_t i = 0; i < count && used < h_stride * 4; ++i)
    std::memset(static_cast<char*>(out) + i * h_stride * 4 + used, 0, h_stride * 4 - used);
}

int vocab_size(const Model& model) { return static_cast<int>(model.vocab); }
int model_threads(const Model& model) { return model.threads; }

void logits_tile(const Model& model, const void* hidden, const int32_t* rows, int count, float* out, int64_t stride) {
  Timer timer(model.seconds[kPhaseHead]);
  const int64_t lda = model.lda(model.hidden);
  const uint32_t* from = static_cast<const uint32_t*>(hidden);
  bool consecutive = true;
  for (int i = 1; i < count; ++i) consecutive = consecutive && rows[i] == rows[0] + i;
  const uint32_t* a = from + rows[0] * lda;
  if (!consecutive) {
    model.head_rows.reserve(count * lda * 4);
    for (int i = 0; i < count; ++i) std::memcpy(model.head_rows.as<uint32_t>() + i * lda, from + rows[i] * lda, lda * 4);
    a = model.head_rows.as<uint32_t>();
  }
  Epilogue e;
  e.fn = store_logits;
  e.out = out;
  e.stride = stride;
  e.scale = model.logits_scale;
  e.softcap = model.logits_softcap;
  multiply(model.head_matrix(), a, lda, count, e);
}

}  // namespace vllm

// ------------------------------------------------------------------------------------------------ C face

using vllm::guarded;
using vllm::Model;

VLLM_EXPORT void* vllm_model_create(const int64_t* ints, int64_t int_count, const double* floats, int64_t float_count, int threads) {
  try {
    auto model = std::make_unique<Model>();
    vllm::Reader reader(ints, int_count, floats, float_count);
    model->threads = threads;
    model->build(reader);
    return model.release();
  } catch (const std::exception& error) {
    vllm::last_error() = error.what();
    return nullptr;
  }
}
VLLM_EXPORT void vllm_model_free(void* model) { delete static_cast<Model*>(model); }

VLLM_EXPORT int vllm_model_set(void* model, int layer, int slot, int64_t first, int64_t count, const void* data, int type) {
  return guarded([&] {
    Model& m = *static_cast<Model*>(model);
    vllm::require(vllm::known_source(type), "no such source type");
    vllm::Session session(m.threads);
    m.set(layer, slot, first, count, data, static_cast<vllm::SourceType>(type));
  });
}
VLLM_EXPORT int vllm_model_make_cache(void* model, int64_t blocks, int block_size) {
  return guarded([&] { static_cast<Model*>(model)->make_cache(blocks, block_size); });
}
VLLM_EXPORT void vllm_model_drop_cache(void* model) {
  Model& m = *static_cast<Model*>(model);
  m.cache = vllm::Buffer();
  m.num_blocks = 0;
}
VLLM_EXPORT int vllm_model_copy_blocks(void* model, const int32_t* pairs, int64_t count) {
  return guarded([&] {
    Model& m = *static_cast<Model*>(model);
    for (int64_t i = 0; i < 2 * count; ++i) vllm::require(pairs[i] >= 0 && pairs[i] < m.num_blocks, "copy_blocks: block outside the cache");
    const auto copy = [&](int64_t i) {
      std::memcpy(m.cache.as<uint32_t>() + pairs[2 * i + 1] * m.block_words, m.cache.as<uint32_t>() + pairs[2 * i] * m.block_words,
                  m.block_words * 4);
    };
    if (count <= 2) {
      for (int64_t i = 0; i < count; ++i) copy(i);
      return;
    }
    vllm::Session session(m.threads);
    vllm::parallel_for(static_cast<int>(count), [&](int i, int) { copy(i); });
  });
}
VLLM_EXPORT int64_t vllm_model_row_bytes(void* model) {
  const Model& m = *static_cast<Model*>(model);
  return m.lda(m.hidden) * 4;
}
VLLM_EXPORT int64_t vllm_model_weight_bytes(void* model) { return static_cast<int64_t>(static_cast<Model*>(model)->weights.size()); }
VLLM_EXPORT int64_t vllm_model_block_bytes(void* model) {
  const Model& m = *static_cast<Model*>(model);
  return m.num_blocks > 0 ? m.block_words * 4 : 0;
}

// Runs one step. `hidden_out` takes `hidden_count` rows of vllm_model_row_bytes.
VLLM_EXPORT int vllm_model_forward(void* model, int32_t tokens, const int32_t* token_ids, const int32_t* positions, int32_t rows,
                                   const int32_t* query_start, const int32_t* seq_lens, const int32_t* block_tables,
                                   int32_t max_blocks, int32_t hidden_count, const int32_t* hidden_rows, int32_t sets,
                                   const int32_t* shared_rows, const int32_t* shared_blocks, void* hidden_out) {
  return guarded([&] {
    vllm::StepShape step;
    step.rows = rows;
    step.tokens = tokens;
    step.max_blocks = max_blocks;
    step.positions = positions;
    step.query_start = query_start;
    step.seq_lens = seq_lens;
    step.block_tables = block_tables;
    step.shared_rows = shared_rows;
    step.shared_blocks = shared_blocks;
    step.sets = sets;
    static_cast<Model*>(model)->forward(step, token_ids, hidden_rows, hidden_count, hidden_out);
  });
}
VLLM_EXPORT int vllm_model_logits(void* model, const void* hidden, const int32_t* rows, int32_t count, float* out) {
  return guarded([&] {
    const Model& m = *static_cast<Model*>(model);
    if (count <= 0) return;
    vllm::Session session(m.threads);
    vllm::logits_tile(m, hidden, rows, count, out, m.vocab);
  });
}

// Draws from hidden rows: head and sampler tile by tile, so that a tile's logits are still in the cache when they are read.
namespace {
struct HeadSource {
  const Model& model;
  const void* hidden;
};
const float* head_tile(void* context, const int32_t* rows, int32_t count) {
  const auto& source = *static_cast<HeadSource*>(context);
  vllm::Buffer& out = source.model.logits;
  out.reserve(int64_t{count} * source.model.vocab * 4);
  vllm::logits_tile(source.model, source.hidden, rows, count, out.as<float>(), source.model.vocab);
  return out.as<float>();
}
int32_t tile_rows(const Model& model) {
  return static_cast<int32_t>(std::clamp<int64_t>((int64_t{32} << 20) / (4 * model.vocab), 16, 64));
}
}  // namespace

VLLM_EXPORT int vllm_model_sample(void* model, const void* hidden, const vllm::sampling::SamplingArgs* args) {
  return guarded([&] {
    const Model& m = *static_cast<Model*>(model);
    vllm::Session session(m.threads);
    HeadSource source{m, hidden};
    vllm::sampling::sample(*args, {head_tile, &source, tile_rows(m)});
  });
}
VLLM_EXPORT int vllm_model_token_logprobs(void* model, const void* hidden, const vllm::sampling::TokenLogprobArgs* args) {
  return guarded([&] {
    const Model& m = *static_cast<Model*>(model);
    vllm::Session session(m.threads);
    HeadSource source{m, hidden};
    vllm::sampling::token_logprobs(*args, {head_tile, &source, tile_rows(m)});
  });
}

// Seconds spent in each phase since the last call: embed, norm, qkv, rope, attention, out, gate/up, down, head.
VLLM_EXPORT int vllm_model_profile(void* model, double* out, int count) {
  Model& m = *static_cast<Model*>(model);
  for (int i = 0; i < count && i < vllm::kPhases; ++i) {
    out[i] = m.seconds[i];
    m.seconds[i] = 0.0;
  }
  return vllm::kPhases;
}
