// Work on one row of logits for the sampler: maxima, weights, block sums, selection without sorting. See sampling.h.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling_vec.h"

namespace vllm::sampling {

constexpr int kBlock = 1024;  // ids of one block sum
constexpr int kChunk = 256;   // ids of one vector of lane maxima
constexpr float kMassScale = 17592186044416.0f;  // 2**44

inline int num_chunks(int vocab) { return (vocab + kChunk - 1) / kChunk; }
inline int num_blocks(int vocab) { return (vocab + kBlock - 1) / kBlock; }

template <class T>
void at_least(std::vector<T>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

// A row with what one pass over it gives. Lane j of lane_max[c] is the largest of the ids 256 c + 16 i + j.
struct Row {
  const float* logits = nullptr;  // [vocab]
  int vocab = 0;
  float max = kNegInf;
  bool has_nan = false;
  std::vector<float> lane_max;  // [num_chunks * 16]

  void scan(const float* source, int vocab);
  // If the maximum is +inf the row becomes a copy in `finite`: 0 where it was +inf, else -inf.
  void make_finite(std::vector<float>& finite);
  // The lowest id with the maximum.
  int arg_max() const;
};

// Keeps x > level, and of those equal to it the ids up to last_id. The default keeps everything.
struct Cut {
  float level = kNegInf;
  int32_t last_id = INT32_MAX;
  bool keeps(float x, int32_t id) const { return x > level || (x == level && id <= last_id); }
};

// Which ids remain after min-p, top-k and top-p; the weights of the others are 0.
struct Removal {
  float min_p = 0.0f;
  Cut top_k;                  // on logits
  Cut top_p{-1.0f, INT32_MAX};  // on weights
};

inline Mask tie_mask(const Cut& cut, F16 x, int32_t first) {
  const F16 level = splat(cut.level);
  if (first + 15 <= cut.last_id) return ge(x, level);
  if (first > cut.last_id) return gt(x, level);
  return gt(x, level) | (ge(x, level) & lanes((2u << (cut.last_id - first)) - 1u));
}

inline float multiplier(float temperature) {
  const double r = 1.4426950408889634 / static_cast<double>(temperature);
  const double most = std::numeric_limits<float>::max();
  return static_cast<float>(r < most ? r : most);
}

// Loads ids first .. first + 15 of a row, past its end -inf.
inline F16 load_row(const float* logits, int vocab, int first) {
  return first + 16 <= vocab ? load(logits + first) : load_tail(logits + first, vocab - first, kNegInf);
}

// Sums of the weights by block, sums [num_blocks]: every id remains.
void block_sums(const Row& row, float r, float* sums);

// The same with min-p and top-k; the weights, 0 for removed ids, go to weights [blocks * 1024]. Returns their mass.
int64_t block_sums(const Row& row, float r, const Removal& removal, float* weights, float* sums);

// Sums of stored weights [blocks * 1024].
void block_sums(const float* weights, int blocks, float* sums);

// The weights of one block when every id remains, out [1024].
void block_weights(const Row& row, float r, int block, float* out);

// How logits are compared: by themselves, or by their log-probabilities (several logits may round to one).
struct Identity {
  F16 operator()(F16 x) const { return x; }
  float operator()(float x) const { return x; }
};
struct Logprob {
  float max, log_sum;
  F16 operator()(F16 x) const { return x - splat(max) - splat(log_sum); }
  float operator()(float x) const { return (x - max) - log_sum; }
};

// Buffers for selections; they grow to the vocabulary once and stay.
struct Workspace {
  std::vector<int32_t> ids;
  std::vector<float> values, copy;
  std::vector<uint64_t> keys, keys2;
};

// The min(k, vocab) ids with the largest values, among equal ones the lowest, in ascending order of ids: in ws.ids and
// ws.values. If fewer are above -inf, the lowest ids with -inf fill up when `fill`. Returns their number.
template <class Value>
int top_ids(const Row& row, int k, bool fill, const Value& value, Workspace& ws);

// top_ids, sorted: the largest first.
template <class Value>
int top_sorted(const Row& row, int k, const Value& value, Workspace& ws);

// The cut that keeps the k largest logits (lowest ids among equals), 0 < k < vocab, for k too large to list.
Cut top_k_cut(const Row& row, int k, Workspace& ws);

// The cut of top-p on weights x [n] whose masses add up to `mass`: the largest by (weight descending, position ascending)
// up to `need` >= 1. last_id is a position in x.
Cut top_p_cut(const float* x, int n, int64_t need, Workspace& ws);

// Ids whose value is greater than x.
template <class Value>
int count_greater(const Row& row, float x, const Value& value);

// Number of ids of x [n] that the cut keeps, written to ids and values in order; stops with -1 past `most`.
int collect(const float* x, int n, const Cut& cut, int most, int32_t* ids, float* values);

inline int64_t mass_of(float weight) { return static_cast<int64_t>(weight * kMassScale); }

}  // namespace vllm::sampling
