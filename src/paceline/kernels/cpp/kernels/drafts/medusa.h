// Medusa's heads.

#pragma once

namespace {

// x + SiLU(z), as `Heads` says, of d numbers; what lies beyond is zeroed.
template <class A> void residual_silu(const A* x, const float* z, int64_t d, A* y, int64_t padded) {
  for (int64_t i = 0; i < d; i += LANES) {
    alignas(64) float in[LANES] = {}, out[LANES];
    const int64_t n = std::min<int64_t>(LANES, d - i);
    std::copy(z + i, z + i + n, in);
    const v16 v = load(in);
    save(out, v / (splat(1.0f) + exp16(splat(0.0f) - v)));
    for (int64_t j = 0; j < n; j++) put(y + i + j, wide(x[i + j]) + out[j]);
  }
  for (int64_t i = d; i < padded; i++) put(y + i, 0.0f);
}

// Logits [heads, rows, vocab] of all heads, from raw states [rows, d_model], in `t_logits`.
template <class A> void run_heads(const Model& m, const Heads& h, const A* states, int64_t rows, int threads) {
  static thread_local std::vector<float> inner;
  const int64_t d = m.d_model, stride = up(d, K_STEP), all = h.count * rows, first = up(rows, ROWS),
                second = up(all, ROWS) + ROWS;
  grow(inner, rows * h.count * d), grow(t_logits, all * m.vocab);
  Buffers& b = t_buffers;
  b.open(Buffers::room<A>(first * stride) + Buffers::room<A>(second * stride));
  A *normed = b.take<A>(first * stride), *guess = b.take<A>(second * stride);
  for (int64_t r = 0; r < rows; r++) rms(states + r * d, m.norm, d, m.eps, normed + r * stride, stride);
  linear(h.blocks, (const A*)normed, stride, rows, inner.data(), threads);
  for (int64_t j = 0; j < h.count; j++)
    for (int64_t r = 0; r < rows; r++)
      residual_silu(normed + r * stride, inner.data() + (r * h.count + j) * d, d, guess + (j * rows + r) * stride,
                    stride);
  if (!h.own) return linear(m.head, (const A*)guess, stride, all, t_logits.data(), threads);
  for (int64_t j = 0; j < h.count; j++)
    linear(h.own[j], (const A*)(guess + j * rows * stride), stride, rows, t_logits.data() + j * rows * m.vocab,
           threads);
}

}  // namespace

extern "C" {

// Of each of Medusa's heads the k best tokens behind each of the states [rows, d_model], which are raw: by `rules`,
// which has an entry a row, with the noise of the target's own choices where `noisy`; else by the logits alone.
// positions [rows]: of the first head's tokens. tokens and log_q: [heads, rows, k]. Returns a `Refusal`.
int pl_heads(const Model* m, const Heads* h, const void* states, int64_t rows, int64_t k, const Rules* rules,
             const int64_t* positions, int noisy, int64_t* tokens, float* log_q, int threads) {
  if (rows < 1 || threads < 1 || h->count < 1 || k < 1 || k > m->vocab) return BAD_COUNT;
  if (h->blocks.n != h->count * m->d_model || h->blocks.k != m->d_model) return BAD_COUNT;
  if (m->wide_activations) run_heads(*m, *h, (const float*)states, rows, threads);
  else run_heads(*m, *h, (const bf16*)states, rows, threads);
  const int64_t n = m->vocab;
  const float* logits = t_logits.data();  // this thread's
  for_rows(h->count * rows, n, threads, [&](int64_t i) {  // head by head
    const int64_t s = i % rows;
    top_by(*m, logits + i * n, n, rules ? rules + s : nullptr, positions[s] + i / rows, noisy != 0, k,
           tokens + i * k, log_q + i * k);
  });
  return DONE;
}

}  // extern "C"
