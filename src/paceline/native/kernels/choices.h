// Choices from many rows of logits, a job each.

#pragma once

namespace {

// The same for several rows, a row a unit.
struct Guess final : Job {
  struct Row { const Rules* rules; int64_t position; int64_t* token; float* log_q; };
  const float* logits;
  int64_t n, limit;  // of a row; that may be chosen
  std::vector<Row> rows;
  int64_t stages() const override { return 1; }
  int64_t units(int64_t) const override { return rows.size(); }
  int64_t step(int64_t) const override { return 1; }
  void work(int64_t, const Claim& claim) override {
    for (int64_t i = claim.begin; i < claim.end; i++)
      guess(logits + i * n, limit, rows[i].rules, rows[i].position, rows[i].token, rows[i].log_q);
  }
  void run(int64_t threads) { team().run(std::clamp<int64_t>(rows.size() * n / DRAWS, 1, threads), *this); }
};

// Logits of several rows and the k best tokens of each with their log-softmax, in one job: a thread that has made a
// group of a row's logits notes the largest of them, so that few groups are looked through for the best.
struct Ranked {
  const float* more;  // [n] added to the product; null: nothing
  const Rules* rules;
  int64_t position;
};

template <class A> struct Ranking final : Job {
  static constexpr int64_t GROUP = BLOCKS * LANES;

  const Linear& l;
  const A* x;
  const int64_t stride, limit, k;  // limit: tokens at and above it are not chosen
  const bool noisy;
  const std::vector<Ranked>& rows;
  int64_t* const tokens;  // [rows, k]
  float* const log_q;     // [rows, k]
  const int64_t groups;   // of a row
  float *logits, *most;   // [rows, n], [rows, groups]

  Ranking(const Linear& head, const A* in, int64_t step, int64_t end, int64_t best, bool noise,
          const std::vector<Ranked>& of, int64_t* to, float* chances)
      : l(head),
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
          [&](int64_t r0, int n, int64_t first, int64_t outputs, const float* c) {
            for (int r = 0; r < n; r++) {
              float* y = logits + (r0 + r) * l.n + first;
              const float* more = rows[r0 + r].more;
              for (int64_t i = 0; i < outputs; i++)
                y[i] = finished(l, first + i, c[r * GROUP + i]) + (more ? more[first + i] : 0.0f);
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
    const Ranked& row = rows[r];
    const float *y = logits + r * l.n, *of_group = most + r * groups;
    if (row.rules && row.rules->temperature > 0)
      if (const float* drawn = scored(y, limit, *row.rules, row.position, noisy))
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
    Ranking<float>(l, prepared((const float*)x, count, l.k, norm, m.eps), stride, limit, k, noisy, rows, tokens, log_q)
        .run(threads);
  else
    Ranking<bf16>(l, prepared((const bf16*)x, count, l.k, norm, m.eps), stride, limit, k, noisy, rows, tokens, log_q)
        .run(threads);
}

// The k best tokens of rows of logits, a row a unit, by the rules of their sequences. Row i is of sequence i %
// sequences, and its token will have position i / sequences behind that sequence's first.
struct Pick final : Job {
  const float* logits;
  int64_t rows, n, k, sequences;
  const Rules* rules;        // [sequences] or null: by the logits
  const int64_t* positions;  // [sequences]
  bool noisy;
  int64_t* tokens;           // [rows, k]
  float* log_q;              // [rows, k]
  int64_t stages() const override { return 1; }
  int64_t units(int64_t) const override { return rows; }
  int64_t step(int64_t) const override { return 1; }
  void work(int64_t, const Claim& claim) override {
    for (int64_t i = claim.begin; i < claim.end; i++) {
      const int64_t s = i % sequences;
      const float* x = logits + i * n;
      const float* y =
          rules && rules[s].temperature > 0 ? scored(x, n, rules[s], positions[s] + i / sequences, noisy) : nullptr;
      top(y ? y : x, n, k, tokens + i * k, log_q + i * k);
    }
  }
};

// The k best of rows of logits, a row a unit, as `Ranking` chooses them.
struct Children final : Job {
  const std::vector<Ranked>& rows;  // more: the logits
  const int64_t limit, k;
  const bool noisy;
  int64_t* const tokens;  // [rows, k]
  float* const log_q;
  Children(int64_t end, int64_t best, bool noise, const std::vector<Ranked>& of, int64_t* to, float* chances)
      : rows(of), limit(end), k(best), noisy(noise), tokens(to), log_q(chances) {}
  int64_t stages() const override { return 1; }
  int64_t units(int64_t) const override { return rows.size(); }
  int64_t step(int64_t) const override { return 1; }
  void work(int64_t, const Claim& claim) override {
    for (int64_t i = claim.begin; i < claim.end; i++) {
      const Ranked& row = rows[i];
      const float* y =
          row.rules && row.rules->temperature > 0 ? scored(row.more, limit, *row.rules, row.position, noisy) : nullptr;
      top(y ? y : row.more, limit, k, tokens + i * k, log_q + i * k);
    }
  }
};

// Draws from rows of logits, a row a unit.
struct Draw final : Job {
  const float* logits;
  int64_t rows, n;
  const Rules* rules;         // by sequence
  const int64_t* sequence;    // [rows]
  const int64_t* positions;   // [rows] that the drawn tokens will have
  int64_t* chosen;
  Draw(const float* x, int64_t count, int64_t vocab, const Rules* r, const int64_t* s, const int64_t* p, int64_t* out)
      : logits(x), rows(count), n(vocab), rules(r), sequence(s), positions(p), chosen(out) {}
  int64_t stages() const override { return 1; }
  int64_t units(int64_t) const override { return rows; }
  int64_t step(int64_t) const override { return 1; }
  void work(int64_t, const Claim& claim) override {
    for (int64_t i = claim.begin; i < claim.end; i++)
      chosen[i] = drawn(logits + i * n, n, rules[sequence[i]], positions[i]);
  }
};

}  // namespace
