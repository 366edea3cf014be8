// Rows that are made of a state and a token.

#pragma once

namespace {

// y [rows, n] of x [rows, k], as `pl_linear` has them.
void times(const Linear& l, const float* x, int64_t rows, float* y, int threads) {
  linear(l, x, l.k, rows, y, threads);
}
void times(const Linear& l, const bf16* x, int64_t rows, float* y, int threads) {
  linear(l, prepared(x, rows, l.k, nullptr, 0), up(l.k, K_STEP), rows, y, threads);
}

// What goes into a state drafter's layer: states [rows, d_model] and the embeddings of `tokens`, or no tokens where
// that is null.
template <class A> void fuse_rows(const Model& m, const Fuse& f, const A* states, const int64_t* tokens,
                                  const Linear& words, int64_t rows, A* out, int threads) {
  static thread_local std::vector<A> both, embedded;
  static thread_local std::vector<float> made;
  const int64_t d = m.d_model;
  grow(made, rows * d);
  if (!tokens) {
    const A* constant = (const A*)f.constant;
    times(f.state, states, rows, made.data(), threads);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < d; i++) {
        A rounded;
        put(&rounded, made[r * d + i]);
        put(out + r * d + i, wide(rounded) + wide(constant[i]));
      }
    return;
  }
  const int64_t k = f.both.k;
  grow(both, rows * k), grow(embedded, d);
  for (int64_t r = 0; r < rows; r++) {
    embed(m, words, tokens[r], embedded.data());
    const A *token = embedded.data(), *state = states + r * d;
    A* x = both.data() + r * k;
    std::copy(token, token + d, x), std::copy(state, state + d, x + d);
  }
  times(f.both, both.data(), rows, made.data(), threads);
  for (int64_t i = 0; i < rows * d; i++) put(out + i, made[i]);
}

void fuse(const Model& m, const Fuse& f, const void* states, const int64_t* tokens, const Linear& words, int64_t rows,
          void* out, int threads) {
  if (m.wide_activations) fuse_rows(m, f, (const float*)states, tokens, words, rows, (float*)out, threads);
  else fuse_rows(m, f, (const bf16*)states, tokens, words, rows, (bf16*)out, threads);
}

// One of the target's states, normed.
void take_state(const Model& m, const Fuse& f, const void* raw, void* out) {
  if (m.wide_activations) rms((const float*)raw, f.norm, m.d_model, (float)f.eps, (float*)out, m.d_model);
  else rms((const bf16*)raw, f.norm, m.d_model, (float)f.eps, (bf16*)out, m.d_model);
}

Refusal check_fuse(const Model& m, const Fuse& f) {
  const int64_t d = m.d_model;
  const bool fits = f.both.n == d && f.both.k == 2 * d &&
                    (f.state.n == 0 || (f.state.n == d && f.state.k == d && f.constant));
  return fits ? DONE : BAD_COUNT;
}

}  // namespace
