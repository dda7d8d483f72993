// Sampling on rows of fp32 logits. The definition of every result is vllm/v1/sample/reference.py, which this reproduces
// bit for bit; the structures below mirror SamplingBatch, LogprobColumns and vllm/kernels/sampling.py field by field.
//
// Logits come tile by tile from a `LogitsSource`, so that a model can run its head for some rows and have them sampled
// while they are in the cache, all inside one call. Neither the tile size nor the number of threads changes a result.
#pragma once

#include <cstdint>

namespace vllm::sampling {

enum Mode : int32_t { kRawLogprobs = 0, kRawLogits = 1, kProcessedLogprobs = 2, kProcessedLogits = 3 };
enum Status : int32_t { kOk = 0, kNan = 1, kNoToken = 2 };

// Lists of different lengths, flat: list i is ids[offsets[i]] .. ids[offsets[i + 1] - 1]. offsets == nullptr: none.
struct Ragged {
  const int32_t* offsets;
  const int32_t* ids;
  const float* values;
};

struct SamplingArgs {
  int32_t size;   // S, draws
  int32_t vocab;  // V
  int32_t num_rows;
  int32_t mode;
  const int32_t* rows;          // [S]
  const float* temperature;     // [S]
  const int32_t* top_k;         // [S]
  const float* top_p;           // [S]
  const float* min_p;           // [S]
  const uint64_t* seeds;        // [S]
  const int64_t* positions;     // [S]
  const int32_t* num_logprobs;  // [S]
  const uint32_t* allowed;      // [S, ceil(V / 32)] or nullptr
  Ragged banned;
  Ragged bias;
  const float* penalties;  // [S, 3] or nullptr
  Ragged output_tokens;
  Ragged prompt_tokens;
  const float* const* processed;  // [S] or nullptr; processed[s], where not nullptr, is the [V] logits that draw s has after
                                  // its logits processor: mask, bans and bias are in them, penalties are not
  // Results.
  int32_t* token_ids;             // [S]
  int32_t* status;                // [S], see Status; token 0 and an entry to be dropped where it is not kOk
  const int32_t* entry_offsets;   // [S + 1] or nullptr; entry s has 1 + min(num_logprobs[s], V) places, none for -1
  int32_t* entry_ids;             // [entry_offsets[S]]
  float* entry_values;            // [entry_offsets[S]]
  int32_t* entry_ranks;           // [S]
};

struct TokenLogprobArgs {
  int32_t size;   // E, entries
  int32_t vocab;  // V
  int32_t num_rows;
  int32_t mode;           // processed modes mean the raw ones
  int32_t num_logprobs;   // entry i stands at i * (1 + min(num_logprobs, V))
  const int32_t* rows;    // [E]
  const int32_t* targets;  // [E]
  int32_t* entry_ids;
  float* entry_values;
  int32_t* entry_ranks;  // [E]
};

// Gives logits of rows[0 .. count - 1]: returns [count, V] contiguous, valid until the next call. It may run tasks on the pool.
struct LogitsSource {
  const float* (*tile)(void* context, const int32_t* rows, int32_t count);
  void* context;
  int32_t max_rows;  // the most rows it makes at a time
};

// Must be called inside a Session (pool.h). Wrong arguments throw Error before anything is written.
void sample(const SamplingArgs& args, const LogitsSource& logits);
void token_logprobs(const TokenLogprobArgs& args, const LogitsSource& logits);

}  // namespace vllm::sampling

// The C interface for logits [num_rows, V] in memory, rows `stride` floats apart; 0, or -1 with vllm_last_error():
//   int vllm_sample(const SamplingArgs* args, const float* logits, int64_t stride, int threads);
//   int vllm_token_logprobs(const TokenLogprobArgs* args, const float* logits, int64_t stride, int threads);
