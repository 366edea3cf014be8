// The largest of a row of logits.

#pragma once

namespace {

// The largest of n logits, the first one where several are equal, and its log-softmax.
void best(const float* logits, int64_t n, int64_t* token, float* log_q) {
  v16 most = splat(-INFINITY);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) most = greater(load(logits + i), most);
  float top = max16(most);
  for (; i < n; i++) top = std::max(top, logits[i]);
  int64_t at = 0;
  while (at < n - 1 && logits[at] != top) at++;
  v16 sums = {};
  for (i = 0; i + 16 <= n; i += 16) sums = sums + exp16(load(logits + i) - splat(top));
  float total = sum16(sums);
  for (; i < n; i++) total += std::exp(logits[i] - top);
  *token = at;
  *log_q = -std::log(total);
}

// The first of the largest of n logits; the first that is no number, where one is none.
int64_t likeliest(const float* logits, int64_t n) {
  v16 most = splat(-INFINITY), odd = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const v16 x = load(logits + i);
    most = greater(x, most), odd = odd + (x - x);  // not 0 where x is infinite or no number
  }
  if (sum16(odd) == 0.0f) {
    float top = max16(most);
    bool sound = true;
    for (int64_t j = i; j < n; j++) sound = sound && std::isfinite(logits[j]), top = std::max(top, logits[j]);
    if (sound)
      for (i = 0;; i++)
        if (logits[i] == top) return i;
  }
  int64_t at = 0;
  for (i = 0; i < n; i++) {
    if (std::isnan(logits[i])) return i;
    if (logits[i] > logits[at]) at = i;
  }
  return at;
}

// The k largest of numbers that are offered one after the other, best first, of equals the first.
struct Ranks {
  const int64_t k;
  int64_t* places;  // [k]
  float* values;    // [k]
  int64_t found = 0;
  float least = -INFINITY;  // of those found, once there are k

  bool open() const { return found < k; }
  void offer(int64_t place, float x) {
    if (!open() && !(x > least)) return;
    int64_t at = open() ? found++ : k - 1;
    for (; at > 0 && values[at - 1] < x; at--) values[at] = values[at - 1], places[at] = places[at - 1];
    values[at] = x, places[at] = place;
    if (!open()) least = values[k - 1];
  }
};

// Makes of the largest of n logits their log-softmax.
void log_softmax(const float* logits, int64_t n, const Ranks& best) {
  const float most = best.values[0];
  v16 sums = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) sums = sums + exp16(load(logits + i) - splat(most));
  float total = sum16(sums);
  for (; i < n; i++) total += std::exp(logits[i] - most);
  const float floor = most + std::log(total);
  for (int64_t j = 0; j < best.k; j++) best.values[j] -= floor;
}

// The k largest of n logits, best first (of equals the first), and their log-softmax. k is at most n.
void top(const float* logits, int64_t n, int64_t k, int64_t* tokens, float* log_q) {
  Ranks best{k, tokens, log_q};
  int64_t i = 0;
  for (; i < k; i++) best.offer(i, logits[i]);
  for (; i + 16 <= n; i += 16)
    if (max16(load(logits + i)) > best.least)
      for (int64_t j = i; j < i + 16; j++) best.offer(j, logits[j]);
  for (; i < n; i++) best.offer(i, logits[i]);
  log_softmax(logits, n, best);
}

}  // namespace

extern "C" {

// Of each row of logits [rows, n] the k best tokens and their log-probabilities, [rows, k] each. Returns a `Refusal`.
int pl_top(const float* logits, int64_t rows, int64_t n, int64_t k, int64_t* tokens, float* log_q) {
  if (rows < 0 || k < 1 || k > n) return BAD_COUNT;
  for (int64_t r = 0; r < rows; r++) top(logits + r * n, n, k, tokens + r * k, log_q + r * k);
  return DONE;
}

}  // extern "C"
