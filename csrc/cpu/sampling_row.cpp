#include "sampling_row.h"

#include <algorithm>
#include <cfloat>
#include <functional>
#include <numeric>

namespace vllm::sampling {
namespace {

constexpr int kSmall = 4096;  // a selection among this few is done by nth_element

// Floats as integers of the same order; -0.0 comes just below 0.0, which no comparison of floats tells apart.
int32_t key_of(float x) {
  int32_t k;
  std::memcpy(&k, &x, 4);
  return k >= 0 ? k : k ^ 0x7fffffff;
}
float value_of(int32_t k) {
  if (k < 0) k ^= 0x7fffffff;
  float x;
  std::memcpy(&x, &k, 4);
  return x;
}
int32_t middle(int32_t lo, int32_t hi) { return static_cast<int32_t>((static_cast<int64_t>(lo) + hi) >> 1); }

int count_at_least(const float* x, int n, float level) {
  const F16 t = splat(level);
  int count = 0, i = 0;
  for (; i + 16 <= n; i += 16) count += __builtin_popcount(bits(ge(load(x + i), t)));
  for (; i < n; ++i) count += x[i] >= level;
  return count;
}

// Elements with lo <= x < hi, in order; out may be x.
int compress_between(const float* x, int n, float lo, float hi, float* out) {
  const F16 low = splat(lo), high = splat(hi);
  int count = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    const F16 v = load(x + i);
    const uint32_t inside = bits(ge(v, low)) & ~bits(ge(v, high));
    if (inside != 0) count += compress(out + count, lanes(inside), v);
  }
  for (; i < n; ++i)
    if (x[i] >= lo && !(x[i] >= hi)) out[count++] = x[i];
  return count;
}

float nth_largest(float* x, int n, int k) {
  std::nth_element(x, x + (k - 1), x + n, std::greater<float>());
  return x[k - 1];
}

// The k-th largest of x [n], 1 <= k <= n, without changing x. A strided sample gives a bracket, counting passes confirm or
// halve it, and nth_element finishes on the few elements inside.
float kth_largest(const float* x, int n, int k, std::vector<float>& buffer) {
  at_least(buffer, static_cast<size_t>(n) + 16);
  float* copy = buffer.data();
  if (n <= kSmall) {
    std::copy(x, x + n, copy);
    return nth_largest(copy, n, k);
  }
  // Invariant: at least k elements are >= lo, fewer than k are >= hi.
  int32_t lo = key_of(kNegInf), hi = key_of(std::numeric_limits<float>::infinity()) + 1;  // a NaN: nothing is >= hi
  int at_lo = n, at_hi = 0;
  constexpr int kSample = 1024, kMargin = 64;
  for (int i = 0; i < kSample; ++i) copy[i] = x[static_cast<int64_t>(i) * n / kSample];
  const int place = static_cast<int>(static_cast<int64_t>(k) * kSample / n);
  const int low_place = std::min(place + kMargin, kSample - 1), high_place = std::max(place - kMargin, 0);
  const float low = nth_largest(copy, kSample, low_place + 1);  // what is larger stands before it now
  const int32_t guesses[2] = {key_of(low), key_of(low_place > high_place ? nth_largest(copy, low_place, high_place + 1) : low)};
  for (int step = 0; static_cast<int64_t>(hi) - lo > 1; ++step) {
    if (at_lo - at_hi <= kSmall) {
      const int inside = compress_between(x, n, value_of(lo), value_of(hi), copy);
      return nth_largest(copy, inside, k - at_hi);
    }
    int32_t mid = step < 2 ? guesses[step] : middle(lo, hi);
    if (mid <= lo || mid >= hi) {
      if (step < 2) continue;
      mid = middle(lo, hi);
    }
    const int count = count_at_least(x, n, value_of(mid));
    if (count >= k) {
      lo = mid;
      at_lo = count;
    } else {
      hi = mid;
      at_hi = count;
    }
  }
  return value_of(lo);
}

// Position of the `ordinal`-th (from 1) element of x [n] equal to level.
int32_t find_equal(const float* x, int n, float level, int64_t ordinal) {
  const F16 t = splat(level);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const F16 v = load(x + i);
    const uint32_t equal = bits(ge(v, t)) & ~bits(gt(v, t));
    const int count = __builtin_popcount(equal);
    if (count >= ordinal) break;
    ordinal -= count;
  }
  for (; i < n; ++i)
    if (x[i] == level && --ordinal == 0) return i;
  return INT32_MAX;
}

int64_t mass_at_least(const float* x, int n, float level, int* count) {
  const F16 t = splat(level);
  Mass sum;
  int members = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    const F16 w = load(x + i);
    const Mask m = ge(w, t);
    members += __builtin_popcount(bits(m));
    add_mass(sum, keep(m, w));
  }
  int64_t rest = 0;
  for (; i < n; ++i)
    if (x[i] >= level) {
      rest += mass_of(x[i]);
      ++members;
    }
  *count = members;
  return total(sum) + rest;
}

// A threshold that at least k values of the row reach, from the maxima of disjoint sets of ids; -inf if there is none.
float reached_by(const Row& row, int k, std::vector<float>& buffer) {
  int groups = num_chunks(row.vocab) * 16;
  if (groups < 2 * k) return kNegInf;
  at_least(buffer, static_cast<size_t>(groups));
  float* maxima = buffer.data();
  std::copy(row.lane_max.begin(), row.lane_max.begin() + groups, maxima);
  while (groups >= 512 && groups >= 16 * k) {  // fewer, larger sets: quicker to select among, still many beside k
    const int half = (groups / 2 + 15) / 16 * 16;
    for (int i = half; i < groups; i += 16) store(maxima + i - half, larger(load(maxima + i - half), load(maxima + i)));
    groups = half;
  }
  return nth_largest(maxima, groups, k);
}

// Ids with value >= level in ascending order, to ws.ids and ws.values.
template <class Value>
int gather(const Row& row, float level, const Value& value, Workspace& ws) {
  at_least(ws.ids, static_cast<size_t>(row.vocab) + 16);
  at_least(ws.values, static_cast<size_t>(row.vocab) + 16);
  const F16 t = splat(level);
  int count = 0;
  for (int chunk = 0; chunk < num_chunks(row.vocab); ++chunk) {
    if (bits(ge(value(load(row.lane_max.data() + chunk * 16)), t)) == 0) continue;
    const int stop = std::min(row.vocab, (chunk + 1) * kChunk);
    for (int first = chunk * kChunk; first < stop; first += 16) {
      const F16 v = value(load_row(row.logits, row.vocab, first));
      const Mask m = ge(v, t);
      if (bits(m) == 0) continue;
      compress_ids(ws.ids.data() + count, m, first);
      count += compress(ws.values.data() + count, m, v);
    }
  }
  return count;
}

uint64_t descending_key(float value, int32_t id) {
  const float plain = value + 0.0f;  // -0.0 becomes 0.0
  uint32_t b;
  std::memcpy(&b, &plain, 4);
  const uint32_t ascending = (b & 0x80000000u) != 0 ? ~b : b | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}

// Sorts keys whose lower halves ascend already among equal upper halves: three stable passes over the upper half.
void radix_sort(std::vector<uint64_t>& keys, std::vector<uint64_t>& other, int n) {
  at_least(other, static_cast<size_t>(n));
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = 32 + 11 * pass;
    uint32_t start[2048] = {};
    for (int i = 0; i < n; ++i) ++start[keys[i] >> shift & 2047];
    uint32_t before = 0;
    for (uint32_t& s : start) {
      const uint32_t count = s;
      s = before;
      before += count;
    }
    for (int i = 0; i < n; ++i) other[start[keys[i] >> shift & 2047]++] = keys[i];
    keys.swap(other);
  }
}

}  // namespace

void Row::scan(const float* source, int size) {
  logits = source;
  vocab = size;
  at_least(lane_max, static_cast<size_t>(num_chunks(size)) * 16);
  F16 best = splat(kNegInf);
  Mask nan = no_lanes();
  const int whole = size / kChunk;
  for (int chunk = 0; chunk < whole; ++chunk) {
    const float* p = source + static_cast<int64_t>(chunk) * kChunk;
    F16 top0 = splat(kNegInf), top1 = top0;
    for (int i = 0; i < kChunk; i += 64) {
      const F16 a = load(p + i), b = load(p + i + 16), c = load(p + i + 32), d = load(p + i + 48);
      nan = nan | unordered(a, b) | unordered(c, d);
      top0 = larger(top0, larger(a, b));
      top1 = larger(top1, larger(c, d));
    }
    const F16 top = larger(top0, top1);
    store(lane_max.data() + chunk * 16, top);
    best = larger(best, top);
  }
  if (whole * kChunk < size) {
    F16 top = splat(kNegInf);
    for (int first = whole * kChunk; first < size; first += 16) {
      const F16 v = load_row(source, size, first);
      nan = nan | unordered(v, v);
      top = larger(top, v);
    }
    store(lane_max.data() + whole * 16, top);
    best = larger(best, top);
  }
  has_nan = bits(nan) != 0;
  max = fold_max(best);
}

void Row::make_finite(std::vector<float>& finite) {
  if (has_nan || max != std::numeric_limits<float>::infinity()) return;
  at_least(finite, static_cast<size_t>(vocab));
  for (int i = 0; i < vocab; ++i) finite[i] = logits[i] == max ? 0.0f : kNegInf;
  scan(finite.data(), vocab);
}

int Row::arg_max() const {
  const F16 t = splat(max);
  for (int chunk = 0; chunk < num_chunks(vocab); ++chunk) {
    if (bits(ge(load(lane_max.data() + chunk * 16), t)) == 0) continue;
    for (int first = chunk * kChunk;; first += 16) {
      const uint32_t hit = bits(ge(load_row(logits, vocab, first), t));
      if (hit != 0) return first + __builtin_ctz(hit);
    }
  }
  return 0;
}

void block_sums(const Row& row, float r, float* sums) {
  const F16 m = splat(row.max), rate = splat(r);
  const int blocks = num_blocks(row.vocab);
  for (int block = 0; block < blocks; ++block) {
    const int begin = block * kBlock, stop = std::min(row.vocab, begin + kBlock);
    F16 sum = splat(0.0f);
    int first = begin;
    for (; first + 16 <= stop; first += 16) sum = sum + weight(load(row.logits + first), m, rate);
    if (first < stop) sum = sum + weight(load_row(row.logits, row.vocab, first), m, rate);
    sums[block] = fold_sum(sum);
  }
}

int64_t block_sums(const Row& row, float r, const Removal& removal, float* weights, float* sums) {
  const F16 m = splat(row.max), rate = splat(r), floor = splat(removal.min_p);
  const int blocks = num_blocks(row.vocab);
  Mass mass;
  for (int block = 0; block < blocks; ++block) {
    const int begin = block * kBlock;
    F16 sum = splat(0.0f);
    for (int first = begin; first < begin + kBlock; first += 16) {
      if (first >= row.vocab) {
        store(weights + first, splat(0.0f));
        continue;
      }
      const F16 l = load_row(row.logits, row.vocab, first);
      F16 w = weight(l, m, rate);
      w = keep(ge(w, floor) & tie_mask(removal.top_k, l, first), w);
      store(weights + first, w);
      sum = sum + w;
      add_mass(mass, w);
    }
    sums[block] = fold_sum(sum);
  }
  return total(mass);
}

void block_sums(const float* weights, int blocks, float* sums) {
  for (int block = 0; block < blocks; ++block) {
    const float* w = weights + static_cast<int64_t>(block) * kBlock;
    F16 sum = load(w);
    for (int i = 16; i < kBlock; i += 16) sum = sum + load(w + i);
    sums[block] = fold_sum(sum);
  }
}

void block_weights(const Row& row, float r, int block, float* out) {
  const F16 m = splat(row.max), rate = splat(r);
  const int begin = block * kBlock, stop = std::min(row.vocab, begin + kBlock);
  for (int first = begin; first < begin + kBlock; first += 16) {
    const F16 w = first < stop ? weight(load_row(row.logits, row.vocab, first), m, rate) : splat(0.0f);
    store(out + first - begin, w);
  }
}

template <class Value>
int top_ids(const Row& row, int k, bool fill, const Value& value, Workspace& ws) {
  k = std::min(k, row.vocab);
  if (k <= 0) return 0;
  const float reached = reached_by(row, k, ws.copy);
  int n = gather(row, std::max(value(reached), -FLT_MAX), value, ws);
  if (n > k) {
    const float level = kth_largest(ws.values.data(), n, k, ws.copy);
    int above = 0;
    for (int i = 0; i < n; ++i) above += ws.values[i] > level;
    int ties = k - above, kept = 0;
    for (int i = 0; i < n; ++i) {
      if (ws.values[i] < level || (ws.values[i] == level && ties-- <= 0)) continue;
      ws.ids[kept] = ws.ids[i];
      ws.values[kept++] = ws.values[i];
    }
    n = kept;
  }
  if (!fill) return n;
  for (int32_t id = 0; n < k; ++id) {
    if (value(row.logits[id]) >= -FLT_MAX) continue;
    ws.ids[n] = id;
    ws.values[n++] = kNegInf;
  }
  return n;
}

template <class Value>
int top_sorted(const Row& row, int k, const Value& value, Workspace& ws) {
  const int n = top_ids(row, k, true, value, ws);
  at_least(ws.keys, static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) ws.keys[i] = descending_key(ws.values[i], ws.ids[i]);
  if (n > 1024) {
    radix_sort(ws.keys, ws.keys2, n);
  } else {
    std::sort(ws.keys.begin(), ws.keys.begin() + n);
  }
  for (int i = 0; i < n; ++i) {
    ws.ids[i] = static_cast<int32_t>(ws.keys[i] & 0xffffffffu);
    ws.values[i] = value(row.logits[ws.ids[i]]);
  }
  return n;
}

Cut top_k_cut(const Row& row, int k, Workspace& ws) {
  Cut cut;
  const float level = kth_largest(row.logits, row.vocab, k, ws.copy);
  if (level == kNegInf) return cut;  // fewer than k remain
  cut.level = level;
  const int reaching = count_at_least(row.logits, row.vocab, level);
  if (reaching > k) {
    const int above = count_greater(row, level, Identity());
    cut.last_id = find_equal(row.logits, row.vocab, level, k - above);
  }
  return cut;
}

Cut top_p_cut(const float* x, int n, int64_t need, Workspace& ws) {
  at_least(ws.copy, static_cast<size_t>(n) + 16);
  // Invariant: the mass of the weights >= lo is at least `need`, that of those >= hi is `above` < need. Weights under
  // 2**-44 have no mass.
  int32_t lo = key_of(0x1p-44f), hi = key_of(1.0f) + 1;
  int64_t above = 0;
  int at_lo = n, at_hi = 0;
  const float* inside = x;
  int size = n;
  int64_t base = 0;  // what the elements left out of `inside` at its upper end add to a mass or a count
  int base_count = 0;
  const int32_t guesses[3] = {key_of(0x1p-8f), key_of(0x1p-14f), key_of(0x1p-20f)};
  int step = 0;
  while (hi - lo > 1) {
    if (size > 64 && at_lo - at_hi <= size / 4) {
      size = compress_between(inside, size, value_of(lo), value_of(hi), ws.copy.data());
      inside = ws.copy.data();
      base = above;
      base_count = at_hi;
    }
    int32_t mid = step < 3 ? guesses[step] : middle(lo, hi);
    if (++step <= 3 && (mid <= lo || mid >= hi)) continue;
    int count;
    const int64_t mass = base + mass_at_least(inside, size, value_of(mid), &count);
    count += base_count;
    if (mass >= need) {
      lo = mid;
      at_lo = count;
    } else {
      hi = mid;
      at_hi = count;
      above = mass;
    }
  }
  Cut cut;
  cut.level = value_of(lo);
  const int64_t each = mass_of(cut.level);
  const int64_t ties = (need - above + each - 1) / each;
  // Elements in lo .. hi - 1 are those equal to the level, but for weights without mass when lo never moved.
  if (ties < at_lo - at_hi) cut.last_id = find_equal(x, n, cut.level, ties);
  return cut;
}

template <class Value>
int count_greater(const Row& row, float x, const Value& value) {
  const F16 t = splat(x);
  int count = 0;
  for (int chunk = 0; chunk < num_chunks(row.vocab); ++chunk) {
    if (bits(gt(value(load(row.lane_max.data() + chunk * 16)), t)) == 0) continue;
    const int stop = std::min(row.vocab, (chunk + 1) * kChunk);
    for (int first = chunk * kChunk; first < stop; first += 16)
      count += __builtin_popcount(bits(gt(value(load_row(row.logits, row.vocab, first)), t)));
  }
  return count;
}

int collect(const float* x, int n, const Cut& cut, int most, int32_t* ids, float* values) {
  int count = 0;
  for (int first = 0; first < n; first += 16) {
    const F16 v = first + 16 <= n ? load(x + first) : load_tail(x + first, n - first, kNegInf);
    const Mask m = tie_mask(cut, v, first);
    if (bits(m) == 0) continue;
    if (count + 16 > most && count + __builtin_popcount(bits(m)) > most) return -1;
    compress_ids(ids + count, m, first);
    count += compress(values + count, m, v);
  }
  return count;
}

template int top_ids<Identity>(const Row&, int, bool, const Identity&, Workspace&);
template int top_sorted<Identity>(const Row&, int, const Identity&, Workspace&);
template int top_sorted<Logprob>(const Row&, int, const Logprob&, Workspace&);
template int count_greater<Identity>(const Row&, float, const Identity&);
template int count_greater<Logprob>(const Row&, float, const Logprob&);

}  // namespace vllm::sampling
