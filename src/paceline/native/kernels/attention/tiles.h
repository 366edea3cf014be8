#pragma once

namespace {

#if PL_AMX
// Attention on tiles. Scores come as [16 keys, R rows] from keys as they lie in the cache and queries
// interleaved once; values are interleaved in pairs of keys on the way. What all rows of a task share is
// computed for R of them at once, what is a row's own for that row alone: a row's sum is over its keys in
// tiles of TILE_KEYS, counted from its first, whoever else is there.

void configure_attention(int rows) {  // 0: scores, 1: keys, 2: queries, 3-4: sums, 5: weights, 6-7: values
  TileConfig c;
  auto shape = [&](int t, int r, int bytes) { c.rows[t] = r, c.bytes[t] = bytes; };
  shape(0, 16, rows * 4), shape(1, 16, 64), shape(2, 16, rows * 4);
  shape(3, rows, 64), shape(4, rows, 64), shape(5, rows, 64), shape(6, 16, 64), shape(7, 16, 64);
  load_tile_config(c);
}

// In place: `count` vectors of interleaved elements -> those of even place, then those of odd place; and again
// within each half. Vector v then holds row reversed(v).
inline void unzip(__m512 v[], int count) {
  if (count == 1) return;
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  __m512 half[TILE_ROWS];
  for (int i = 0; i < count / 2; i++) {
    half[i] = _mm512_permutex2var_ps(v[2 * i], even, v[2 * i + 1]);
    half[count / 2 + i] = _mm512_permutex2var_ps(v[2 * i], odd, v[2 * i + 1]);
  }
  unzip(half, count / 2);
  unzip(half + count / 2, count / 2);
  for (int i = 0; i < count; i++) v[i] = half[i];
}
inline int reversed(int v, int count) {
  int r = 0;
  for (int bit = 1; bit < count; bit *= 2) r = r * 2 + (v & bit ? 1 : 0);
  return r;
}

// [d / 32][16 pairs of dimensions][rows][2]: queries as the second factor of a tile product.
void interleave_queries(const bf16* const query[], int count, int rows, int64_t d, bf16* out) {
  for (int64_t pair = 0; pair < d / 2; pair++)
    for (int r = 0; r < rows; r++)
      std::memcpy(out + (pair * rows + r) * 2, query[std::min(r, count - 1)] + pair * 2, 4);
}

// score[r][j] of sixteen keys, for `rows` (a power of two) rows of which `count` are wanted.
template <class K> inline void tile_scores(const bf16* queries, int rows, int count, int64_t d, float scale,
                                           bool together, K key, int64_t n, float* const score[], int64_t j) {
  alignas(64) bf16 near[16 * MOST_DIMS];
  const bf16* keys = key(0);
  if (!together || n < 16) {
    for (int i = 0; i < 16; i++) std::memcpy(near + i * d, i < n ? key(i) : g_zeros, d * sizeof(bf16));
    keys = near;
  }
  _tile_zero(0);
  for (int64_t i = 0; i < d; i += 32) {
    tile_load(1, keys + i, d * 2);
    tile_load(2, queries + i * rows, rows * 4);
    _tile_dpbf16ps(0, 1, 2);
  }
  alignas(64) float found[16 * TILE_ROWS];
  _tile_stored(0, found, rows * 4);
  __m512 v[TILE_ROWS];
  for (int r = 0; r < rows; r++) v[r] = _mm512_mul_ps(_mm512_load_ps(found + r * 16), _mm512_set1_ps(scale));
  unzip(v, rows);
  const __mmask16 mask = n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1);
  for (int r = 0; r < rows; r++) {
    const int to = reversed(r, rows);
    if (to < count) _mm512_mask_storeu_ps(score[to] + j, mask, v[r]);
  }
}

// sum[r] [d] += weights [rows, keys] values, TILE_KEYS keys at a time. `sum` keeps the dimensions of each 32 in
// the order that interleaving gives them; see `ordered`.
template <class V> void tile_values(const bf16* weights, int64_t weight_stride, int64_t n, int64_t d, V value,
                                    float* sum, int64_t sum_stride) {
  alignas(64) bf16 pairs[2][16 * 32];
  for (int64_t i = 0; i < d; i += 32) {
    tile_load(3, sum + i, sum_stride * 4);
    tile_load(4, sum + i + 16, sum_stride * 4);
    for (int64_t j = 0; j < n; j += TILE_KEYS) {
      for (int64_t pair = 0; pair < 16; pair++) {
        const int64_t at = j + pair * 2;
        const __m512i a = _mm512_loadu_si512((at < n ? value(at) : g_zeros) + i);
        const __m512i b = _mm512_loadu_si512((at + 1 < n ? value(at + 1) : g_zeros) + i);
        _mm512_store_si512(pairs[0] + pair * 32, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(pairs[1] + pair * 32, _mm512_unpackhi_epi16(a, b));
      }
      tile_load(5, weights + j, weight_stride * 2);
      tile_load(6, pairs[0], 64);
      tile_load(7, pairs[1], 64);
      _tile_dpbf16ps(3, 5, 6);
      _tile_dpbf16ps(4, 5, 7);
    }
    _tile_stored(3, sum + i, sum_stride * 4);
    _tile_stored(4, sum + i + 16, sum_stride * 4);
  }
}

// Values of TILE_KEYS keys, interleaved in pairs of keys, for tile after tile of which little changes between two.
struct ValuePairs {
  alignas(64) bf16 lines[MOST_DIMS / 32][2][16 * 32];
  int64_t d, filled = 0;  // pairs from here on are zero
  explicit ValuePairs(int64_t dims) : d(dims) { std::memset(lines, 0, d / 32 * sizeof(lines[0])); }
  void put(int64_t pair, const bf16* even, const bf16* odd) {
    for (int64_t i = 0; i < d; i += 32) {
      const __m512i a = _mm512_loadu_si512(even + i), b = _mm512_loadu_si512(odd + i);
      _mm512_store_si512(lines[i / 32][0] + pair * 32, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(lines[i / 32][1] + pair * 32, _mm512_unpackhi_epi16(a, b));
    }
  }
  // Keys 2 * from .. n - 1 anew, those before as they are, none behind.
  template <class V> void fill(int64_t from, int64_t n, V value) {
    const int64_t pairs = (n + 1) / 2;
    for (int64_t p = from; p < pairs; p++) put(p, value(2 * p), 2 * p + 1 < n ? value(2 * p + 1) : g_zeros);
    for (int64_t p = pairs; p < filled; p++) put(p, g_zeros, g_zeros);
    filled = pairs;
  }
  // sum [d] += weights [TILE_KEYS] values, for one row.
  void add(const bf16* weights, float* sum) const {
    tile_load(5, weights, 64);
    for (int64_t i = 0; i < d; i += 32) {
      tile_load(3, sum + i, 64);
      tile_load(4, sum + i + 16, 64);
      tile_load(6, lines[i / 32][0], 64);
      tile_load(7, lines[i / 32][1], 64);
      _tile_dpbf16ps(3, 5, 6);
      _tile_dpbf16ps(4, 5, 7);
      _tile_stored(3, sum + i, 64);
      _tile_stored(4, sum + i + 16, 64);
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

void attend_tiles(const Model& m, const Segment& s, int64_t window, const int64_t* positions, const Queries<bf16>& q,
                  const bf16* keys, const bf16* values) {
  Scratch& t = t_scratch;
  const int count = q.count();
  const int64_t d = m.head_dim, room = up(s.num_keys, TILE_KEYS) + TILE_KEYS;
  grow(t.scores, TILE_ROWS * room);
  grow(t.weights, TILE_ROWS * room);
  grow(t.out, TILE_ROWS * d);
  const View view = look(s, window, positions, q.r0, q.rows, q.heads, t.tail);
  auto slot = [&](int64_t j) { return s.base >= 0 ? s.base + j : s.keys[j]; };
  int rows = 1;
  while (rows < count) rows *= 2;
  float* score[TILE_ROWS];
  for (int i = 0; i < count; i++) score[i] = t.scores.data() + i * room;
  alignas(64) bf16 queries[TILE_ROWS * MOST_DIMS];
  interleave_queries(q.query, count, rows, d, queries);

  // Keys that every row has at the same place, in whole tiles; the rest is each row's own.
  const bool lone = q.rows == 1 && view.tail_end[0] == 0;
  const int64_t shared = lone ? view.common : view.common / TILE_KEYS * TILE_KEYS;
  configure_attention(rows);
  for (int64_t j = 0; j < shared; j += 16)
    tile_scores(queries, rows, count, d, m.scale, s.base >= 0, [&](int64_t i) { return keys + slot(j + i) * d; },
                std::min<int64_t>(16, shared - j), score, j);
  auto own_key = [&](int i, int64_t j) {  // key j of row i, for j >= shared
    return slot(j < view.common ? j : t.tail[view.tail_begin[i] + j - view.common]);
  };
  int64_t seen[TILE_ROWS];
  bool any = false;
  for (int i = 0; i < count; i++) {
    seen[i] = view.common + view.tail_end[i] - view.tail_begin[i];
    any = any || seen[i] > shared;
  }
  const bool jointly = any && join(view, shared, count, t);
  if (jointly) {
    const int64_t all = (int64_t)t.several.size(), wide_as = up(all, 16);
    grow(t.found, TILE_ROWS * wide_as);
    float* found[TILE_ROWS];
    for (int i = 0; i < count; i++) found[i] = t.found.data() + i * wide_as;
    for (int64_t j = 0; j < all; j += 16)
      tile_scores(queries, rows, count, d, m.scale, false, [&](int64_t i) { return keys + slot(t.several[j + i]) * d; },
                  std::min<int64_t>(16, all - j), found, j);
    for (int i = 0; i < count; i++) {
      std::memcpy(score[i] + shared, found[i], (view.common - shared) * sizeof(float));
      for (int64_t j = view.tail_begin[i], to = view.common; j < view.tail_end[i]; j++, to++)
        score[i][to] = found[i][t.place[t.tail[j] - view.common]];
    }
  } else if (any) {
    if (rows > 1) configure_attention(1);
    for (int i = 0; i < count; i++) {
      if (rows > 1) interleave_queries(q.query + i, 1, 1, d, queries);
      for (int64_t j = shared; j < seen[i]; j += 16)
        tile_scores(queries, 1, 1, d, m.scale, false, [&](int64_t x) { return keys + own_key(i, j + x) * d; },
                    std::min<int64_t>(16, seen[i] - j), score + i, j);
    }
  }
  float total[TILE_ROWS];
  for (int i = 0; i < count; i++) {
    total[i] = soften(score[i], seen[i]);
    keep_weights(q.kept[i], score[i], total[i], view, i, t.tail);
    bf16* w = t.weights.data() + i * room;
    const int64_t end = up(seen[i], TILE_KEYS);
    for (int64_t j = up(seen[i], 16); j < end; j++) score[i][j] = 0.0f;
    for (int64_t j = 0; j < end; j += 32)
      _mm512_storeu_si512(
          w + j, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(score[i] + j + 16), _mm512_loadu_ps(score[i] + j)));
  }
  float* sum = t.out.data();
  std::memset(sum, 0, rows * d * sizeof(float));
  if (shared) {
    if (any && !jointly && rows > 1) configure_attention(rows);
    tile_values(t.weights.data(), room, shared, d, [&](int64_t j) { return values + slot(j) * d; }, sum, d);
  }
  if (any) {
    if (rows > 1) configure_attention(1);
    ValuePairs pairs(d);
    const int64_t common = (view.common - shared) / 2;  // pairs that every row has in its first tile
    int64_t kept = 0;                                   // of those, as many as are there
    for (int i = 0; i < count; i++)
      for (int64_t j = shared; j < seen[i]; j += TILE_KEYS) {
        pairs.fill(j == shared ? kept : 0, std::min<int64_t>(TILE_KEYS, seen[i] - j),
                   [&](int64_t x) { return values + own_key(i, j + x) * d; });
        kept = j == shared ? common : 0;
        pairs.add(t.weights.data() + i * room + j, sum + i * d);
      }
  }
  for (int i = 0; i < count; i++)
    for (int64_t x = 0; x < d; x += 32) ordered(sum + i * d + x, 1.0f / total[i], q.out[i] + x);
}
#endif

// Whether attention takes bf16 pairs, on tiles or not; else it multiplies single elements.
template <class A> inline bool on_pairs(const Model&) { return false; }
#if PL_DOT_BF16
template <> inline bool on_pairs<bf16>(const Model& m) { return m.head_dim % 32 == 0 && m.head_dim <= MOST_DIMS; }
#endif
template <class A> inline bool on_tiles(const Model& m) { return g_isa == AMX_BF16 && on_pairs<A>(m); }

}  // namespace
