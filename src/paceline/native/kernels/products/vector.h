// Products on vectors.

#pragma once

namespace {

// Vector products: R rows against B weight blocks, every sum in a register of its own; turn `turn` of `turns` of such
// rows.
template <int R, int B>
void dot_product(const bf16* const w[], int64_t k, Input<bf16> in, float* c, const Next& next, int turn, int turns) {
  v16 sum[R][B] = {};
  for (int64_t i = 0; i < k; i += 2) {
    next.ask(i / 2, turn, turns);
#if PL_DOT_BF16
    __m512bh line[B];
    for (int b = 0; b < B; b++) line[b] = (__m512bh)_mm512_loadu_si512(w[b] + i * 16);
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, in.x + r * in.stride + i, 4);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      for (int b = 0; b < B; b++) sum[r][b] = _mm512_dpbf16_ps(sum[r][b], line[b], x);
    }
#else
    v16 low[B], high[B];
    for (int b = 0; b < B; b++) load_pairs(w[b] + i * 16, low[b], high[b]);
    for (int r = 0; r < R; r++) {
      const bf16* x = in.x + r * in.stride + i;
      const v16 x0 = splat(wide(x[0])), x1 = splat(wide(x[1]));
      for (int b = 0; b < B; b++) sum[r][b] = fma16(high[b], x1, fma16(low[b], x0, sum[r][b]));
    }
#endif
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) save(c + r * BLOCKS * LANES + b * LANES, sum[r][b]);
}

inline v16 weights16(const float* w) { return load(w); }
inline v16 weights16(const int8_t* w) {
#if PL_AVX512
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)w)));
#else
  v16 v;
  for (int i = 0; i < PIECES; i++) {
#if defined(__AVX2__)
    v.p[i] = (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(w + i * PIECE))));
#else
    typedef int8_t bytes __attribute__((vector_size(PIECE)));
    bytes b;
    std::memcpy(&b, w + i * PIECE, sizeof b);
    v.p[i] = __builtin_convertvector(__builtin_convertvector(b, ints), floats);
#endif
  }
  return v;
#endif
}

template <int R, int B, class W, class A>
void fma_product(const W* const w[], int64_t k, Input<A> in, float* c, const Next& next, int turn, int turns) {
  constexpr int64_t per_line = 4 / sizeof(W);
  v16 sum[R][B] = {};
  for (int64_t i = 0; i < k; i++) {
    if (i % per_line == 0) next.ask(i / per_line, turn, turns);
    v16 line[B];
    for (int b = 0; b < B; b++) line[b] = weights16(w[b] + i * 16);
    for (int r = 0; r < R; r++) {
      const v16 x = splat(wide(in.x[r * in.stride + i]));
      for (int b = 0; b < B; b++) sum[r][b] = fma16(line[b], x, sum[r][b]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) save(c + r * BLOCKS * LANES + b * LANES, sum[r][b]);
}

template <int R, int B>
void product_rb(const bf16* const w[], int64_t k, Input<bf16> in, float* c, const Next& next, int turn, int turns) {
  dot_product<R, B>(w, k, in, c, next, turn, turns);
}
template <int R, int B, class A>
void product_rb(const float* const w[], int64_t k, Input<A> in, float* c, const Next& next, int turn, int turns) {
  fma_product<R, B>(w, k, in, c, next, turn, turns);
}
template <int R, int B, class A>
void product_rb(const int8_t* const w[], int64_t k, Input<A> in, float* c, const Next& next, int turn, int turns) {
  fma_product<R, B>(w, k, in, c, next, turn, turns);
}

template <int B, class W, class A>
void vector_product(const W* const w[], int64_t k, Input<A> in, int rows, float* c, const Next& next) {
  const int turns = (rows + 3) / 4;
  for (int turn = 0; rows > 0; turn++) {
    const int r = (rows + turns - turn - 1) / (turns - turn);  // at most 4; 3 and 2 cost less than 4 and 1
    if (r == 1) product_rb<1, B>(w, k, in, c, next, turn, turns);
    else if (r == 2) product_rb<2, B>(w, k, in, c, next, turn, turns);
    else if (r == 3) product_rb<3, B>(w, k, in, c, next, turn, turns);
    else product_rb<4, B>(w, k, in, c, next, turn, turns);
    rows -= r;
    in.x += r * in.stride;
    c += r * BLOCKS * LANES;
  }
}

#if PL_DOT_BF16
// More than four rows: up to eight in a turn, against two blocks, so that fewer turns read the weights again and find
// them in the first-level cache.
template <int B>
void wide_product(const bf16* const w[], int64_t k, Input<bf16> in, int rows, float* c, const Next& next, int first,
                  int calls) {
  const int turns = (rows + 7) / 8;
  for (int turn = 0; turn < turns; turn++) {
    const int r = (rows + turns - turn - 1) / (turns - turn), call = first + turn;
    if (r == 4) product_rb<4, B>(w, k, in, c, next, call, calls);
    else if (r == 5) product_rb<5, B>(w, k, in, c, next, call, calls);
    else if (r == 6) product_rb<6, B>(w, k, in, c, next, call, calls);
    else if (r == 7) product_rb<7, B>(w, k, in, c, next, call, calls);
    else product_rb<8, B>(w, k, in, c, next, call, calls);
    rows -= r;
    in.x += r * in.stride;
    c += r * BLOCKS * LANES;
  }
}
#endif

template <class W, class A>
void product_w(const W* const w[], int blocks, int64_t k, Input<A> in, int rows, float* c, const Next& next) {
#if !PL_AVX512
  // Two or more rows of four blocks are more sums than there are registers.
  if (rows > 1) {
    for (int b = 0; b < blocks; b++) vector_product<1>(w + b, k, in, rows, c + b * LANES, {});
    return;
  }
#endif
#if PL_DOT_BF16
  if constexpr (std::is_same_v<W, bf16>)
    if (g_runs_ahead && rows > 4) {
      const int turns = (rows + 7) / 8, calls = (blocks + 1) / 2 * turns;
      for (int b = 0; b < blocks; b += 2) {
        if (blocks - b == 1) wide_product<1>(w + b, k, in, rows, c + b * LANES, next, b / 2 * turns, calls);
        else wide_product<2>(w + b, k, in, rows, c + b * LANES, next, b / 2 * turns, calls);
      }
      return;
    }
#endif
  if (blocks == 1) vector_product<1>(w, k, in, rows, c, next);
  else if (blocks == 2) vector_product<2>(w, k, in, rows, c, next);
  else if (blocks == 3) vector_product<3>(w, k, in, rows, c, next);
  else vector_product<4>(w, k, in, rows, c, next);
}

}  // namespace
