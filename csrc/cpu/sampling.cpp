#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "common.h"
#include "pool.h"
#include "sampling_row.h"

namespace vllm::sampling {
namespace {

constexpr int kListedPart = 8;        // up to vocab / 8 remaining ids are kept as a list, more as an array of weights
constexpr int kEditedPerUnit = 4;     // draws of one row that one thread does in a row: edited ones,
constexpr int kPlainPerUnit = 2048;   // and ones that share their distribution
constexpr int kMemoFrom = 4;          // draws from one distribution that pay for keeping prefix sums
constexpr int32_t kInPrompt = 1 << 30;

struct Settings {
  float temperature, top_p, min_p;
  int32_t top_k;
  bool operator==(const Settings& o) const {
    return temperature == o.temperature && top_k == o.top_k && top_p == o.top_p && min_p == o.min_p;
  }
};

// Philox4x32-10 (Salmon et al., SC'11) with key = seed and counter = position; the top 24 bits of word 0 over 2**24.
float uniform(uint64_t seed, int64_t position) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  const uint64_t where = static_cast<uint64_t>(position);
  uint32_t c0 = static_cast<uint32_t>(where), c1 = static_cast<uint32_t>(where >> 32), c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<float>(c0 >> 8) * 0x1p-24f;
}

float log_of(float total) { return static_cast<float>(std::log(static_cast<double>(total))); }

// c[b] = c[b - 1] + sum[b], in place.
void accumulate(float* sums, int count) {
  for (int i = 1; i < count; ++i) sums[i] = sums[i - 1] + sums[i];
}

// What one draw, or several that share a row and settings, choose from.
class Distribution {
 public:
  // `original` is the row before +inf was taken out of it.
  void make(const Row& row, const float* original, const Settings& settings, Workspace& ws);
  // `shared`: many draws follow, so that prefix sums of the blocks they hit are kept.
  int32_t draw(float u, bool shared);
  // Step 7 of the definition for the processed modes, out [vocab].
  void processed_values(bool logprobs, float* out);
  float total();
  bool is_plain() const { return kind_ == kPlain; }

 private:
  enum Kind { kGreedy, kPlain, kWeights, kList };
  void listed(Workspace& ws, int count);
  int64_t needed(int64_t mass) const {
    const double part = static_cast<double>(settings_.top_p) * static_cast<double>(mass);
    return std::max<int64_t>(1, static_cast<int64_t>(part));
  }

  const Row* row_ = nullptr;
  const float* original_ = nullptr;
  Settings settings_{};
  Removal removal_;
  float rate_ = 0.0f;
  Kind kind_ = kGreedy;
  int32_t greedy_ = 0;
  bool summed_ = false;
  int blocks_ = 0;
  std::vector<float> cumulative_;  // [blocks]
  std::vector<float> weights_;     // kWeights: [blocks * 1024], 0 for removed ids
  std::vector<int32_t> ids_;       // kList: remaining ids in order,
  std::vector<float> list_;        //        their weights,
  std::vector<int32_t> starts_;    //        and where each block's begin, [blocks + 1]
  std::vector<float> prefix_;      // sums inside blocks, where prefix_ready_
  std::vector<uint8_t> prefix_ready_;
  float block_[kBlock];
};

void Distribution::make(const Row& row, const float* original, const Settings& settings, Workspace& ws) {
  row_ = &row;
  original_ = original;
  settings_ = settings;
  removal_ = Removal();
  blocks_ = num_blocks(row.vocab);
  summed_ = false;
  prefix_ready_.clear();
  at_least(cumulative_, static_cast<size_t>(blocks_));
  if (settings.temperature == 0.0f) {
    kind_ = kGreedy;
    greedy_ = row.arg_max();
    rate_ = multiplier(1.0f);
    return;
  }
  rate_ = multiplier(settings.temperature);
  removal_.min_p = settings.min_p;
  const int vocab = row.vocab, k = settings.top_k;
  const bool some = k > 0 && k < vocab, nucleus = settings.top_p < 1.0f;
  summed_ = true;
  if (!some && !nucleus && settings.min_p <= 0.0f) {
    kind_ = kPlain;
    block_sums(row, rate_, cumulative_.data());
    accumulate(cumulative_.data(), blocks_);
    return;
  }
  if (some && k <= vocab / kListedPart) {
    int count = top_ids(row, k, false, Identity(), ws);
    if (count == k) {
      const float level = *std::min_element(ws.values.begin(), ws.values.begin() + count);
      int last = count - 1;
      while (ws.values[last] != level) --last;
      removal_.top_k = {level, ws.ids[last]};
    }
    const F16 m = splat(row.max), rate = splat(rate_);
    for (int i = 0; i < count; i += 16) store(ws.values.data() + i, weight(load(ws.values.data() + i), m, rate));
    int kept = 0;
    int64_t mass = 0;
    for (int i = 0; i < count; ++i) {
      const float w = ws.values[i];
      if (!(w >= settings.min_p)) continue;
      ws.ids[kept] = ws.ids[i];
      ws.values[kept++] = w;
      mass += mass_of(w);
    }
    count = kept;
    if (nucleus) {
      const Cut cut = top_p_cut(ws.values.data(), count, needed(mass), ws);
      removal_.top_p = {cut.level, cut.last_id == INT32_MAX ? INT32_MAX : ws.ids[cut.last_id]};
      kept = 0;
      for (int i = 0; i < count; ++i) {
        if (!cut.keeps(ws.values[i], i)) continue;
        ws.ids[kept] = ws.ids[i];
        ws.values[kept++] = ws.values[i];
      }
      count = kept;
    }
    listed(ws, count);
    return;
  }
  if (some) removal_.top_k = top_k_cut(row, k, ws);
  kind_ = kWeights;
  const size_t padded = static_cast<size_t>(blocks_) * kBlock;
  at_least(weights_, padded);
  const int64_t mass = block_sums(row, rate_, removal_, weights_.data(), cumulative_.data());
  if (nucleus) {
    removal_.top_p = top_p_cut(weights_.data(), vocab, needed(mass), ws);
    const int most = std::max(1, vocab / kListedPart);
    at_least(ws.ids, static_cast<size_t>(vocab) + 16);
    at_least(ws.values, static_cast<size_t>(vocab) + 16);
    const int count = collect(weights_.data(), vocab, removal_.top_p, most, ws.ids.data(), ws.values.data());
    if (count >= 0) {
      listed(ws, count);
      return;
    }
    for (int first = 0; first < vocab; first += 16) {  // weights_ is padded
      const F16 w = load(weights_.data() + first);
      store(weights_.data() + first, keep(tie_mask(removal_.top_p, w, first), w));
    }
    block_sums(weights_.data(), blocks_, cumulative_.data());
  }
  accumulate(cumulative_.data(), blocks_);
}

// Adding zeros changes no sum, so the list gives the same block sums as the whole vocabulary would.
void Distribution::listed(Workspace& ws, int count) {
  kind_ = kList;
  ids_.swap(ws.ids);
  list_.swap(ws.values);
  at_least(starts_, static_cast<size_t>(blocks_) + 1);
  int i = 0;
  for (int block = 0; block < blocks_; ++block) {
    starts_[block] = i;
    float lane[16] = {};
    const int begin = i;
    for (; i < count && ids_[i] < (block + 1) * kBlock; ++i) lane[ids_[i] & 15] += list_[i];
    cumulative_[block] = i > begin ? fold_sum(load(lane)) : 0.0f;
  }
  starts_[blocks_] = count;
  accumulate(cumulative_.data(), blocks_);
}

float Distribution::total() {
  if (!summed_) {
    block_sums(*row_, rate_, cumulative_.data());
    accumulate(cumulative_.data(), blocks_);
    summed_ = true;
  }
  return cumulative_[blocks_ - 1];
}

int32_t Distribution::draw(float u, bool shared) {
  if (kind_ == kGreedy) return greedy_;
  const float* c = cumulative_.data();
  float target = u * c[blocks_ - 1];
  const int block = static_cast<int>(std::upper_bound(c, c + blocks_ - 1, target) - c);
  if (block > 0) target -= c[block - 1];
  const int begin = kind_ == kList ? starts_[block] : block * kBlock;
  const int count = kind_ == kList ? starts_[block + 1] - begin : kBlock;
  const auto weights = [&]() -> const float* {
    if (kind_ == kList) return list_.data() + begin;
    if (kind_ == kWeights) return weights_.data() + begin;
    block_weights(*row_, rate_, block, block_);
    return block_;
  };
  int place = 0;
  if (shared) {
    if (prefix_ready_.empty()) prefix_ready_.assign(static_cast<size_t>(blocks_), 0);
    at_least(prefix_, static_cast<size_t>(blocks_) * kBlock);
    float* prefix = prefix_.data() + begin;
    if (prefix_ready_[block] == 0) {
      const float* w = weights();
      float sum = 0.0f;
      for (int i = 0; i < count; ++i) prefix[i] = sum = sum + w[i];
      prefix_ready_[block] = 1;
    }
    place = static_cast<int>(std::upper_bound(prefix, prefix + count, target) - prefix);
  } else {
    const float* w = weights();
    float sum = 0.0f;
    for (; place < count; ++place) {
      sum += w[place];
      if (sum > target) break;
    }
  }
  if (place == count) {  // rounding left none
    const float* w = weights();
    do {
      --place;
    } while (place > 0 && !(w[place] > 0.0f));
  }
  return kind_ == kList ? ids_[begin + place] : begin + place;
}

void Distribution::processed_values(bool logprobs, float* out) {
  const int vocab = row_->vocab;
  const bool greedy = kind_ == kGreedy;
  const F16 m = splat(row_->max), rate = splat(rate_), t = splat(greedy ? 1.0f : settings_.temperature);
  const F16 floor = splat(removal_.min_p), none = splat(kNegInf);
  const F16 log_sum = splat(logprobs ? log_of(total()) : 0.0f);
  for (int first = 0; first < vocab; first += 16) {
    const F16 l = load_row(row_->logits, vocab, first);
    F16 v;
    if (logprobs) {
      v = l - m;
      if (!greedy) v = v / t;
      v = v - log_sum;
    } else {
      v = load_row(original_, vocab, first);
      if (!greedy) v = v / t;
    }
    if (!greedy) {
      const F16 w = weight(l, m, rate);
      v = choose(ge(w, floor) & tie_mask(removal_.top_k, l, first) & tie_mask(removal_.top_p, w, first), v, none);
    }
    if (first + 16 <= vocab) {
      store(out + first, v);
    } else {
      float tail[16];
      store(tail, v);
      std::copy(tail, tail + (vocab - first), out + first);
    }
  }
}

// The buffers of one thread, kept from call to call.
struct Thread {
  Row raw, edited, values;
  std::vector<float> raw_finite, edited_logits, edited_finite, value_buffer;
  std::vector<int32_t> counts;  // [vocab], zero between draws
  Distribution distribution;
  Workspace ws;
  std::vector<int32_t> top;     // the row's largest ids for log-probabilities, sorted
  std::vector<float> top_values;
  std::vector<int32_t> ranks;   // [vocab], 0 where not known
  std::vector<int32_t> ranked;  // ids whose rank is known
};

Thread& this_thread() {
  static thread_local Thread thread;
  return thread;
}

// A row's values for log-probabilities and the best of them, shared by the draws that ask for the same.
class Lists {
 public:
  explicit Lists(Thread& thread) : thread_(thread) {}
  ~Lists() { forget(); }

  void use(const Row& row, bool by_logprob, Logprob value) {
    forget();
    row_ = &row;
    by_logprob_ = by_logprob;
    value_ = value;
  }
  void forget() {
    for (const int32_t id : thread_.ranked) thread_.ranks[id] = 0;
    thread_.ranked.clear();
    listed_ = -1;
    row_ = nullptr;
  }
  bool ready() const { return row_ != nullptr; }

  // The entry of `token`: itself, then the k largest (k <= vocab).
  void write(int32_t token, int k, int32_t* ids, float* values, int32_t* rank) {
    const float own = by_logprob_ ? value_(row_->logits[token]) : row_->logits[token];
    ids[0] = token;
    values[0] = own;
    at_least(thread_.ranks, static_cast<size_t>(row_->vocab));
    int32_t& known = thread_.ranks[token];
    if (known == 0) {
      known = 1 + (by_logprob_ ? count_greater(*row_, own, value_) : count_greater(*row_, own, Identity()));
      thread_.ranked.push_back(token);
    }
    *rank = known;
    if (k > listed_) {
      listed_ = by_logprob_ ? top_sorted(*row_, k, value_, thread_.ws) : top_sorted(*row_, k, Identity(), thread_.ws);
      thread_.top.assign(thread_.ws.ids.begin(), thread_.ws.ids.begin() + listed_);
      thread_.top_values.assign(thread_.ws.values.begin(), thread_.ws.values.begin() + listed_);
    }
    std::copy(thread_.top.begin(), thread_.top.begin() + k, ids + 1);
    std::copy(thread_.top_values.begin(), thread_.top_values.begin() + k, values + 1);
  }

 private:
  Thread& thread_;
  const Row* row_ = nullptr;
  bool by_logprob_ = false;
  Logprob value_{0.0f, 0.0f};
  int listed_ = -1;
};

Status status_of(const Row& row) { return row.has_nan ? kNan : row.max == kNegInf ? kNoToken : kOk; }

// The total of the weights at temperature 1.
float plain_total(const Row& row, std::vector<float>& buffer) {
  const int blocks = num_blocks(row.vocab);
  at_least(buffer, static_cast<size_t>(blocks));
  block_sums(row, multiplier(1.0f), buffer.data());
  accumulate(buffer.data(), blocks);
  return buffer[blocks - 1];
}

// Draws of one row, done by one thread.
class Unit {
 public:
  Unit(const SamplingArgs& args, const float* logits, Thread& thread)
      : a_(args), logits_(logits), t_(thread), raw_lists_(thread), processed_lists_(thread) {
    t_.raw.scan(logits, a_.vocab);
    t_.raw.make_finite(t_.raw_finite);
  }

  void run(const int32_t* draws, int count, const uint8_t* edited) {
    const bool raw_mode = a_.mode == kRawLogprobs || a_.mode == kRawLogits;
    for (int i = 0; i < count; ++i) {
      const int32_t s = draws[i];
      const Settings settings{a_.temperature[s], a_.top_p[s], a_.min_p[s], a_.top_k[s]};
      Status status;
      if (edited[s] != 0) {
        have_ = false;
        edit(s);
        t_.edited.scan(t_.edited_logits.data(), a_.vocab);
        t_.edited.make_finite(t_.edited_finite);
        status = status_of(t_.edited);
        if (status == kOk) make(t_.edited, t_.edited_logits.data(), settings);
      } else {
        status = status_of(t_.raw);
        if (status == kOk && !(have_ && settings == settings_)) {
          make(t_.raw, logits_, settings);
          have_ = true;
          settings_ = settings;
          int same = i + 1;
          while (same < count && same < i + kMemoFrom && edited[draws[same]] == 0 && settings_of(draws[same]) == settings) ++same;
          shared_ = same - i >= kMemoFrom;
        }
      }
      const int asked = a_.num_logprobs[s];
      if (asked >= 0 && status == kOk && raw_mode) {
        status = a_.mode == kRawLogprobs ? status_of(t_.raw) : t_.raw.has_nan ? kNan : kOk;
      }
      a_.status[s] = status;
      if (status != kOk) {
        a_.token_ids[s] = 0;
        if (a_.entry_offsets != nullptr) a_.entry_ranks[s] = 0;
      } else {
        Distribution& d = t_.distribution;
        const int32_t token = d.draw(uniform(a_.seeds[s], a_.positions[s]), edited[s] == 0 && shared_);
        a_.token_ids[s] = token;
        if (a_.entry_offsets != nullptr) {
          a_.entry_ranks[s] = 0;
          if (asked >= 0) {
            const int64_t at = a_.entry_offsets[s];
            Lists& lists = raw_mode ? raw_lists() : processed_lists();
            lists.write(token, std::min(asked, a_.vocab), a_.entry_ids + at, a_.entry_values + at, a_.entry_ranks + s);
          }
        }
      }
      if (edited[s] != 0) undo(s);
    }
  }

 private:
  Settings settings_of(int32_t s) const { return {a_.temperature[s], a_.top_p[s], a_.min_p[s], a_.top_k[s]}; }

  void make(const Row& row, const float* original, const Settings& settings) {
    if (processed_lists_.ready()) processed_lists_.forget();
    t_.distribution.make(row, original, settings, t_.ws);
    if (&row == &t_.raw && t_.distribution.is_plain() && settings.temperature == 1.0f) raw_total_ = t_.distribution.total();
  }

  Lists& raw_lists() {
    if (raw_lists_.ready()) return raw_lists_;
    if (a_.mode == kRawLogprobs) {
      if (raw_total_ < 0.0f) raw_total_ = plain_total(t_.raw, t_.value_buffer);
      raw_lists_.use(t_.raw, true, {t_.raw.max, log_of(raw_total_)});
    } else if (t_.raw.logits == logits_) {
      raw_lists_.use(t_.raw, false, {});
    } else {  // +inf is shown as it is
      t_.values.scan(logits_, a_.vocab);
      raw_lists_.use(t_.values, false, {});
    }
    return raw_lists_;
  }

  Lists& processed_lists() {
    if (processed_lists_.ready()) return processed_lists_;
    at_least(t_.value_buffer, static_cast<size_t>(a_.vocab));
    t_.distribution.processed_values(a_.mode == kProcessedLogprobs, t_.value_buffer.data());
    t_.values.scan(t_.value_buffer.data(), a_.vocab);
    processed_lists_.use(t_.values, false, {});
    return processed_lists_;
  }

  // Step 0 of the definition, to t_.edited_logits. A copy of the row is kept there from draw to draw where it can be.
  void edit(int32_t s) {
    const int vocab = a_.vocab;
    at_least(t_.edited_logits, static_cast<size_t>(vocab));
    float* l = t_.edited_logits.data();
    const uint32_t* allowed = a_.allowed != nullptr ? a_.allowed + static_cast<int64_t>(s) * ((vocab + 31) / 32) : nullptr;
    if (a_.processed != nullptr && a_.processed[s] != nullptr) {
      std::memcpy(l, a_.processed[s], static_cast<size_t>(vocab) * 4);
      is_copy_ = false;
    } else {
      if (allowed != nullptr) {
        const F16 none = splat(kNegInf);
        int first = 0;
        for (; first + 16 <= vocab; first += 16)
          store(l + first, choose(lanes(allowed[first / 32] >> (first & 16) & 0xffffu), load(logits_ + first), none));
        for (; first < vocab; ++first) l[first] = (allowed[first / 32] >> (first & 31) & 1u) != 0 ? logits_[first] : kNegInf;
        is_copy_ = false;
      } else if (!is_copy_) {
        std::memcpy(l, logits_, static_cast<size_t>(vocab) * 4);
        is_copy_ = true;
      }
      for (int i = begin(a_.banned, s); i < end(a_.banned, s); ++i) l[a_.banned.ids[i]] = kNegInf;
      for (int i = begin(a_.bias, s); i < end(a_.bias, s); ++i) l[a_.bias.ids[i]] += a_.bias.values[i];
    }
    if (a_.penalties != nullptr) penalize(s, a_.penalties + static_cast<int64_t>(s) * 3, l);
  }

  void penalize(int32_t s, const float* penalties, float* l) {
    const float repetition = penalties[0], frequency = penalties[1], presence = penalties[2];
    if (repetition == 1.0f && frequency == 0.0f && presence == 0.0f) return;
    at_least(t_.counts, static_cast<size_t>(a_.vocab));
    int32_t* counts = t_.counts.data();
    const Ragged &output = a_.output_tokens, &prompt = a_.prompt_tokens;
    for (int i = begin(output, s); i < end(output, s); ++i) ++counts[output.ids[i]];
    if (repetition != 1.0f)
      for (int i = begin(prompt, s); i < end(prompt, s); ++i) counts[prompt.ids[i]] |= kInPrompt;
    const auto repeated = [&](float x) { return x > 0.0f ? x / repetition : x * repetition; };
    for (int i = begin(output, s); i < end(output, s); ++i) {
      const int32_t id = output.ids[i], count = counts[id];
      if (count == 0) continue;  // done at its first place in the list
      counts[id] = 0;
      float x = l[id];
      if (repetition != 1.0f) x = repeated(x);
      if (frequency != 0.0f) x -= frequency * static_cast<float>(count & ~kInPrompt);
      if (presence != 0.0f) x -= presence;
      l[id] = x;
    }
    if (repetition == 1.0f) return;
    for (int i = begin(prompt, s); i < end(prompt, s); ++i) {
      const int32_t id = prompt.ids[i];
      if (counts[id] == 0) continue;
      counts[id] = 0;
      l[id] = repeated(l[id]);
    }
  }

  // Makes t_.edited_logits the plain copy again.
  void undo(int32_t s) {
    if (!is_copy_) return;
    for (const Ragged* list : {&a_.banned, &a_.bias, &a_.output_tokens, &a_.prompt_tokens})
      for (int i = begin(*list, s); i < end(*list, s); ++i) t_.edited_logits[list->ids[i]] = logits_[list->ids[i]];
  }

  static int begin(const Ragged& list, int32_t s) { return list.offsets != nullptr ? list.offsets[s] : 0; }
  static int end(const Ragged& list, int32_t s) { return list.offsets != nullptr ? list.offsets[s + 1] : 0; }

  const SamplingArgs& a_;
  const float* logits_;
  Thread& t_;
  Lists raw_lists_, processed_lists_;
  Settings settings_{};
  bool have_ = false, shared_ = false, is_copy_ = false;
  float raw_total_ = -1.0f;
};

bool all_ones(const uint32_t* words, int vocab) {
  uint32_t all = ~0u;
  for (int i = 0; i < vocab / 32; ++i) all &= words[i];
  if (all != ~0u) return false;
  const uint32_t rest = vocab % 32 != 0 ? (1u << vocab % 32) - 1u : 0u;
  return rest == 0 || (words[vocab / 32] & rest) == rest;
}

bool is_edited(const SamplingArgs& a, int32_t s) {
  const auto any = [s](const Ragged& list) { return list.offsets != nullptr && list.offsets[s + 1] > list.offsets[s]; };
  if (a.processed != nullptr && a.processed[s] != nullptr) return true;
  if (any(a.banned) || any(a.bias)) return true;
  if (a.allowed != nullptr && !all_ones(a.allowed + static_cast<int64_t>(s) * ((a.vocab + 31) / 32), a.vocab)) return true;
  if (a.penalties == nullptr) return false;
  const float* p = a.penalties + static_cast<int64_t>(s) * 3;
  return (p[0] != 1.0f && (any(a.output_tokens) || any(a.prompt_tokens))) ||
         ((p[1] != 0.0f || p[2] != 0.0f) && any(a.output_tokens));
}

void require_list(const Ragged& list, int size, int vocab, const char* message) {
  if (list.offsets == nullptr) return;
  bool ok = list.offsets[0] == 0;
  for (int s = 0; s < size; ++s) ok &= list.offsets[s + 1] >= list.offsets[s];
  require(ok, message);
  uint32_t largest = 0;
  for (int i = 0; i < list.offsets[size]; ++i) largest = std::max(largest, static_cast<uint32_t>(list.ids[i]));
  require(list.offsets[size] == 0 || largest < static_cast<uint32_t>(vocab), message);
}

void require_args(const SamplingArgs& a) {
  require(a.size >= 0 && a.vocab > 0, "sampling: empty vocabulary");
  require(a.mode >= kRawLogprobs && a.mode <= kProcessedLogits, "sampling: unknown logprobs mode");
  bool rows = true, settings = true, entries = true;
  for (int s = 0; s < a.size; ++s) {
    rows &= a.rows[s] >= 0 && a.rows[s] < a.num_rows;
    settings &= a.temperature[s] >= 0.0f && a.temperature[s] < std::numeric_limits<float>::infinity() && a.top_p[s] >= 0.0f &&
                a.min_p[s] >= 0.0f && a.min_p[s] <= 1.0f;
    const int64_t places = a.num_logprobs[s] < 0 ? 0 : 1 + std::min(a.num_logprobs[s], a.vocab);
    entries &= a.entry_offsets != nullptr ? a.entry_offsets[s + 1] - static_cast<int64_t>(a.entry_offsets[s]) == places
                                          : places == 0;
  }
  require(rows, "sampling: row out of range");
  require(settings, "sampling: temperature, top_p or min_p out of range");
  require(entries, "sampling: offsets of log-probabilities do not fit what was asked for");
  require_list(a.banned, a.size, a.vocab, "sampling: banned id out of range");
  require_list(a.bias, a.size, a.vocab, "sampling: biased id out of range");
  require(a.bias.offsets == nullptr || a.bias.values != nullptr || a.bias.offsets[a.size] == 0, "sampling: bias without values");
  require_list(a.output_tokens, a.size, a.vocab, "sampling: output token out of range");
  require_list(a.prompt_tokens, a.size, a.vocab, "sampling: prompt token out of range");
}

// Ordered so that draws of one row stand together.
std::vector<int32_t> by_row(const int32_t* rows, int size) {
  std::vector<int32_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  if (!std::is_sorted(rows, rows + size))
    std::stable_sort(order.begin(), order.end(), [rows](int32_t x, int32_t y) { return rows[x] < rows[y]; });
  return order;
}

// Calls body(begin, end, tile rows' first) for tiles of the distinct rows in order.
template <class Body>
void for_tiles(const int32_t* rows, const std::vector<int32_t>& order, const LogitsSource& source, Body&& body) {
  std::vector<int32_t> distinct;
  const int size = static_cast<int>(order.size()), most = std::max(1, source.max_rows);
  for (int begin = 0; begin < size;) {
    distinct.clear();
    int end = begin;
    for (; end < size; ++end) {
      const int32_t row = rows[order[end]];
      if (!distinct.empty() && distinct.back() == row) continue;
      if (static_cast<int>(distinct.size()) == most) break;
      distinct.push_back(row);
    }
    const float* logits = source.tile(source.context, distinct.data(), static_cast<int32_t>(distinct.size()));
    body(begin, end, logits);
    begin = end;
  }
}

struct Work {
  int row;  // in the tile
  int begin, end;
};

}  // namespace

void sample(const SamplingArgs& args, const LogitsSource& source) {
  require_args(args);
  std::vector<int32_t> order = by_row(args.rows, args.size);
  std::vector<uint8_t> edited(static_cast<size_t>(args.size));
  for (int s = 0; s < args.size; ++s) edited[s] = is_edited(args, s);
  const auto settings = [&args](int32_t s) {
    return Settings{args.temperature[s], args.top_p[s], args.min_p[s], args.top_k[s]};
  };
  const auto alike = [&](int32_t x, int32_t y) { return edited[x] == 0 && edited[y] == 0 && settings(x) == settings(y); };
  std::vector<Work> work;
  for_tiles(args.rows, order, source, [&](int begin, int end, const float* logits) {
    work.clear();
    int row = -1;
    for (int first = begin, stop; first < end; first = stop) {
      ++row;
      stop = first + 1;
      bool mixed = false;
      while (stop < end && args.rows[order[stop]] == args.rows[order[first]]) {
        mixed |= !alike(order[stop - 1], order[stop]);
        ++stop;
      }
      if (mixed) {
        std::stable_sort(order.begin() + first, order.begin() + stop, [&](int32_t x, int32_t y) {
          if (edited[x] != edited[y]) return edited[x] < edited[y];
          if (edited[x] != 0) return false;
          const Settings p = settings(x), q = settings(y);
          if (p.temperature != q.temperature) return p.temperature < q.temperature;
          if (p.top_k != q.top_k) return p.top_k < q.top_k;
          if (p.top_p != q.top_p) return p.top_p < q.top_p;
          return p.min_p < q.min_p;
        });
      }
      for (int at = first, next; at < stop; at = next) {
        const int most = edited[order[at]] != 0 ? kEditedPerUnit : kPlainPerUnit;
        next = at + 1;
        while (next < stop && next - at < most && (edited[order[next]] == edited[order[at]])) ++next;
        work.push_back({row, at, next});
      }
    }
    parallel_for(static_cast<int>(work.size()), [&](int task, int) {
      const Work& w = work[task];
      const float* l = logits + static_cast<int64_t>(w.row) * args.vocab;
      Unit(args, l, this_thread()).run(order.data() + w.begin, w.end - w.begin, edited.data());
    });
  });
}

void token_logprobs(const TokenLogprobArgs& args, const LogitsSource& source) {
  require(args.size >= 0 && args.vocab > 0, "token log-probabilities: empty vocabulary");
  require(args.num_logprobs >= 0, "token log-probabilities: negative number");
  for (int i = 0; i < args.size; ++i) {
    require(args.rows[i] >= 0 && args.rows[i] < args.num_rows, "token log-probabilities: row out of range");
    require(args.targets[i] >= 0 && args.targets[i] < args.vocab, "token log-probabilities: target out of range");
  }
  const bool by_logprob = args.mode == kRawLogprobs || args.mode == kProcessedLogprobs;
  const int k = std::min(args.num_logprobs, args.vocab);
  const std::vector<int32_t> order = by_row(args.rows, args.size);
  for_tiles(args.rows, order, source, [&](int begin, int end, const float* logits) {
    std::vector<Work> work;
    for (int at = begin; at < end; ++at) {
      if (work.empty() || args.rows[order[at]] != args.rows[order[at - 1]]) work.push_back({static_cast<int>(work.size()), at, at});
      work.back().end = at + 1;
    }
    parallel_for(static_cast<int>(work.size()), [&](int task, int) {
      Thread& t = this_thread();
      const Work& w = work[task];
      t.raw.scan(logits + static_cast<int64_t>(w.row) * args.vocab, args.vocab);
      if (by_logprob) t.raw.make_finite(t.raw_finite);
      const bool bad = t.raw.has_nan || (by_logprob && t.raw.max == kNegInf);
      Lists lists(t);
      Logprob value{t.raw.max, 0.0f};
      if (by_logprob && !bad) value.log_sum = log_of(plain_total(t.raw, t.value_buffer));
      lists.use(t.raw, by_logprob, value);
      for (int at = w.begin; at < w.end; ++at) {
        const int32_t e = order[at];
        int32_t* ids = args.entry_ids + static_cast<int64_t>(e) * (k + 1);
        float* values = args.entry_values + static_cast<int64_t>(e) * (k + 1);
        if (!bad) {
          lists.write(args.targets[e], k, ids, values, args.entry_ranks + e);
          continue;
        }
        ids[0] = args.targets[e];
        std::iota(ids + 1, ids + 1 + k, 0);
        std::fill(values, values + k + 1, std::numeric_limits<float>::quiet_NaN());
        args.entry_ranks[e] = 0;
      }
    });
  });
}

namespace {

struct Memory {
  const float* logits;
  int64_t stride;
  int vocab;
  std::vector<float> copy;

  // Rows that follow each other in memory are used where they are.
  static const float* tile(void* context, const int32_t* rows, int32_t count) {
    auto* self = static_cast<Memory*>(context);
    if (count == 1 || (self->stride == self->vocab && rows[count - 1] - rows[0] == count - 1))
      return self->logits + rows[0] * self->stride;
    self->copy.resize(static_cast<size_t>(count) * self->vocab);
    for (int i = 0; i < count; ++i)
      std::memcpy(self->copy.data() + static_cast<int64_t>(i) * self->vocab, self->logits + rows[i] * self->stride,
                  static_cast<size_t>(self->vocab) * 4);
    return self->copy.data();
  }
};

}  // namespace
}  // namespace vllm::sampling

VLLM_EXPORT int vllm_sample(const vllm::sampling::SamplingArgs* args, const float* logits, int64_t stride, int threads) {
  return vllm::guarded([&] {
    vllm::sampling::Memory memory{logits, stride, args->vocab, {}};
    vllm::Session session(threads);
    vllm::sampling::sample(*args, {vllm::sampling::Memory::tile, &memory, 256});
  });
}

VLLM_EXPORT int vllm_token_logprobs(const vllm::sampling::TokenLogprobArgs* args, const float* logits, int64_t stride,
                                    int threads) {
  return vllm::guarded([&] {
    vllm::sampling::Memory memory{logits, stride, args->vocab, {}};
    vllm::Session session(threads);
    vllm::sampling::token_logprobs(*args, {vllm::sampling::Memory::tile, &memory, 256});
  });
}
