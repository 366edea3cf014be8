#pragma once

namespace {

//
// What core/sampling.py chooses. Its logarithms and exponentials come from torch and may differ from ours in the last
// bits, so a choice is made here only where that cannot matter: CLOSE is a hundred times what they differ by. Elsewhere
// the caller makes it.

constexpr int64_t UNDECIDED = -1;
constexpr int64_t DRAWS = 1 << 15;  // logits that a further thread is worth
constexpr float CLOSE = 1e-4f, CLOSE_OF = 4e-6f;  // of two scores: absolute, and of their size
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15u, MIX[2] = {0xBF58476D1CE4E5B9u, 0x94D049BB133111EBu};

// ln of positive normal numbers, to about two units in the last place (Cephes).
inline v16 log16(v16 x) {
  v16 f, e;
  for (int i = 0; i < PIECES; i++) {
    // The fraction is between the roots of 1/2 and 2.
    const ints bits = (ints)x.p[i], power = (bits - 0x3f3504f3) >> 23;
    f.p[i] = (floats)(bits - (power << 23)), e.p[i] = __builtin_convertvector(power, floats);
  }
  f = f - splat(1.0f);
  const v16 z = f * f;
  v16 y = splat(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    y = fma16(y, f, splat(c));
  y = y * f * z;
  y = fma16(e, splat(-2.12194440e-4f), y);
  y = fma16(z, splat(-0.5f), y);
  return fma16(e, splat(0.693359375f), f + y);
}

typedef double doubles __attribute__((vector_size(64)));
typedef int64_t longs __attribute__((vector_size(64)));
typedef float eighth __attribute__((vector_size(32)));

// e^x for x <= 0, to about 1e-14; arguments below -80 are clamped.
inline doubles exp_of(doubles x) {
  const doubles shift = doubles{} + 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  x = x > -80.0 ? x : doubles{} - 80.0;
  doubles n = x * 1.4426950408889634 + shift;
  const longs power = (longs)n << 52;  // only the low bits of n count
  n -= shift;
  const doubles r = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
  doubles y = doubles{} + 1.0 / 479001600;
  for (double c : {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24,
                   1.0 / 6, 0.5, 1.0, 1.0})
    y = y * r + c;
  return y * (doubles)(power + 0x3ff0000000000000);
}
inline double sum_of(doubles v) {
  double total = 0;
  for (int i = 0; i < 8; i++) total += v[i];
  return total;
}

inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * MIX[0];
  x = (x ^ (x >> 27)) * MIX[1];
  return x ^ (x >> 31);
}

// Gumbel noise of tokens first .. first + 15: core/noise.py, `gumbel`.
inline v16 gumbel16(uint64_t key, int64_t first, const int64_t* of_output) {
  float u[16];
  for (int j = 0; j < 16; j++) {
    const int64_t token = of_output ? of_output[first + j] : first + j;
    uint64_t bits = key + (uint64_t)(token + 1) * GAMMA;
    bits = (bits ^ (bits >> 30)) * MIX[0];
    bits = (bits ^ (bits >> 27)) * MIX[1];
    u[j] = (float)(int64_t)((bits & 0x7fffffffffffffffu) | 1);
  }
  const v16 x = lesser(load(u) * splat(0x1p-63f), splat(1.0f - 0x1p-24f)), one = splat(1.0f);
  const v16 rest = one - x, lost = one - rest;  // ln(1 - x) of the rounded 1 - x, corrected for what rounding did to x
  const v16 far = (v16() - log16(rest)) * (x / lost);
  v16 e;
  for (int i = 0; i < PIECES; i++) e.p[i] = lost.p[i] == 0.0f ? x.p[i] : far.p[i];
  return v16() - log16(e);
}

inline float largest(const float* y, int64_t padded) {
  v16 most = splat(-INFINITY);
  for (int64_t i = 0; i < padded; i += 16) most = greater(load(y + i), most);
  return max16(most);
}

inline void mask_below(float* y, int64_t padded, float least) {
  const v16 floor = splat(least);
  for (int64_t i = 0; i < padded; i += 16) {
    v16 v = load(y + i);
    for (int j = 0; j < PIECES; j++) v.p[j] = v.p[j] < floor.p[j] ? floats{} - INFINITY : v.p[j];
    save(y + i, v);
  }
}

// The k-th largest of n numbers, which are padded to a multiple of 16.
float kth_largest(const float* y, int64_t n, int64_t padded, int64_t k) {
  static thread_local std::vector<float> best;
  if (k > 128) {
    best.assign(y, y + n);
    std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<float>());
    return best[k - 1];
  }
  best.assign(k, -INFINITY);  // descending
  for (int64_t i = 0; i < padded; i += 16) {
    if (!(max16(load(y + i)) > best[k - 1])) continue;
    for (int64_t j = i; j < i + 16; j++) {
      if (!(y[j] > best[k - 1])) continue;
      int64_t at = k - 1;
      for (; at > 0 && best[at - 1] < y[j]; at--) best[at] = best[at - 1];
      best[at] = y[j];
    }
  }
  return best[k - 1];
}

// Masks what is outside of the smallest set of likeliest tokens whose probability reaches p, of equals the first;
// false: a rounding decides which they are.
bool keep_nucleus(float* y, int64_t n, int64_t padded, double p) {
  constexpr int LEVELS = 88;  // eighths below the largest logit; further down the oracle's weights are coarse
  static thread_local std::vector<doubles> depths, weights;
  static thread_local std::vector<int32_t> there;
  const int64_t eights = padded / 8;
  grow(depths, eights), grow(weights, eights), there.clear();
  const float most = largest(y, padded);
  const eighth top = eighth{} + most;
  doubles all = {};
  for (int64_t i = 0; i < eights; i++) {
    eighth x;
    std::memcpy(&x, y + 8 * i, sizeof x);
    depths[i] = __builtin_convertvector(top - x, doubles), weights[i] = exp_of(-depths[i]), all += weights[i];
  }
  const double limit = sum_of(all) * p, slack = 1e-12 * n;  // weights are rounded to 2^-40 there
  auto mass = [&](int level) {  // of the tokens above this level
    doubles sums = {};
    for (int64_t i = 0; i < eights; i++) sums += depths[i] < level / 8.0 ? weights[i] : doubles{};
    return sum_of(sums);
  };
  int low = 0, high = LEVELS;  // the last token that is needed is between them
  if (mass(high) < limit) return false;
  while (high - low > 1) (mass((low + high) / 2) < limit ? low : high) = (low + high) / 2;
  const float from = low / 8.0f, to = high / 8.0f;
  for (int64_t i = 0; i < padded; i += 16)
    if (most - max16(load(y + i)) < to)
      for (int64_t j = i; j < i + 16; j++)
        if (const float below = most - y[j]; below >= from && below < to) there.push_back((int32_t)j);
  std::sort(there.begin(), there.end(),
            [&](int32_t a, int32_t b) { return most - y[a] != most - y[b] ? y[a] > y[b] : a < b; });
  double before = mass(low);
  for (size_t at = 0; at < there.size(); at++) {
    if (limit - before <= slack) return false;
    before += weights[there[at] / 8][there[at] % 8];
    if (before < limit) continue;
    if (before - limit <= slack) return false;
    const float least = most - y[there[at]];
    for (size_t next = at + 1; next < there.size() && most - y[there[next]] == least; next++)
      y[there[next]] = -INFINITY;
    for (int64_t i = 0; i < padded; i++) y[i] = most - y[i] > least ? -INFINITY : y[i];
    return true;
  }
  return false;
}

// Sixteen scores where their bits are set, -inf elsewhere; i is a multiple of 16.
inline v16 allowed16(v16 x, const uint32_t* mask, int64_t i) {
  static const int32_t BIT[16] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                  1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  const int32_t bits = (int32_t)(mask[i / 32] >> (i % 32) & 0xffff);
  for (int p = 0; p < PIECES; p++) {
    ints own;
    std::memcpy(&own, BIT + p * PIECE, sizeof own);
    x.p[p] = (own & bits) != 0 ? x.p[p] : floats{} - INFINITY;
  }
  return x;
}

// The first of the likeliest tokens that a mask allows; UNDECIDED where it allows none, and where a logit is infinite or
// no number.
int64_t likeliest_allowed(const float* logits, int64_t n, const uint32_t* mask) {
  const int64_t whole = n / 16 * 16;
  float rest[16];
  for (int64_t j = 0; j < 16; j++) rest[j] = whole + j < n ? logits[whole + j] : 0.0f;
  v16 most = splat(-INFINITY), odd = {};
  for (int64_t i = 0; i < whole; i += 16) {
    const v16 x = load(logits + i);
    odd = odd + (x - x), most = greater(most, allowed16(x, mask, i));
  }
  float best = max16(most);
  if (whole < n) {
    const v16 x = load(rest);
    odd = odd + (x - x);
    save(rest, allowed16(x, mask, whole));
    for (int64_t j = whole; j < n; j++) best = std::max(best, rest[j - whole]);
  }
  if (!(sum16(odd) == 0.0f) || best == -INFINITY) return UNDECIDED;
  int64_t at = 0;
  while (logits[at] != best || !(mask[at / 32] >> (at % 32) & 1)) at++;
  return at;
}

// What these rules, which draw, make of a row of n logits, with the noise of a position where it is wanted; valid until
// the next call. Null where what is kept hangs on a rounding, and for what is no number. mask: null: all may follow.
float* scored(const float* logits, int64_t n, const Rules& r, int64_t position, bool noisy = true,
              const int64_t* of_output = nullptr, const uint32_t* mask = nullptr) {
  static thread_local std::vector<float> room;
  const int64_t padded = up(n, 16), whole = n / 16 * 16;
  grow(room, padded);
  float *y = room.data(), rest[16] = {};
  std::copy(logits + whole, logits + n, rest);
  const v16 divisor = splat((float)r.temperature);
  v16 odd = {};
  for (int64_t i = 0; i < padded; i += 16) {
    const v16 v = load(i < whole ? logits + i : rest) / divisor;
    odd = odd + (v - v);  // not 0 where something is infinite or no number
    save(y + i, mask ? allowed16(v, mask, i) : v);
  }
  if (!(sum16(odd) == 0.0f)) return nullptr;
  std::fill(y + n, y + padded, -INFINITY);
  if (0 < r.top_k && r.top_k < n) mask_below(y, padded, kth_largest(y, n, padded, r.top_k));
  if (r.top_p < 1 && !keep_nucleus(y, n, padded, r.top_p)) return nullptr;
  if (r.min_p <= 0) mask_below(y, padded, largest(y, padded) + (float)r.min_p);
  if (!noisy) return y;
  const uint64_t key = mixed(mixed((r.key ^ (uint64_t)position) + GAMMA) + GAMMA);
  for (int64_t i = 0; i < padded; i += 16) save(y + i, load(y + i) + gumbel16(key, i, of_output));
  return y;
}

// The token that these rules draw from a row of n logits; UNDECIDED where that hangs on a rounding or on what is no
// number.
int64_t drawn(const float* logits, int64_t n, const Rules& r, int64_t position, const uint32_t* mask = nullptr) {
  if (r.temperature < 0) return UNDECIDED;
  if (r.temperature == 0) return mask ? likeliest_allowed(logits, n, mask) : likeliest(logits, n);
  const float* y = scored(logits, n, r, position, true, nullptr, mask);
  if (!y) return UNDECIDED;
  v16 most = splat(-INFINITY), next = most;
  for (int64_t i = 0, padded = up(n, 16); i < padded; i += 16) {
    const v16 v = load(y + i);
    next = greater(next, lesser(most, v)), most = greater(most, v);
  }
  const float best = max16(most);
  float lanes[16], second = max16(next);
  save(lanes, most);
  bool first = true;
  for (float x : lanes)
    if (first && x == best) first = false;
    else second = std::max(second, x);
  if (!(best - second > CLOSE + CLOSE_OF * std::fabs(best))) return UNDECIDED;
  int64_t at = 0;
  while (y[at] != best) at++;
  return at;
}

// Puts tokens in place of outputs of the head.
inline void name_tokens(const Model& m, int64_t* outputs, int64_t count) {
  if (m.of_output)
    for (int64_t i = 0; i < count; i++) outputs[i] = m.of_output[outputs[i]];
}

// A draft's token and its chance of being the one that is drawn: its log-softmax among the scores, or among the logits
// where no rules are given or can be applied.
void guess(const Model& m, const float* logits, int64_t n, const Rules* rules, int64_t position, int64_t* token,
           float* log_q) {
  const float* y = rules && rules->temperature > 0 ? scored(logits, n, *rules, position, true, m.of_output) : nullptr;
  best(y ? y : logits, n, token, log_q);
  name_tokens(m, token, 1);
}

}  // namespace

extern "C" {

// Of each row of logits [rows, n] the token that one sequence's rules draw, as `pl_choose` does it. Returns a
// `Refusal`.
int pl_draw(const float* logits, int64_t rows, int64_t n, const Rules* rules, const int64_t* positions,
            int64_t* chosen) {
  if (rows < 0 || n < 1) return BAD_COUNT;
  for (int64_t i = 0; i < rows; i++) chosen[i] = drawn(logits + i * n, n, *rules, positions[i]);
  return DONE;
}

}  // extern "C"
