// Choices from many rows of logits, a job each.

#pragma once

namespace {

// f(row) for each of several rows of n logits, a row a unit.
template <class F> void for_rows(int64_t rows, int64_t n, int64_t threads, F f) {
  struct Rows final : Job {
    const int64_t rows;
    F& f;
    Rows(int64_t count, F& each) : rows(count), f(each) {}
    int64_t stages() const override { return 1; }
    int64_t units(int64_t) const override { return rows; }
    int64_t step(int64_t) const override { return 1; }
    void work(int64_t, const Claim& claim) override {
      for (int64_t i = claim.begin; i < claim.end; i++) f(i);
    }
  } job(rows, f);
  if (rows) team().run(std::clamp<int64_t>(rows * n / DRAWS, 1, threads), job);
}

// The k best tokens of n logits and their log-softmax, by a sequence's rules where they are given and can be applied.
void top_by(const Model& m, const float* logits, int64_t n, const Rules* rules, int64_t position, bool noisy, int64_t k,
            int64_t* tokens, float* log_q) {
  const bool draws = rules && rules->temperature > 0;
  const float* y = draws ? scored(logits, n, *rules, position, noisy, m.of_output) : nullptr;
  top(y ? y : logits, n, k, tokens, log_q);
  name_tokens(m, tokens, k);
}

// Logits of several rows and the k best tokens of each with their log-softmax, in one job: a thread that has made a
// group of a row's logits notes the largest of them, so that few groups are looked through for the best.
struct Ranked {
  const float* more;  // [n] added to the product; null: nothing
  const Rules* rules;
  int64_t position;
};

template <class A> struct Ranking final : Job {
  static constexpr int64_t GROUP = BLOCKS * LANES;

  const Model& m;
  const Linear& l;
  const A* x;
  const int64_t stride, limit, k;  // limit: tokens at and above it are not chosen
  const bool noisy;
  const std::vector<Ranked>& rows;
  int64_t* const tokens;  // [rows, k]
  float* const log_q;     // [rows, k]
  const int64_t groups;   // of a row
  float *logits, *most;   // [rows, n], [rows, groups]

  Ranking(const Model& model, const Linear& head, const A* in, int64_t step, int64_t end, int64_t best, bool noise,
          const std::vector<Ranked>& of, int64_t* to, float* chances)
      : m(model),
        l(head),
        x(in),
        stride(step),
        limit(end),
        k(best),
        noisy(noise),
        rows(of),
        tokens(to),
        log_q(chances),
        groups((l.n + GROUP - 1) / GROUP) {
    static thread_local std::vector<float> largest;
    grow(t_logits, (int64_t)rows.size() * l.n), grow(largest, (int64_t)rows.size() * groups);
    logits = t_logits.data(), most = largest.data();
  }
  void run(int64_t threads) {
    if (!rows.empty())
      team().run(std::clamp<int64_t>(l.n * l.k * std::max<int64_t>(1, rows.size() / 4) / WORTH, 1, threads), *this);
  }

  int64_t stages() const override { return 2; }
  int64_t units(int64_t stage) const override { return stage ? rows.size() : up(l.n, LANES) / LANES; }
  int64_t step(int64_t stage) const override { return stage ? 1 : BLOCKS; }
  void work(int64_t stage, const Claim& claim) override {
    if (stage) {
      for (int64_t r = claim.begin; r < claim.end; r++) rank(r);
      return;
    }
    const int64_t count = rows.size();
    if (claim.fresh) set_tiles(count);
    sweep(l, claim, input_of(l, x, stride, count, claim.fresh), count, {},
          [&](int64_t r0, int n, int64_t first, int64_t outputs, float* c) {
            for (int r = 0; r < n; r++) {
              float* y = logits + (r0 + r) * l.n + first;
              const float* more = rows[r0 + r].more;
              std::memcpy(y, c + r * GROUP, outputs * sizeof(float));
              finish(l, first, outputs, y);
              for (int64_t i = 0; more && i < outputs; i++) y[i] += more[first + i];
              most[(r0 + r) * groups + first / GROUP] = largest_of(y, std::min(limit - first, outputs));
            }
          });
  }

  // Of a group's first logits; nothing is larger than that of none.
  static float largest_of(const float* y, int64_t n) {
    v16 top = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) top = greater(load(y + i), top);
    float found = max16(top);
    for (; i < n; i++) found = std::max(found, y[i]);
    return found;
  }

  void rank(int64_t r) {
    outputs_of(r);
    name_tokens(m, tokens + r * k, k);
  }

  void outputs_of(int64_t r) {
    const Ranked& row = rows[r];
    const float *y = logits + r * l.n, *of_group = most + r * groups;
    if (row.rules && row.rules->temperature > 0)
      if (const float* drawn = scored(y, limit, *row.rules, row.position, noisy, m.of_output))
        return top(drawn, limit, k, tokens + r * k, log_q + r * k);
    Ranks best{k, tokens + r * k, log_q + r * k};
    for (int64_t first = 0; first < limit; first += GROUP)
      if (best.open() || of_group[first / GROUP] > best.least)
        for (int64_t i = first; i < std::min(first + GROUP, limit); i++) best.offer(i, y[i]);
    log_softmax(y, limit, best);
  }
};

// The same of rows [rows, l.k] of activations, which are normed where a weight is given.
void rank(const Model& m, const Linear& l, const float* norm, const void* x, int64_t limit, int64_t k, bool noisy,
          const std::vector<Ranked>& rows, int64_t* tokens, float* log_q, int64_t threads) {
  const int64_t stride = up(l.k, K_STEP), count = rows.size();
  if (m.wide_activations)
    Ranking<float>(m, l, prepared((const float*)x, count, l.k, norm, m.eps), stride, limit, k, noisy, rows, tokens, log_q)
        .run(threads);
  else
    Ranking<bf16>(m, l, prepared((const bf16*)x, count, l.k, norm, m.eps), stride, limit, k, noisy, rows, tokens, log_q)
        .run(threads);
}

}  // namespace
