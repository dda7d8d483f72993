#include "attention.h"

#include <algorithm>
#include <cmath>

#include "micro.h"

namespace vllm {
namespace {

constexpr float kLog2e = 1.44269504088896341f;

// What one thread needs for one tile of queries against one partition.
struct Scratch {
  float* scores;      // [kTileRows][columns]
  uint32_t* weights;  // [kTileRows][units of keys]
  uint32_t* queries;  // [kTileRows][units of head_dim]
  float* state;       // [kTileRows][v_columns], merged so far
  float* part;        // [kTileRows][v_columns], of the current partition
  int64_t columns, weight_units;

  static int64_t bytes(const CacheLayout& l) {
    const int64_t tiles = kPartition / l.keys;
    return kTileRows * (tiles * 16 * 4 + tiles * 16 * 4 + l.k_units * 4 + 2 * l.v_columns * 4) + 1024;
  }
  Scratch(void* memory, const CacheLayout& l) {
    const int64_t tiles = kPartition / l.keys;
    columns = tiles * 16;
    weight_units = tiles * (l.bf16 ? 8 : 16);
    char* p = static_cast<char*>(memory);
    const auto take = [&](int64_t words) {
      char* at = p;
      p += round_up(words * 4, 64);
      return at;
    };
    scores = reinterpret_cast<float*>(take(kTileRows * columns));
    weights = reinterpret_cast<uint32_t*>(take(kTileRows * weight_units));
    queries = reinterpret_cast<uint32_t*>(take(kTileRows * l.k_units));
    state = reinterpret_cast<float*>(take(kTileRows * l.v_columns));
    part = reinterpret_cast<float*>(take(kTileRows * l.v_columns));
  }
};

// Greatest score (in powers of two) and sum of weights of each query; 16 lanes so that they can be merged as vectors.
struct alignas(64) Sums {
  float greatest[16];
  float total[16];
  void clear() {
    for (int i = 0; i < 16; ++i) greatest[i] = -__builtin_inff(), total[i] = 0.0f;
  }
};

struct Keys {  // the tiles of one partition that are visited
  const uint32_t* k[kPartition];
  const uint32_t* v[kPartition];
  int tiles;
};

// Query i sees keys low[i] .. high[i] - 1 of the partition.
struct Ranges {
  int low[kTileRows], high[kTileRows];
};

VLLM_INLINE void prefetch_lines(const uint32_t* p, int64_t words) {
  for (int64_t i = 0; i < words; i += 16) __builtin_prefetch(p + i, 0, 2);
}

template <class Op, int R>
void partition(const AttentionLayer& layer, const Keys& keys, const Ranges& ranges, const uint32_t* queries, const Scratch& s,
               float* part, Sums& sums) {
  const CacheLayout& l = layer.layout;
  // scores
  constexpr bool kFetch = R <= 4;  // few queries: bound by memory
  if (kFetch) {
    prefetch_lines(keys.k[0], l.k_words);
    if (keys.tiles > 1) prefetch_lines(keys.k[1], l.k_words);
  }
  for (int t = 0; t < keys.tiles; t += 2) {
    const bool two = t + 1 < keys.tiles;
    if (kFetch) {
      if (t + 2 < keys.tiles) prefetch_lines(keys.k[t + 2], l.k_words);
      if (t + 3 < keys.tiles) prefetch_lines(keys.k[t + 3], l.k_words);
      prefetch_lines(keys.v[t], l.v_words);
      if (two) prefetch_lines(keys.v[t + 1], l.v_words);
    }
    F acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
    micro<Op, R>(queries, l.k_units, keys.k[t], two ? keys.k[t + 1] : keys.k[t], 16, l.k_units, acc);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      store(s.scores + r * s.columns + t * 16, acc[r][0]);
      if (two) store(s.scores + r * s.columns + t * 16 + 16, acc[r][1]);
    }
  }
  // weights
  const int width = l.keys;
  const F minus_infinity = set1(-__builtin_inff());
  for (int r = 0; r < R; ++r) {
    float* row = s.scores + r * s.columns;
    const int low = ranges.low[r], high = ranges.high[r];
    uint32_t* weights = s.weights + r * s.weight_units;
    const auto put = [&](int tile, F w) {
      if (Op::kBf16)
        store_bf16(reinterpret_cast<uint16_t*>(weights + tile * 8), w);
      else
        store(reinterpret_cast<float*>(weights + tile * 16), w);
    };
    if (low >= high) {  // nothing of this partition is seen
      for (int t = 0; t < keys.tiles; ++t) put(t, zero());
      sums.greatest[r] = -__builtin_inff();
      sums.total[r] = 0.0f;
      continue;
    }
    const int first = low / width, last = (high - 1) / width;  // tiles with a key that is seen
    const auto seen = [&](int t) {
      const I place = iota() + set1(static_cast<int32_t>(t * width));
      const int limit = std::min(high, (t + 1) * width);
      return (place < set1(static_cast<int32_t>(limit))) & (set1(static_cast<int32_t>(low - 1)) < place);
    };
    const auto whole = [&](int t) { return width == 16 && t * 16 >= low && t * 16 + 16 <= high; };
    float factor = layer.scale * kLog2e;
    if (layer.softcap > 0.0f) {
      const F inner = set1(layer.scale / layer.softcap), cap = set1(layer.softcap);
      for (int t = first; t <= last; ++t) store(row + t * 16, tanh(load(row + t * 16) * inner) * cap);
      factor = kLog2e;
    }
    F top = minus_infinity;
    for (int t = first; t <= last; ++t) {
      const F x = load(row + t * 16);
      top = max(whole(t) ? x : select(seen(t), x, minus_infinity), top);
    }
    const float greatest = reduce_max(top) * factor;
    const F scale = set1(factor), shift = set1(-greatest);
    F total = zero();
    for (int t = 0; t < first; ++t) put(t, zero());
    for (int t = first; t <= last; ++t) {
      const F x = fma(load(row + t * 16), scale, shift);
      F w;
      if (whole(t)) {
        w = exp2_nonpositive(x);
      } else {
        const M m = seen(t);
        w = select(m, exp2_nonpositive(select(m, x, zero())), zero());
      }
      put(t, w);
      total = total + w;
    }
    for (int t = last + 1; t < keys.tiles; ++t) put(t, zero());
    sums.greatest[r] = greatest;
    sums.total[r] = reduce_add(total);
  }
  // values: the last tile only as far as a query sees, so that what lies behind is never read
  int high = 0;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) high = std::max(high, ranges.high[r]);
  const int full = std::min(high / width, keys.tiles);
  const int64_t units = width == 16 ? 16 / Op::kPerUnit : ceil_div(width, Op::kPerUnit);
  const int64_t stride = 16 / Op::kPerUnit;  // of a tile in `weights`
  const int64_t rest = full < keys.tiles ? ceil_div(high - full * width, Op::kPerUnit) : 0;
  for (int64_t c = 0; c < l.v_columns; c += 32) {
    F acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
    for (int t = 0; t < full; ++t) {
      const uint32_t* v = keys.v[t] + c;
      micro<Op, R>(s.weights + t * stride, s.weight_units, v, v + 16, l.v_columns, units, acc);
    }
    if (rest > 0) {
      const uint32_t* v = keys.v[full] + c;
      micro<Op, R>(s.weights + full * stride, s.weight_units, v, v + 16, l.v_columns, rest, acc);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      store(part + r * l.v_columns + c, acc[r][0]);
      store(part + r * l.v_columns + c + 16, acc[r][1]);
    }
  }
}

// state = state (+) part, by log-sum-exp. A part that a query does not see changes nothing.
void merge(int rows, int64_t columns, float* state, Sums& sums, const float* part, const Sums& more) {
  alignas(64) float keep[16], take[16];
  const F minus_infinity = set1(-__builtin_inff());
  const F old_top = load(sums.greatest), new_top = load(more.greatest), top = max(old_top, new_top);
  const M old_none = old_top == minus_infinity, new_none = new_top == minus_infinity;
  const F a = select(old_none, zero(), exp2_nonpositive(select(old_none, zero(), old_top - top)));
  const F b = select(new_none, zero(), exp2_nonpositive(select(new_none, zero(), new_top - top)));
  store(keep, a);
  store(take, b);
  store(sums.total, fma(load(sums.total), a, load(more.total) * b));
  store(sums.greatest, top);
  for (int r = 0; r < rows; ++r) {
    const F x = set1(keep[r]), y = set1(take[r]);
    float* to = state + r * columns;
    const float* from = part + r * columns;
    for (int64_t c = 0; c < columns; c += 16) store(to + c, fma(load(to + c), x, load(from + c) * y));
  }
}

template <class Op>
void partition_rows(int rows, const AttentionLayer& layer, const Keys& keys, const Ranges& ranges, const uint32_t* queries,
                    const Scratch& s, float* part, Sums& sums) {
  sums.clear();
  with_rows(rows, [&](auto constant) {
    partition<Op, decltype(constant)::value>(layer, keys, ranges, queries, s, part, sums);
  });
}

void collect_keys(const AttentionLayer& layer, const StepShape& step, int row, int head, int64_t part, int64_t end, Keys& keys) {
  // Tiles from the partition's start to position `end` (exclusive), at most the partition.
  const CacheLayout& l = layer.layout;
  const int64_t start = part * kPartition, stop = std::min<int64_t>(end, start + kPartition);
  keys.tiles = 0;
  const int32_t* table = step.block_tables + static_cast<int64_t>(row) * step.max_blocks;
  for (int64_t position = start; position < stop; position += l.keys) {
    const int64_t block = table[position / l.block_size];
    const uint32_t* k = l.k_tile(layer.cache, block, head, static_cast<int>(position % l.block_size) / l.keys);
    keys.k[keys.tiles] = k;
    keys.v[keys.tiles++] = k + l.k_words;
  }
}

// One tile of queries: heads first .. first + heads - 1 of kv head `head`, for the tile's tokens.
struct Work {
  const AttentionLayer& layer;
  const StepShape& step;
  const QueryTile& tile;
  int head, first_head, heads;

  int64_t position(int token) const { return step.positions[token]; }
  // First partition that token's query looks at, and the end of what it sees.
  int64_t low(int token) const {
    return layer.window > 0 ? std::max<int64_t>(0, position(token) - layer.window + 1) : 0;
  }
  void ranges(int token, int tokens, int64_t part, Ranges& out) const {
    const int64_t start = part * kPartition;
    for (int i = 0; i < tokens; ++i) {
      const int64_t from = std::clamp<int64_t>(low(token + i) - start, 0, kPartition);
      const int64_t to = std::clamp<int64_t>(position(token + i) + 1 - start, 0, kPartition);
      for (int h = 0; h < heads; ++h) out.low[i * heads + h] = static_cast<int>(from), out.high[i * heads + h] = static_cast<int>(to);
    }
  }
};

template <class Op>
void gather_queries(const Work& w, const uint32_t* q, int64_t q_stride, const Scratch& s) {
  const int64_t units = w.layer.layout.k_units;
  for (int i = 0; i < w.tile.tokens; ++i)
    std::memcpy(s.queries + i * w.heads * units, q + (w.tile.token + i) * q_stride + w.first_head * units, w.heads * units * 4);
}

template <class Op>
void write_out(const Work& w, const float* state, const Sums& sums, void* out, int64_t stride) {
  const CacheLayout& l = w.layer.layout;
  const int64_t dim = l.head_dim;
  for (int i = 0; i < w.tile.tokens; ++i)
    for (int h = 0; h < w.heads; ++h) {
      const int r = i * w.heads + h;
      const F scale = set1(1.0f / sums.total[r]);
      const int64_t at = (w.tile.token + i) * stride + (w.first_head + h) * dim;
      alignas(64) float wide[16];
      for (int64_t c = 0; c < dim; c += 16) {
        const F x = load(state + r * l.v_columns + c) * scale;
        const int64_t count = std::min<int64_t>(16, dim - c);
        if (Op::kBf16) {
          uint16_t* to = static_cast<uint16_t*>(out) + at + c;
          if (count == 16) {
            store_bf16(to, x);
          } else {
            uint16_t narrow[16];
            store_bf16(narrow, x);
            std::memcpy(to, narrow, count * 2);
          }
        } else {
          store(wide, x);
          std::memcpy(static_cast<float*>(out) + at + c, wide, count * 4);
        }
      }
    }
}

template <class Op>
void whole_tile(const Work& w, const uint32_t* q, int64_t q_stride, void* out, int64_t out_stride, void* memory) {
  const CacheLayout& l = w.layer.layout;
  const Scratch s(memory, l);
  gather_queries<Op>(w, q, q_stride, s);
  const int rows = w.tile.tokens * w.heads;
  std::memset(s.state, 0, rows * l.v_columns * 4);
  Sums sums, more;
  sums.clear();
  Keys keys;
  Ranges ranges;
  const int last = w.tile.token + w.tile.tokens - 1;
  if (w.tile.rows <= 1) {
    const int64_t end = w.position(last) + 1;
    for (int64_t part = w.low(w.tile.token) / kPartition; part * kPartition < end; ++part) {
      collect_keys(w.layer, w.step, w.tile.row, w.head, part, end, keys);
      w.ranges(w.tile.token, w.tile.tokens, part, ranges);
      partition_rows<Op>(rows, w.layer, keys, ranges, s.queries, s, s.part, more);
      merge(rows, l.v_columns, s.state, sums, s.part, more);
    }
  } else {
    // The shared partitions once for all rows, then each row's own.
    int64_t start = w.low(w.tile.token);
    for (int i = 1; i < w.tile.tokens; ++i) start = std::min(start, w.low(w.tile.token + i));
    for (int64_t part = start / kPartition; part < w.tile.shared_partitions; ++part) {
      collect_keys(w.layer, w.step, w.tile.row, w.head, part, (part + 1) * kPartition, keys);
      w.ranges(w.tile.token, w.tile.tokens, part, ranges);
      partition_rows<Op>(rows, w.layer, keys, ranges, s.queries, s, s.part, more);
      merge(rows, l.v_columns, s.state, sums, s.part, more);
    }
    for (int i = 0; i < w.tile.rows; ++i) {
      const int token = w.tile.token + i, r = i * w.heads;
      const int64_t end = w.position(token) + 1;
      Sums own;
      own.clear();
      for (int h = 0; h < w.heads; ++h) own.greatest[h] = sums.greatest[r + h], own.total[h] = sums.total[r + h];
      for (int64_t part = std::max<int64_t>(w.tile.shared_partitions, w.low(token) / kPartition); part * kPartition < end; ++part) {
        collect_keys(w.layer, w.step, w.tile.row + i, w.head, part, end, keys);
        w.ranges(token, 1, part, ranges);
        partition_rows<Op>(w.heads, w.layer, keys, ranges, s.queries + r * l.k_units, s, s.part, more);
        merge(w.heads, l.v_columns, s.state + r * l.v_columns, own, s.part, more);
      }
      for (int h = 0; h < w.heads; ++h) sums.greatest[r + h] = own.greatest[h], sums.total[r + h] = own.total[h];
    }
  }
  write_out<Op>(w, s.state, sums, out, out_stride);
}

template <class Op>
void run(const AttentionLayer& layer, const StepShape& step, const std::vector<QueryTile>& tiles, const uint32_t* q,
         int64_t q_stride, void* out, int64_t out_stride, AttentionScratch& scratch) {
  const CacheLayout& l = layer.layout;
  const int group = layer.num_heads / l.kv_heads, slices = static_cast<int>(ceil_div(group, kTileRows));
  const int threads = session_threads();
  const int64_t need = Scratch::bytes(l);
  if (static_cast<int>(scratch.threads.size()) < threads) scratch.threads.resize(threads);
  for (auto& memory : scratch.threads) memory.reserve(need);
  const int count = static_cast<int>(tiles.size());
  // kv head by kv head, so that neighbouring tasks read the same keys.
  const auto work = [&](int task) {
    const int tile = task % count, rest = task / count, slice = rest % slices, head = rest / slices;
    const int first = group * slice / slices, heads = group * (slice + 1) / slices - first;
    return Work{layer, step, tiles[tile], head, head * group + first, heads};
  };
  const int tasks = count * slices * l.kv_heads;

  // Few tiles with long contexts: partitions go to different threads, and are merged afterwards in the same order.
  int64_t longest = 0;
  for (int32_t r = 0; r < step.rows; ++r) longest = std::max<int64_t>(longest, step.seq_lens[r]);
  const int64_t parts = ceil_div(longest, kPartition);
  bool single = true;
  for (const QueryTile& tile : tiles) single = single && tile.rows <= 1;
  if (threads > 1 && tasks < 4 * threads && parts > 1 && single) {
    const int64_t part_words = kTileRows * l.v_columns + 32;
    scratch.partials.reserve(tasks * parts * part_words * 4);
    const auto place = [&](int task, int64_t part) { return scratch.partials.as<float>() + (task * parts + part) * part_words; };
    parallel_for(static_cast<int>(tasks * parts), [&](int index, int thread) {
      const int task = static_cast<int>(index / parts);
      const int64_t part = index % parts;
      const Work w = work(task);
      const int64_t end = w.position(w.tile.token + w.tile.tokens - 1) + 1;
      if (part < w.low(w.tile.token) / kPartition || part * kPartition >= end) return;
      const Scratch s(scratch.threads[thread].data(), l);
      gather_queries<Op>(w, q, q_stride, s);
      Keys keys;
      Ranges ranges;
      Sums sums;
      collect_keys(layer, step, w.tile.row, w.head, part, end, keys);
      w.ranges(w.tile.token, w.tile.tokens, part, ranges);
      float* to = place(task, part);
      partition_rows<Op>(w.tile.tokens * w.heads, layer, keys, ranges, s.queries, s, to + 32, sums);
      std::memcpy(to, sums.greatest, 64);
      std::memcpy(to + 16, sums.total, 64);
    });
    parallel_for(tasks, [&](int task, int thread) {
      const Work w = work(task);
      const int64_t end = w.position(w.tile.token + w.tile.tokens - 1) + 1;
      const Scratch s(scratch.threads[thread].data(), l);
      const int rows = w.tile.tokens * w.heads;
      std::memset(s.state, 0, rows * l.v_columns * 4);
      Sums sums, more;
      sums.clear();
      for (int64_t part = w.low(w.tile.token) / kPartition; part * kPartition < end; ++part) {
        const float* from = place(task, part);
        std::memcpy(more.greatest, from, 64);
        std::memcpy(more.total, from + 16, 64);
        merge(rows, l.v_columns, s.state, sums, from + 32, more);
      }
      write_out<Op>(w, s.state, sums, out, out_stride);
    });
    return;
  }
  parallel_for(tasks, [&](int task, int thread) {
    whole_tile<Op>(work(task), q, q_stride, out, out_stride, scratch.threads[thread].data());
  });
}

}  // namespace

CacheLayout CacheLayout::describe(bool bf16, int block_size, int kv_heads, int head_dim) {
  CacheLayout l;
  l.bf16 = bf16;
  l.block_size = block_size;
  l.kv_heads = kv_heads;
  l.head_dim = head_dim;
  l.keys = std::min(16, block_size);
  l.tiles = block_size / l.keys;
  l.k_units = bf16 ? ceil_div(head_dim, 2) : head_dim;
  l.v_columns = round_up(head_dim, 32);
  l.k_words = l.k_units * 16;
  l.v_words = (bf16 ? 8 : 16) * l.v_columns;
  l.head_words = l.tiles * (l.k_words + l.v_words);
  l.layer_words = l.kv_heads * l.head_words;
  return l;
}

void write_key_value(const CacheLayout& l, uint32_t* layer, int64_t block, int offset, int head, const float* key,
                     const float* value, bool last) {
  uint32_t* k = const_cast<uint32_t*>(l.k_tile(layer, block, head, offset / l.keys));
  uint32_t* v = k + l.k_words;
  const int lane = offset % l.keys, dim = l.head_dim;
  if (!l.bf16) {
    for (int i = 0; i < dim; ++i) std::memcpy(k + i * 16 + lane, key + i, 4);
    std::memcpy(v + lane * l.v_columns, value, dim * 4);
    return;
  }
  alignas(64) uint16_t narrow[32];
  uint16_t* out = reinterpret_cast<uint16_t*>(v) + (lane / 2) * l.v_columns * 2 + (lane & 1);
  for (int start = 0; start < dim; start += 32) {
    const int count = std::min(32, dim - start);
    for (int i = 0; i < count; i += 16) store_bf16(narrow + i, count - i >= 16 ? load(key + start + i) : load_some(key + start + i, count - i));
    uint32_t pairs[16];
    std::memcpy(pairs, narrow, 64);
    for (int i = 0; i < (count + 1) / 2; ++i) k[(start / 2 + i) * 16 + lane] = pairs[i];
    for (int i = 0; i < count; i += 16) store_bf16(narrow + i, count - i >= 16 ? load(value + start + i) : load_some(value + start + i, count - i));
    for (int i = 0; i < count; ++i) out[(start + i) * 2] = narrow[i];
  }
  if (last && (lane & 1) == 0 && lane + 1 < l.keys)
    for (int i = 0; i < dim; ++i) out[i * 2 + 1] = 0;
}

void plan_tiles(const StepShape& step, int group, int block_size, std::vector<QueryTile>& tiles) {
  tiles.clear();
  const int per_tile = std::max(1, kTileRows / group);  // tokens of a tile
  int next_set = 0;
  for (int32_t row = 0; row < step.rows;) {
    if (next_set < step.sets && step.shared_rows[2 * next_set] == row) {
      const int32_t count = step.shared_rows[2 * next_set + 1];
      const int64_t shared = static_cast<int64_t>(step.shared_blocks[next_set]) * block_size / kPartition;
      ++next_set;
      bool simple = shared > 0 && per_tile > 1 && count > 1;
      for (int32_t i = 0; i < count; ++i) {
        const int32_t token = step.query_start[row + i];
        simple = simple && step.query_start[row + i + 1] - token == 1 && step.positions[token] >= shared * kPartition;
      }
      if (simple) {
        const int32_t cuts = static_cast<int32_t>(ceil_div(count, per_tile));
        for (int32_t cut = 0; cut < cuts; ++cut) {
          const int32_t begin = static_cast<int32_t>(int64_t{count} * cut / cuts), end = static_cast<int32_t>(int64_t{count} * (cut + 1) / cuts);
          tiles.push_back({row + begin, step.query_start[row + begin], end - begin, end - begin, static_cast<int32_t>(shared)});
        }
        row += count;
        continue;
      }
    }
    const int32_t begin = step.query_start[row], end = step.query_start[row + 1];
    for (int32_t token = begin; token < end; token += per_tile)
      tiles.push_back({row, token, std::min(per_tile, end - token), 1, 0});
    ++row;
  }
}

void attention(const AttentionLayer& layer, const StepShape& step, const std::vector<QueryTile>& tiles, const uint32_t* q,
               int64_t q_stride, void* out, int64_t out_stride, AttentionScratch& scratch) {
  if (tiles.empty()) return;
  if (layer.layout.bf16)
    run<Bf16>(layer, step, tiles, q, q_stride, out, out_stride, scratch);
  else
    run<Fp32>(layer, step, tiles, q, q_stride, out, out_stride, scratch);
}

}  // namespace vllm
