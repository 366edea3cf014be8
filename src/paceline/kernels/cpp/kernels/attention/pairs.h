#pragma once

namespace {

#if PL_DOT_BF16
// Attention on dot products of bf16 pairs, and what it shares with attention on tiles. The weights of keys are rounded
// to bf16 and summed two keys at a time: pairs are counted from a row's first key, whoever else is there. Keys and
// values that several rows see are turned into the order of the products once for all of them.

const bf16 g_zeros[MOST_DIMS] = {};

// 32 sums over interleaved values (unpacklo, unpackhi) in the order of their dimensions, times scale.
inline void ordered(const float* sum, float scale, bf16* out) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 a = _mm512_loadu_ps(sum), b = _mm512_loadu_ps(sum + 16), by = _mm512_set1_ps(scale);
  const __m512 first = _mm512_mul_ps(_mm512_permutex2var_ps(a, low, b), by);
  const __m512 second = _mm512_mul_ps(_mm512_permutex2var_ps(a, high, b), by);
  _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// 16 x 16 of 32 bits: lane j of out[i] is lane i of in[j].
inline void transpose16(const __m512i in[16], __m512i out[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2)
    a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]), a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
    }
  for (int i = 0; i < 4; i++) {  // b[4 g + i]: lanes i, 4 + i, 8 + i, 12 + i of keys 4 g .. 4 g + 3
    const __m512i p = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), q = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    const __m512i r = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88),
                  t = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    out[i] = _mm512_shuffle_i32x4(p, r, 0x88), out[8 + i] = _mm512_shuffle_i32x4(p, r, 0xdd);
    out[4 + i] = _mm512_shuffle_i32x4(q, t, 0x88), out[12 + i] = _mm512_shuffle_i32x4(q, t, 0xdd);
  }
}

inline __m512 dot_pairs(__m512 sum, const void* line, const bf16* pair) {
  int32_t two;
  std::memcpy(&two, pair, 4);
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_load_si512(line), (__m512bh)_mm512_set1_epi32(two));
}

// q . k of sixteen keys for R rows: the sums of `scores16`, in its order, from keys [d / 2][16][2].
template <int R> void turned_scores(const bf16* const q[], const bf16* turned, int64_t d, float scale,
                                    float* const score[], int64_t n) {
  __m512 parts[R][4];
#pragma GCC unroll 4
  for (int lane = 0; lane < 4; lane++) {
    __m512 sum[R][4];
    for (int r = 0; r < R; r++)
      for (int e = 0; e < 4; e++) sum[r][e] = _mm512_setzero_ps();
    for (int64_t i = lane * 8; i < d; i += 32)
#pragma GCC unroll 4
      for (int e = 0; e < 4; e++)
        for (int r = 0; r < R; r++)
          sum[r][e] = dot_pairs(sum[r][e], turned + (i + 2 * e) * LANES, q[r] + i + 2 * e);
    for (int r = 0; r < R; r++)
      parts[r][lane] = _mm512_add_ps(_mm512_add_ps(sum[r][0], sum[r][2]), _mm512_add_ps(sum[r][1], sum[r][3]));
  }
  const __mmask16 mask = n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1);
  for (int r = 0; r < R; r++) {
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(parts[r][0], parts[r][1]), _mm512_add_ps(parts[r][2], parts[r][3]));
    _mm512_mask_storeu_ps(score[r], mask, _mm512_mul_ps(sum, _mm512_set1_ps(scale)));
  }
}

template <class K> void turn_keys(K key, int64_t n, int64_t d, bf16* turned) {
  for (int64_t i = 0; i < d; i += 32) {
    __m512i in[16], out[16];
    for (int j = 0; j < 16; j++) in[j] = _mm512_loadu_si512(key(std::min<int64_t>(j, n - 1)) + i);
    transpose16(in, out);
    for (int j = 0; j < 16; j++) _mm512_store_si512(turned + (i + 2 * j) * LANES, out[j]);
  }
}

// sum[r] [D * 16] += weights of pairs x values of pairs [pairs][dims][2 keys], for R rows and 16 * D of the dimensions.
template <int R, int D> void add_pairs(const bf16* const weight[], int64_t pairs, const bf16* values, int64_t step,
                                       float* const sum[], int64_t at) {
  __m512 s[R][D];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < D; i++) s[r][i] = _mm512_loadu_ps(sum[r] + at + i * 16);
  for (int64_t p = 0; p < pairs; p++, values += step) {
    __m512bh v[D];
    for (int i = 0; i < D; i++) v[i] = (__m512bh)_mm512_load_si512(values + at * 2 + i * 32);
    for (int r = 0; r < R; r++) {
      int32_t two;
      std::memcpy(&two, weight[r] + 2 * p, 4);
      for (int i = 0; i < D; i++) s[r][i] = _mm512_dpbf16_ps(s[r][i], v[i], (__m512bh)_mm512_set1_epi32(two));
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < D; i++) _mm512_storeu_ps(sum[r] + at + i * 16, s[r][i]);
}

template <int R>
void add_pairs_dims(const bf16* const weight[], int64_t pairs, const bf16* values, int64_t d, float* const sum[]) {
  int64_t at = 0;
  for (; at + 64 <= d; at += 64) add_pairs<R, 4>(weight, pairs, values, 2 * d, sum, at);
  for (; at < d; at += 32) add_pairs<R, 2>(weight, pairs, values, 2 * d, sum, at);
}

template <class V> void interleave_values(V value, int64_t n, int64_t d, bf16* out) {  // [pairs][d / 32][2][32]
  for (int64_t j = 0; j < n; j += 2, out += 2 * d) {
    const bf16 *even = value(j), *odd = j + 1 < n ? value(j + 1) : g_zeros;
    for (int64_t i = 0; i < d; i += 32) {
      const __m512i a = _mm512_loadu_si512(even + i), b = _mm512_loadu_si512(odd + i);
      _mm512_store_si512(out + 2 * i, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(out + 2 * i + 32, _mm512_unpackhi_epi16(a, b));
    }
  }
}

// sum[r] += weights [keys] values over n keys, an even number of keys behind each row's first.
template <class V>
void pair_values(const bf16* const weight[], int count, int64_t n, int64_t d, V value, float* const sum[]) {
  alignas(64) bf16 pairs[TILE_KEYS * MOST_DIMS];
  for (int64_t j = 0; j < n; j += TILE_KEYS) {
    const int64_t keys = std::min<int64_t>(TILE_KEYS, n - j), half = (keys + 1) / 2;
    interleave_values([&](int64_t x) { return value(j + x); }, keys, d, pairs);
    const bf16* w[TILE_ROWS];
    for (int r = 0; r < count; r++) w[r] = weight[r] + j;
    int r = 0;
    for (; r + 4 <= count; r += 4) add_pairs_dims<4>(w + r, half, pairs, d, sum + r);
    if (count - r == 3) add_pairs_dims<3>(w + r, half, pairs, d, sum + r);
    else if (count - r == 2) add_pairs_dims<2>(w + r, half, pairs, d, sum + r);
    else if (count - r == 1) add_pairs_dims<1>(w + r, half, pairs, d, sum + r);
  }
}

// `soften`, into bf16: zeros behind the last weight up to a multiple of TILE_KEYS.
inline float soften(float* s, int64_t n, bf16* w) {
  const int64_t end = up(n, TILE_KEYS);
  for (int64_t j = n; j < end; j++) s[j] = -INFINITY;
  __m512 most = _mm512_set1_ps(-INFINITY);
  for (int64_t j = 0; j < end; j += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(s + j));
  const v16 top = splat(_mm512_reduce_max_ps(most));
  v16 first = {}, second = {};
  int64_t j = 0;
  for (; j + 32 <= n; j += 32) {
    const v16 a = exp16(load(s + j) - top), b = exp16(load(s + j + 16) - top);
    first = first + a, second = second + b;
    _mm512_storeu_si512(w + j, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  if (j < n) {  // what lies behind the last key has no weight, though the smallest exp is not 0
    const uint32_t there = n - j >= 32 ? ~0u : (1u << (n - j)) - 1;
    const v16 a = _mm512_maskz_mov_ps((__mmask16)there, exp16(load(s + j) - top));
    const v16 b = _mm512_maskz_mov_ps((__mmask16)(there >> 16), exp16(load(s + j + 16) - top));
    first = first + a, second = second + b;
    _mm512_storeu_si512(w + j, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  return sum16(first + second);
}

// Attention of up to TILE_ROWS vectors. head_dim is a multiple of 32, at most MOST_DIMS.
void attend_pairs(const Model& m, const Segment& s, int64_t window, const int64_t* positions, const Queries<bf16>& q,
                  const bf16* keys, const bf16* values) {
  Scratch& t = t_scratch;
  const int count = q.count();
  const int64_t d = m.head_dim, room = up(s.num_keys, TILE_KEYS);
  grow(t.scores, count * room);
  grow(t.weights, count * room);
  grow(t.out, count * d);
  const View view = look(s, window, positions, q.r0, q.rows, q.heads, t.tail);
  auto slot = [&](int64_t j) { return s.base >= 0 ? s.base + j : s.keys[j]; };
  auto own = [&](int i, int64_t j) { return slot(j < view.common ? j : t.tail[view.tail_begin[i] + j - view.common]); };
  float* score[TILE_ROWS];
  for (int i = 0; i < count; i++) score[i] = t.scores.data() + i * room;

  alignas(64) bf16 turned[16 * MOST_DIMS];
  const bf16* near[16];
  alignas(64) float found[16];
  auto alone = [&](int i, int64_t j, int64_t n) {  // scores of the n keys at `near` to row i, for its keys j ..
    save(found, scores16(q.query[i], near, d) * splat(m.scale));
    std::memcpy(score[i] + j, found, n * sizeof(float));
  };
  for (int64_t j = 0; j < view.common; j += 16) {
    const int64_t n = std::min<int64_t>(16, view.common - j);
    fetch_turn(s, j, view.common, keys, values, d);
    if (count < 3) {
      for (int64_t x = 0; x < 16; x++) near[x] = keys + slot(j + std::min(x, n - 1)) * d;
      for (int i = 0; i < count; i++) alone(i, j, n);
      continue;
    }
    turn_keys([&](int64_t x) { return keys + slot(j + x) * d; }, n, d, turned);
    float* to[TILE_ROWS];
    for (int i = 0; i < count; i++) to[i] = score[i] + j;
    int i = 0;
    for (; i + 4 <= count; i += 4) turned_scores<4>(q.query + i, turned, d, m.scale, to + i, n);
    if (count - i == 3) turned_scores<3>(q.query + i, turned, d, m.scale, to + i, n);
    else if (count - i == 2) turned_scores<2>(q.query + i, turned, d, m.scale, to + i, n);
    else if (count - i == 1) turned_scores<1>(q.query + i, turned, d, m.scale, to + i, n);
  }
  float total[TILE_ROWS];
  const bf16* weight[TILE_ROWS];
  float* sum[TILE_ROWS];
  for (int i = 0; i < count; i++) {
    const int64_t seen = view.common + view.tail_end[i] - view.tail_begin[i];
    for (int64_t j = view.common; j < seen; j += 16) {
      const int64_t n = std::min<int64_t>(16, seen - j);
      for (int64_t x = 0; x < 16; x++) near[x] = keys + own(i, j + std::min(x, n - 1)) * d;
      alone(i, j, n);
    }
    bf16* w = t.weights.data() + i * room;
    total[i] = soften(score[i], seen, w);
    weight[i] = w, sum[i] = t.out.data() + i * d;
    std::memset(sum[i], 0, d * sizeof(float));
  }
  const int64_t shared = view.common / 2 * 2;
  pair_values(weight, count, shared, d, [&](int64_t j) { return values + slot(j) * d; }, sum);
  for (int i = 0; i < count; i++) {
    const int64_t rest = view.common - shared + view.tail_end[i] - view.tail_begin[i];
    const bf16* w = weight[i] + shared;
    pair_values(&w, 1, rest, d, [&](int64_t j) { return values + own(i, shared + j) * d; }, sum + i);
    for (int64_t x = 0; x < d; x += 32) ordered(sum[i] + x, 1.0f / total[i], q.out[i] + x);
  }
}
#endif

}  // namespace
