#pragma once

namespace {

#if PL_AMX
// Attention on tiles. R is the number of vectors, rounded up to a power of two. Scores come as [keys, R] from keys as
// they lie in the cache and queries interleaved once; weights are turned to [R, keys] as pairs of bf16, half of what
// scores are; values are interleaved in pairs of keys on the way. What all rows of a task share is computed for all
// vectors at once, what is a row's own for that row alone: a row's sum is over its keys in tiles of TILE_KEYS, counted
// from its first, whoever else is there.

void configure_scores(int R) {  // 0-1: scores [16 keys, R], 2-3: keys, 4-7: queries
  TileConfig c;
  for (int t = 0; t < 8; t++) c.rows[t] = 16, c.bytes[t] = t == 2 || t == 3 ? 64 : R * 4;
  load_tile_config(c);
}
void configure_values(int R) {  // 0-3: sums [R, 16 dimensions], 4: weights [R, TILE_KEYS], 5-6: values
  TileConfig c;
  for (int t = 0; t < 7; t++) c.rows[t] = t < 5 ? R : 16, c.bytes[t] = 64;
  load_tile_config(c);
}

// In place: N vectors of interleaved elements -> those of even place, then those of odd place; and again within each
// half. Vector v then holds row reversed(v).
template <int N> inline void unzip(__m512 v[]) {
  if constexpr (N > 1) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    __m512 half[N];
    for (int i = 0; i < N / 2; i++) {
      half[i] = _mm512_permutex2var_ps(v[2 * i], even, v[2 * i + 1]);
      half[N / 2 + i] = _mm512_permutex2var_ps(v[2 * i], odd, v[2 * i + 1]);
    }
    unzip<N / 2>(half);
    unzip<N / 2>(half + N / 2);
    for (int i = 0; i < N; i++) v[i] = half[i];
  }
}
constexpr int reversed(int v, int count) {
  int r = 0;
  for (int bit = 1; bit < count; bit *= 2) r = r * 2 + (v & bit ? 1 : 0);
  return r;
}

// [d / 32][16 pairs of dimensions][R][2]: queries as the second factor of a tile product.
void interleave_queries(const bf16* const query[], int count, int R, int64_t d, bf16* out) {
  for (int64_t pair = 0; pair < d / 2; pair++)
    for (int r = 0; r < R; r++)
      std::memcpy(out + (pair * R + r) * 2, query[std::min(r, count - 1)] + pair * 2, 4);
}

// score [TILE_KEYS][R] of two times sixteen keys. HELD: so many steps of 32 dimensions a head has, whose queries lie in
// tiles; 0: more than fit there.
template <int HELD>
inline void tile_scores(const bf16* first, const bf16* second, const bf16* queries, int R, int64_t d, float* score) {
  const int64_t stride = d * 2;
  _tile_zero(0);
  _tile_zero(1);
  auto step = [&](int64_t i) {
    tile_load(2, first + i, stride);
    tile_load(3, second + i, stride);
  };
  if (HELD == 0)
    for (int64_t i = 0; i < d; i += 32) {
      step(i);
      tile_load(4, queries + i * R, R * 4);
      _tile_dpbf16ps(0, 2, 4);
      _tile_dpbf16ps(1, 3, 4);
    }
  if (HELD > 0) { step(0); _tile_dpbf16ps(0, 2, 4); _tile_dpbf16ps(1, 3, 4); }
  if (HELD > 1) { step(32); _tile_dpbf16ps(0, 2, 5); _tile_dpbf16ps(1, 3, 5); }
  if (HELD > 2) { step(64); _tile_dpbf16ps(0, 2, 6); _tile_dpbf16ps(1, 3, 6); }
  if (HELD > 3) { step(96); _tile_dpbf16ps(0, 2, 7); _tile_dpbf16ps(1, 3, 7); }
  _tile_stored(0, score, R * 4);
  _tile_stored(1, score + 16 * R, R * 4);
}

// score [keys][R] of n keys; what stands behind the last up to a multiple of TILE_KEYS means nothing.
template <int HELD, class K>
void scores_held(const bf16* queries, int R, int64_t d, bool together, K key, int64_t n, float* score) {
  alignas(64) bf16 near[TILE_KEYS * MOST_DIMS];
  if (HELD > 0) tile_load(4, queries, R * 4);
  if (HELD > 1) tile_load(5, queries + 32 * R, R * 4);
  if (HELD > 2) tile_load(6, queries + 64 * R, R * 4);
  if (HELD > 3) tile_load(7, queries + 96 * R, R * 4);
  for (int64_t j = 0; j < n; j += TILE_KEYS) {
    const bf16* keys = key(j);
    if (!together || n - j < TILE_KEYS) {
      for (int i = 0; i < TILE_KEYS; i++) std::memcpy(near + i * d, j + i < n ? key(j + i) : g_zeros, d * sizeof(bf16));
      keys = near;
    }
    tile_scores<HELD>(keys, keys + 16 * d, queries, R, d, score + j * R);
  }
}
template <class K>
void score_keys(const bf16* queries, int R, int64_t d, bool together, K key, int64_t n, float* score) {
  if (d == 32) scores_held<1>(queries, R, d, together, key, n, score);
  else if (d == 64) scores_held<2>(queries, R, d, together, key, n, score);
  else if (d == 96) scores_held<3>(queries, R, d, together, key, n, score);
  else if (d == 128) scores_held<4>(queries, R, d, together, key, n, score);
  else scores_held<0>(queries, R, d, together, key, n, score);
}

// 2^(scale score - top) of the lanes that are `there`, 0 of the others; to one unit in the last place where that is 1.
inline __m512 weight_of(__m512 score, __m512 scale, __m512 top, __mmask16 there) {
  const __m512 shift = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const __m512 x = _mm512_fmsub_ps(score, scale, top), n = _mm512_sub_ps(_mm512_add_ps(x, shift), shift);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(1.327647188e-3f);
  for (float c : {9.675541334e-3f, 5.550713274e-2f, 2.402211972e-1f, 6.931469671e-1f, 1.0f})
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  return _mm512_maskz_scalef_ps(there, y, n);
}
inline __mmask16 lanes_below(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

// The largest of each vector's n scores [keys][R], at least `most`: lane i is of vector i % R, there as here.
template <int R> __m512 largest(const float* score, int64_t n, __m512 most) {
  const int64_t all = n * R;
  int64_t x = 0;
  __m512 other = most;
  for (; x + 32 <= all; x += 32) {
    most = _mm512_max_ps(_mm512_loadu_ps(score + x), most);
    other = _mm512_max_ps(_mm512_loadu_ps(score + x + 16), other);
  }
  most = _mm512_max_ps(other, most);
  for (; x < all; x += 16) most = _mm512_mask_max_ps(most, lanes_below(all - x), _mm512_loadu_ps(score + x), most);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int by = R; by < 16; by *= 2)
    most = _mm512_max_ps(most, _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(by)), most));
  return most;
}

// From scores [keys][R] weights [R][keys], 0 behind the last up to a multiple of TILE_KEYS, and of each vector's
// weights sixteen sums, by a key's place.
template <int R>
void weigh(const float* score, int64_t n, float scale, __m512 top, bf16* weights, int64_t stride, __m512 sums[]) {
  alignas(64) int16_t order[32];  // [keys / 2 of two vectors][2][R] -> [keys / 2][R][2]
  for (int i = 0; i < 32; i++) order[i] = (int16_t)((i / (2 * R) * 2 + i % 2) * R + i / 2 % R);
  const __m512i apart = _mm512_load_si512(order);
  const __m512 by = _mm512_set1_ps(scale);
  for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
  __m512 pairs[R];
  for (int64_t j = 0; j < n; j += TILE_KEYS, score += TILE_KEYS * R) {
    const int64_t all = (n - j) * R;
    for (int v = 0; v < R; v++) {
      const __m512 a = weight_of(_mm512_loadu_ps(score + v * 32), by, top, lanes_below(all - v * 32));
      const __m512 b = weight_of(_mm512_loadu_ps(score + v * 32 + 16), by, top, lanes_below(all - v * 32 - 16));
      sums[2 * v % R] = _mm512_add_ps(sums[2 * v % R], a);
      sums[(2 * v + 1) % R] = _mm512_add_ps(sums[(2 * v + 1) % R], b);
      pairs[v] = (__m512)_mm512_permutexvar_epi16(apart, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    unzip<R>(pairs);
    for (int v = 0; v < R; v++) _mm512_storeu_ps((float*)(weights + reversed(v, R) * stride + j), pairs[v]);
  }
  unzip<R>(sums);
  __m512 all[R];
  for (int v = 0; v < R; v++) all[reversed(v, R)] = sums[v];
  for (int v = 0; v < R; v++) sums[v] = all[v];
}

// The same for scores of one vector behind those; the sum of all its weights.
float weigh_own(const float* score, int64_t n, float scale, float top, bf16* weights, __m512 sum) {
  const __m512 by = _mm512_set1_ps(scale), most = _mm512_set1_ps(top);
  for (int64_t j = 0; j < n; j += TILE_KEYS) {
    const __m512 a = weight_of(_mm512_loadu_ps(score + j), by, most, lanes_below(n - j));
    const __m512 b = weight_of(_mm512_loadu_ps(score + j + 16), by, most, lanes_below(n - j - 16));
    sum = _mm512_add_ps(_mm512_add_ps(sum, a), b);
    _mm512_storeu_si512(weights + j, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  return sum16(v16(sum));
}

// Dimensions of each 32 are kept in the order that interleaving gives them; see `ordered`.
inline void interleave(const bf16* even, const bf16* odd, bf16* low, bf16* high) {
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  _mm512_store_si512(low, _mm512_unpacklo_epi16(a, b));
  _mm512_store_si512(high, _mm512_unpackhi_epi16(a, b));
}

// sum [R, d] = weights [R, keys] values, TILE_KEYS keys and 64 dimensions at a time.
template <class V>
void tile_values(const bf16* weights, int64_t stride, int64_t n, int64_t d, V value, float* sum) {
  alignas(64) bf16 pairs[2][4][16 * 32];
  for (int64_t i = 0; i < d; i += 64) {
    const bool wide = i + 32 < d;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t j = 0; j < n; j += TILE_KEYS) {
      bf16(*to)[16 * 32] = pairs[j / TILE_KEYS % 2];
      for (int64_t pair = 0; pair < 16; pair++) {
        const int64_t at = j + pair * 2;
        const bf16 *even = (at < n ? value(at) : g_zeros) + i, *odd = (at + 1 < n ? value(at + 1) : g_zeros) + i;
        interleave(even, odd, to[0] + pair * 32, to[1] + pair * 32);
        if (wide) interleave(even + 32, odd + 32, to[2] + pair * 32, to[3] + pair * 32);
      }
      tile_load(4, weights + j, stride * 2);
      tile_load(5, to[0], 64);
      _tile_dpbf16ps(0, 4, 5);
      tile_load(6, to[1], 64);
      _tile_dpbf16ps(1, 4, 6);
      if (!wide) continue;
      tile_load(5, to[2], 64);
      _tile_dpbf16ps(2, 4, 5);
      tile_load(6, to[3], 64);
      _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sum + i, d * 4);
    _tile_stored(1, sum + i + 16, d * 4);
    if (!wide) continue;
    _tile_stored(2, sum + i + 32, d * 4);
    _tile_stored(3, sum + i + 48, d * 4);
  }
}

// Values of TILE_KEYS keys, interleaved in pairs of keys, for tile after tile of which little changes between two.
struct ValuePairs {
  alignas(64) bf16 lines[MOST_DIMS / 32][2][16 * 32];
  int64_t d, filled = 0;  // pairs from here on are zero
  explicit ValuePairs(int64_t dims) : d(dims) { std::memset(lines, 0, d / 32 * sizeof(lines[0])); }
  void put(int64_t pair, const bf16* even, const bf16* odd) {
    for (int64_t i = 0; i < d; i += 32)
      interleave(even + i, odd + i, lines[i / 32][0] + pair * 32, lines[i / 32][1] + pair * 32);
  }
  // Keys 2 * from .. n - 1 anew, those before as they are, none behind.
  template <class V> void fill(int64_t from, int64_t n, V value) {
    const int64_t pairs = (n + 1) / 2;
    for (int64_t p = from; p < pairs; p++) put(p, value(2 * p), 2 * p + 1 < n ? value(2 * p + 1) : g_zeros);
    for (int64_t p = pairs; p < filled; p++) put(p, g_zeros, g_zeros);
    filled = pairs;
  }
  // sum [R, d] += weights [R, TILE_KEYS] values.
  void add(const bf16* weights, int64_t stride, float* sum) const {
    tile_load(4, weights, stride * 2);
    for (int64_t i = 0; i < d; i += 32) {
      tile_load(0, sum + i, d * 4);
      tile_load(1, sum + i + 16, d * 4);
      tile_load(5, lines[i / 32][0], 64);
      tile_load(6, lines[i / 32][1], 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
      _tile_stored(0, sum + i, d * 4);
      _tile_stored(1, sum + i + 16, d * 4);
    }
  }
};

// All keys from `shared` on that some row sees go to t.several, and where key common + i stands there to t.place[i].
// False where the rows' own tiles of keys are not many more than those.
bool join(const View& view, int64_t shared, int count, Scratch& t) {
  if (count == 1) return false;
  int32_t last = (int32_t)view.common - 1;
  for (int32_t j : t.tail) {
    if (j < view.common) return false;  // a sliding window
    last = std::max(last, j);
  }
  t.place.assign(last + 1 - view.common, 0);
  for (int32_t j : t.tail) t.place[j - view.common] = 1;
  t.several.clear();
  for (int64_t j = shared; j < view.common; j++) t.several.push_back((int32_t)j);
  for (int64_t i = 0; i < (int64_t)t.place.size(); i++) {
    if (!t.place[i]) continue;
    t.place[i] = (int32_t)t.several.size();
    t.several.push_back((int32_t)(view.common + i));
  }
  int64_t alone = 0;
  for (int i = 0; i < count; i++)
    alone += up(view.common - shared + view.tail_end[i] - view.tail_begin[i], 16) / 16;
  return up((int64_t)t.several.size(), 16) / 16 * 2 <= alone;
}

// R is at least q.count().
template <int R>
void attend_vectors(const Model& m, const Segment& s, int64_t window, const int64_t* positions, const Queries<bf16>& q,
                    const bf16* keys, const bf16* values) {
  Scratch& t = t_scratch;
  const int count = q.count(), heads = q.heads;
  const int64_t d = m.head_dim, room = up(s.num_keys, TILE_KEYS) + TILE_KEYS;
  const View view = look(s, window, positions, q.r0, q.rows, heads, t.tail);
  auto slot = [&](int64_t j) { return s.base >= 0 ? s.base + j : s.keys[j]; };
  alignas(64) bf16 queries[R * MOST_DIMS];
  interleave_queries(q.query, count, R, d, queries);

  // Keys that every row has at the same place, in whole tiles; the rest is each row's own.
  const bool lone = q.rows == 1 && view.tail_end[0] == 0;
  const int64_t shared = lone ? view.common : view.common / TILE_KEYS * TILE_KEYS;
  auto own_key = [&](int i, int64_t j) {  // key j of vector i, for j >= shared
    return slot(j < view.common ? j : t.tail[view.tail_begin[i] + j - view.common]);
  };
  int64_t own[R], most_own = 0;
  for (int i = 0; i < count; i++) {
    own[i] = view.common + view.tail_end[i] - view.tail_begin[i] - shared;
    most_own = std::max(most_own, own[i]);
  }
  grow(t.scores, R * room);
  grow(t.weights, R * room);
  grow(t.out, R * d);
  configure_scores(R);
  score_keys(queries, R, d, s.base >= 0, [&](int64_t j) { return keys + slot(j) * d; }, shared, t.scores.data());
  const int64_t apart = up(most_own, TILE_KEYS);
  grow(t.own_scores, R * apart);
  float* const rest = t.own_scores.data();  // [R][apart]
  if (most_own && join(view, shared, count, t)) {
    const int64_t all = (int64_t)t.several.size(), common = view.common - shared;
    grow(t.found, up(all, TILE_KEYS) * R);
    float* found = t.found.data();
    score_keys(queries, R, d, false, [&](int64_t j) { return keys + slot(t.several[j]) * d; }, all, found);
    for (int i = 0; i < count; i++) {
      float* to = rest + i * apart;
      for (int64_t j = 0; j < common; j++) *to++ = found[j * R + i];
      for (int64_t j = view.tail_begin[i]; j < view.tail_end[i]; j++)
        *to++ = found[t.place[t.tail[j] - view.common] * R + i];
    }
  } else if (most_own) {  // heads of a row see the same keys
    configure_scores(heads);
    grow(t.found, apart * heads);
    for (int i = 0; i < count; i += heads) {
      interleave_queries(q.query + i, heads, heads, d, queries);
      score_keys(queries, heads, d, false, [&](int64_t j) { return keys + own_key(i, shared + j) * d; }, own[i],
                 t.found.data());
      for (int h = 0; h < heads; h++)
        for (int64_t j = 0; j < own[i]; j++) rest[(i + h) * apart + j] = t.found[j * heads + h];
    }
  }

  alignas(64) float top[16];
  std::fill(top, top + 16, -INFINITY);
  for (int i = 0; i < count; i++)
    for (int64_t j = 0; j < own[i]; j += 16) {
      const __m512 scores = _mm512_loadu_ps(rest + i * apart + j);
      top[i] = std::max(top[i], _mm512_mask_reduce_max_ps(lanes_below(own[i] - j), scores));
    }
  for (int i = R; i < 16; i++) top[i] = top[i % R];
  const float scale = m.scale * 1.44269504088896341f;  // of powers of 2
  const __m512 tops = _mm512_mul_ps(largest<R>(t.scores.data(), shared, _mm512_load_ps(top)), _mm512_set1_ps(scale));
  _mm512_store_ps(top, tops);
  __m512 sums[R];
  weigh<R>(t.scores.data(), shared, scale, tops, t.weights.data(), room, sums);
  float total[R];
  for (int i = 0; i < count; i++) {
    bf16* w = t.weights.data() + i * room;
    total[i] = weigh_own(rest + i * apart, own[i], scale, top[i], w + shared, sums[i]);
  }

  float* sum = t.out.data();
  configure_values(R);
  tile_values(t.weights.data(), room, shared, d, [&](int64_t j) { return values + slot(j) * d; }, sum);
  if (most_own) {
    if (heads != R) configure_values(heads);
    ValuePairs pairs(d);
    const int64_t common = (view.common - shared) / 2;  // pairs that every row has in its first tile
    int64_t kept = 0;                                   // of those, as many as are there
    for (int i = 0; i < count; i += heads)
      for (int64_t j = 0; j < own[i]; j += TILE_KEYS) {
        pairs.fill(j == 0 ? kept : 0, std::min<int64_t>(TILE_KEYS, own[i] - j),
                   [&](int64_t x) { return values + own_key(i, shared + j + x) * d; });
        kept = j == 0 ? common : 0;
        pairs.add(t.weights.data() + i * room + shared + j, room, sum + i * d);
      }
  }
  for (int i = 0; i < count; i++)
    for (int64_t x = 0; x < d; x += 32) ordered(sum + i * d + x, 1.0f / total[i], q.out[i] + x);
}

void attend_tiles(const Model& m, const Segment& s, int64_t window, const int64_t* positions, const Queries<bf16>& q,
                  const bf16* keys, const bf16* values) {
  const int count = q.count();
  if (count == 1) attend_vectors<1>(m, s, window, positions, q, keys, values);
  else if (count == 2) attend_vectors<2>(m, s, window, positions, q, keys, values);
  else if (count <= 4) attend_vectors<4>(m, s, window, positions, q, keys, values);
  else if (count <= 8) attend_vectors<8>(m, s, window, positions, q, keys, values);
  else attend_vectors<16>(m, s, window, positions, q, keys, values);
}
#endif

// Whether attention takes bf16 pairs, on tiles or not; else it multiplies single elements.
template <class A> inline bool on_pairs(const Model&) { return false; }
#if PL_DOT_BF16
template <> inline bool on_pairs<bf16>(const Model& m) { return m.head_dim % 32 == 0 && m.head_dim <= MOST_DIMS; }
#endif
template <class A> inline bool on_tiles(const Model& m) { return g_isa == AMX_BF16 && on_pairs<A>(m); }

}  // namespace
