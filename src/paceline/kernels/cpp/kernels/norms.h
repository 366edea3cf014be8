// RMS norm, rotary positions, activations.

#pragma once

namespace {

// RMS norm (Zhang and Sennrich 2019) of one row, in float32, rounded once; what lies beyond d is zeroed. Without a
// weight there is no norm, and the row is copied.
template <class A> void rms(const A* x, const float* weight, int64_t d, float eps, A* y, int64_t padded) {
  if (!weight) {
    std::memcpy((void*)y, x, d * sizeof(A));
    for (int64_t i = d; i < padded; i++) put(y + i, 0.0f);
    return;
  }
  v16 squares = {};
  int64_t i = 0;
  for (; i + 16 <= d; i += 16) { const v16 v = load_wide(x + i); squares = fma16(v, v, squares); }
  float total = sum16(squares);
  for (; i < d; i++) total += wide(x[i]) * wide(x[i]);
  const float scale = 1.0f / std::sqrt(total / (float)d + eps);
  for (i = 0; i + 16 <= d; i += 16) put16(y + i, load_wide(x + i) * splat(scale) * load(weight + i));
  for (; i < d; i++) put(y + i, wide(x[i]) * scale * weight[i]);
  for (; i < padded; i++) put(y + i, 0.0f);
}

// out = residual + y, rounded once.
template <class A> void add_row(const float* y, const A* residual, int64_t n, A* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) put16(out + i, load_wide(residual + i) + load(y + i));
  for (; i < n; i++) put(out + i, wide(residual[i]) + y[i]);
}

// out = residual + the RMS norm of y, or y itself where no weight is given, rounded once.
template <class A>
void add_normed(const float* y, const float* weight, int64_t d, float eps, const A* residual, A* out) {
  if (!weight) return add_row(y, residual, d, out);
  v16 squares = {};
  int64_t i = 0;
  for (; i + 16 <= d; i += 16) { const v16 v = load(y + i); squares = fma16(v, v, squares); }
  float total = sum16(squares);
  for (; i < d; i++) total += y[i] * y[i];
  const float scale = 1.0f / std::sqrt(total / (float)d + eps);
  for (i = 0; i + 16 <= d; i += 16)
    put16(out + i, load_wide(residual + i) + load(y + i) * splat(scale) * load(weight + i));
  for (; i < d; i++) put(out + i, wide(residual[i]) + y[i] * scale * weight[i]);
}

// In place on one head of float32.
inline void head_norm(float* x, const float* weight, int64_t d, float eps) {
  v16 squares = {};
  int64_t i = 0;
  for (; i + 16 <= d; i += 16) { const v16 v = load(x + i); squares = fma16(v, v, squares); }
  float total = sum16(squares);
  for (; i < d; i++) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / (float)d + eps);
  for (i = 0; i < d; i++) x[i] = x[i] * scale * weight[i];
}

// SiLU is x / (1 + e^-x). GELU with its tanh is x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline v16 activated(v16 x, int64_t activation) {
  const v16 at = activation == SILU ? x : splat(1.5957691216057308f) * fma16(splat(0.044715f) * x * x, x, x);
  return x / (splat(1.0f) + exp16(splat(0.0f) - at));
}

// Rotary embedding (Su et al. 2021) of the first `rotated` dimensions, pairs (i, i + rotated / 2).
inline void rotate(float* x, const float* cos, const float* sin, int64_t rotated) {
  const int64_t half = rotated / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

}  // namespace

extern "C" {

// The final norm of hidden [rows, d_model]. Returns a `Refusal`.
int pl_norm(const Model* m, const void* hidden, int64_t rows, void* out) {
  if (rows < 0) return BAD_COUNT;
  const int64_t d = m->d_model;
  for (int64_t r = 0; r < rows; r++)
    if (m->wide_activations) rms((const float*)hidden + r * d, m->norm, d, m->eps, (float*)out + r * d, d);
    else rms((const bf16*)hidden + r * d, m->norm, d, m->eps, (bf16*)out + r * d, d);
  return DONE;
}

}  // extern "C"
