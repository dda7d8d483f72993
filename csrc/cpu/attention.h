// Softmax attention over the paged cache, for prefill, decode and decode with a shared prefix: one code path for all.
//
// Keys are taken in fixed partitions of 256 absolute positions. A partition of a query has its own greatest score, sum and
// weighted values; partitions are merged in ascending order. Within a partition each number is made by the same operations in
// the same order whoever computes it:
//
//     scores    q . K over the head's dimensions in order                 (micro.h, keys as columns)
//     weights   exp2(score * scale * log2(e) - greatest)                  (lane by lane; their sum in a fixed order)
//     values    sum of weight * V over the keys in order                  (micro.h, dimensions as columns)
//
// Queries that read the same keys (the heads of a group, neighbouring tokens of a prompt, children of one prompt) are the rows
// of one tile; a query's result does not depend on the others. Masked keys add exact zeros.
//
// The cache: block after block, in a block all layers, in a layer all kv heads (so that a sequence touches few pages, and a
// block is copied in one piece). Of a head, tiles of 16 keys (fewer where a block is shorter: then lanes stay empty):
//
//     K tile  [units of head_dim][16 keys]          bf16: a unit is two dimensions of one key
//     V tile  [units of keys][head_dim up to 32s]   bf16: a unit is two keys of one dimension
#pragma once

#include <vector>

#include "common.h"
#include "pool.h"

namespace vllm {

struct CacheLayout {
  bool bf16 = true;
  int block_size = 16;
  int kv_heads = 0, head_dim = 0;
  int keys = 16;            // of a tile: min(16, block_size)
  int tiles = 1;            // of a block
  int64_t k_units = 0;      // per key
  int64_t v_columns = 0;    // head_dim rounded up to 32
  int64_t k_words = 0, v_words = 0;  // 4-byte words of a tile
  int64_t head_words = 0, layer_words = 0;
  int64_t block_words = 0;  // of all layers; set by who lays out the cache

  static CacheLayout describe(bool bf16, int block_size, int kv_heads, int head_dim);
  // `layer` is where this layer begins in block 0.
  const uint32_t* k_tile(const uint32_t* layer, int64_t block, int head, int tile) const {
    return layer + block * block_words + head * head_words + tile * (k_words + v_words);
  }
};

// Writes one key and value (fp32 [head_dim] each) of one head to slot `offset` of a block. `last`: no later key of the row is
// written in this step; the slot's neighbour in the same unit is then cleared of what an earlier owner left there.
void write_key_value(const CacheLayout& layout, uint32_t* layer, int64_t block, int offset, int head, const float* key,
                     const float* value, bool last);

// Fetches the lines that write_key_value will write for all heads of one token: they are far apart, and not in any cache.
inline void prefetch_key_value(const CacheLayout& l, const uint32_t* layer, int64_t block, int offset) {
  const int tile = offset / l.keys, lane = offset % l.keys;
  for (int head = 0; head < l.kv_heads; ++head) {
    const uint32_t* k = l.k_tile(layer, block, head, tile);
    for (int64_t u = 0; u < l.k_units; ++u) __builtin_prefetch(k + u * 16, 1, 3);
    const uint32_t* v = k + l.k_words + (l.bf16 ? lane / 2 : lane) * l.v_columns;
    for (int64_t c = 0; c < l.v_columns; c += 16) __builtin_prefetch(v + c, 1, 3);
  }
}

// Queries handled together. tokens > 0 consecutive tokens of one row; or rows > 1 rows of a sharing set, one token each.
struct QueryTile {
  int32_t row, token, tokens, rows;
  int32_t shared_partitions;  // leading partitions that all rows of the tile have in common (rows > 1)
};

struct StepShape {
  int32_t rows = 0, tokens = 0, max_blocks = 0;
  const int32_t *positions = nullptr, *query_start = nullptr, *seq_lens = nullptr, *block_tables = nullptr;
  const int32_t *shared_rows = nullptr, *shared_blocks = nullptr;
  int32_t sets = 0;
};

// The tiles of a step for heads in groups of `group`; the same for all layers with that group.
void plan_tiles(const StepShape& step, int group, int block_size, std::vector<QueryTile>& tiles);

struct AttentionLayer {
  CacheLayout layout;
  const uint32_t* cache = nullptr;
  int num_heads = 0;
  float scale = 1.0f, softcap = 0.0f;
  int window = 0;  // 0: none
};

struct AttentionScratch {
  std::vector<Buffer> threads;
  Buffer partials;
};

// q: [tokens][num_heads * units] as units; out: [tokens][out_stride] elements of the cache's type. Needs a Session.
void attention(const AttentionLayer& layer, const StepShape& step, const std::vector<QueryTile>& tiles, const uint32_t* q,
               int64_t q_stride, void* out, int64_t out_stride, AttentionScratch& scratch);

}  // namespace vllm
