// Attention on single elements, and what rows of a segment see.

#pragma once

namespace {

// Sixteen sums at once: lane i of the result is the sum over the lanes of a[i], always in the same order.
inline v16 sums16(const v16 a[16]) {
#if PL_AVX512
  __m512 t[8], u[4];
  for (int i = 0; i < 8; i++)
    t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                         _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; i++)
    u[i] = _mm512_add_ps(
        (__m512)_mm512_unpacklo_pd((__m512d)t[2 * i], (__m512d)t[2 * i + 1]),
        (__m512)_mm512_unpackhi_pd((__m512d)t[2 * i], (__m512d)t[2 * i + 1]));
  const __m512 p = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  const __m512 q = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
#elif defined(__AVX2__)
  __m256 t[8], u[4];
  const auto half_sum = [&](int i) { return (__m256)(a[i].p[0] + a[i].p[1]); };
  for (int i = 0; i < 8; i++) {
    const __m256 x = half_sum(2 * i), y = half_sum(2 * i + 1);
    t[i] = _mm256_add_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y));
  }
  for (int i = 0; i < 4; i++) {
    const __m256d x = (__m256d)t[2 * i], y = (__m256d)t[2 * i + 1];
    u[i] = _mm256_add_ps((__m256)_mm256_unpacklo_pd(x, y), (__m256)_mm256_unpackhi_pd(x, y));
  }
  v16 sums;
  for (int i = 0; i < 2; i++) {
    const __m256 x = u[2 * i], y = u[2 * i + 1];
    sums.p[i] = (floats)_mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  }
  return sums;
#elif defined(__aarch64__)
  float32x4_t t[8];
  const auto quarter = [&](int i) { return (float32x4_t)((a[i].p[0] + a[i].p[2]) + (a[i].p[1] + a[i].p[3])); };
  for (int i = 0; i < 8; i++) {
    const float32x4_t x = quarter(2 * i), y = quarter(2 * i + 1);
    t[i] = vaddq_f32(vzip1q_f32(x, y), vzip2q_f32(x, y));
  }
  v16 sums;
  for (int i = 0; i < 4; i++) {
    const float64x2_t x = (float64x2_t)t[2 * i], y = (float64x2_t)t[2 * i + 1];
    sums.p[i] = (floats)vaddq_f32((float32x4_t)vtrn1q_f64(x, y), (float32x4_t)vtrn2q_f64(x, y));
  }
  return sums;
#else
  float s[16];
  for (int i = 0; i < 16; i++) s[i] = sum16(a[i]);
  return load(s);
#endif
}

// q . k of sixteen keys. head_dim is a multiple of 16.
inline v16 scores16(const float* q, const float* const k[16], int64_t d) {
  v16 a[16] = {};
  for (int first = 0; first < 16; first += SUMS)
    for (int64_t i = 0; i < d; i += 16) {
      const v16 x = load(q + i);
      for (int j = first; j < first + SUMS; j++) a[j] = fma16(x, load(k[j] + i), a[j]);
    }
  return sums16(a);
}
#if PL_DOT_BF16
inline v16 scores16(const bf16* q, const bf16* const k[16], int64_t d) {
  v16 a[16] = {};
  int64_t start = 0;
  for (int64_t& i = start; i + 32 <= d; i += 32) {
    const __m512bh x = (__m512bh)_mm512_loadu_si512(q + i);
    for (int j = 0; j < 16; j++) a[j] = _mm512_dpbf16_ps(a[j], x, (__m512bh)_mm512_loadu_si512(k[j] + i));
  }
  for (int first = 0; first < 16; first += SUMS)
    for (int64_t i = start; i < d; i += 16) {
      const v16 x = load_wide(q + i);
      for (int j = first; j < first + SUMS; j++) a[j] = fma16(x, load_wide(k[j] + i), a[j]);
    }
  return sums16(a);
}
#endif

// sum[m] += weight[m][j] * v[j] over n keys, one after the other; D vectors of 16 dimensions each.
template <int M, int D, class A, class P>
void accumulate(float* const out[], const float* const weight[], int64_t n, P value) {
  v16 sum[M][D];
  for (int m = 0; m < M; m++)
    for (int d = 0; d < D; d++) sum[m][d] = load(out[m] + d * 16);
  for (int64_t j = 0; j < n; j++) {
    const A* v = value(j);
    v16 x[D];
    for (int d = 0; d < D; d++) x[d] = load_wide(v + d * 16);
    for (int m = 0; m < M; m++) {
      const v16 p = splat(weight[m][j]);
      for (int d = 0; d < D; d++) sum[m][d] = fma16(p, x[d], sum[m][d]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int d = 0; d < D; d++) save(out[m] + d * 16, sum[m][d]);
}

template <int M, class A, class P>
void accumulate_dims(float* const out[], const float* const weight[], int64_t n, int64_t dims, P value) {
  float* part[M];
  for (int64_t i = 0; i < dims;) {
    for (int m = 0; m < M; m++) part[m] = out[m] + i;
    auto shifted = [&](int64_t j) { return value(j) + i; };
    const int64_t left = (dims - i) / 16;
    if (left >= 4 && M * 4 <= SUMS) accumulate<M, 4, A>(part, weight, n, shifted), i += 64;
    else if (left >= 2 && M * 2 <= SUMS) accumulate<M, 2, A>(part, weight, n, shifted), i += 32;
    else accumulate<M, 1, A>(part, weight, n, shifted), i += 16;
  }
}

template <class A, class P>
void accumulate_any(int m, float* const out[], const float* const weight[], int64_t n, int64_t dims, P value) {
  if (n == 0) return;
  if (m == 1) accumulate_dims<1, A>(out, weight, n, dims, value);
  else if (m == 2) accumulate_dims<2, A>(out, weight, n, dims, value);
  else if (m == 3) accumulate_dims<3, A>(out, weight, n, dims, value);
  else accumulate_dims<4, A>(out, weight, n, dims, value);
}

// exp(score - max) in place, the sum of it returned: lanes by the key's place, whatever the number of rows.
inline float soften(float* s, int64_t n) {
  v16 most = splat(-INFINITY);
  for (int64_t j = n; j % 16; j++) s[j] = -INFINITY;
  for (int64_t j = 0; j < n; j += 16) most = greater(load(s + j), most);
  const v16 top = splat(max16(most));
  v16 total = {};
  for (int64_t j = 0; j < n; j += 16) {
    save(s + j, exp16(load(s + j) - top));
    if (j + 16 > n) std::fill(s + n, s + j + 16, 0.0f);
    total = total + load(s + j);
  }
  return sum16(total);
}

struct Scratch {  // of one thread, grown on demand
  std::vector<float> scores, own_scores, found, out, low, wide;
  std::vector<char> normed;
  std::vector<int32_t> tail, several, place;
  std::vector<bf16> weights;
};
thread_local Scratch t_scratch;

// What is attended to at once: rows r0 .. r0 + rows - 1 of a segment, each under `heads` query heads that share keys and
// values. Vector i belongs to row r0 + i / heads.
template <class A> struct Queries {
  int64_t r0;
  int rows, heads;
  const A* query[TILE_ROWS];
  A* out[TILE_ROWS];
  int count() const { return rows * heads; }
};

// What each of these vectors sees: `common` leading keys, then its own of the tail.
struct View { int64_t common; int64_t tail_begin[TILE_ROWS], tail_end[TILE_ROWS]; };

inline View look(const Segment& s, int64_t window, const int64_t* positions, int64_t r0, int count, int heads,
                 std::vector<int32_t>& tail) {
  View v{};
  tail.clear();
  const int64_t rows = s.stop - s.start, block = s.num_keys - s.prefix;
  const bool cut = window > 0 && s.num_keys > window;
  const int64_t chain = s.num_keys - rows + 1;  // keys that row 0 of a chain sees
  v.common = cut ? 0 : s.visible ? s.prefix : chain + r0;
  auto end_row = [&](int m, int64_t begin) {
    for (int i = m * heads; i < (m + 1) * heads; i++) v.tail_begin[i] = begin, v.tail_end[i] = (int64_t)tail.size();
  };
  for (int m = 0; m < count; m++) {
    const int64_t begin = (int64_t)tail.size();
    const int64_t row = r0 + m, least = positions[s.start + row] - window;  // in sight: positions above this
    if (!s.visible) {
      const int64_t from = cut ? std::max<int64_t>(0, least + 1) : v.common;
      for (int64_t j = from; j < chain + row; j++) tail.push_back((int32_t)j);
      end_row(m, begin);
      continue;
    }
    if (cut)
      for (int64_t j = std::max<int64_t>(0, least + 1); j < s.prefix; j++) tail.push_back((int32_t)j);
    const uint8_t* seen = s.visible + row * block;
    for (int64_t j = 0; j < block; j++) {
      uint64_t eight;
      if (j + 8 <= block && (std::memcpy(&eight, seen + j, 8), eight == 0)) { j += 7; continue; }  // most rows see few
      const int64_t at = s.block_positions ? s.block_positions[j] : s.prefix + j;
      if (seen[j] && (!cut || at > least)) tail.push_back((int32_t)(s.prefix + j));
    }
    end_row(m, begin);
  }
  return v;
}

// Asks for the keys or values of a segment's slots begin .. end - 1.
template <class A> void fetch(const Segment& s, int64_t begin, int64_t end, const A* x, int64_t d) {
  for (int64_t j = begin; j < end; j++) {
    const char* at = (const char*)(x + (s.base >= 0 ? s.base + j : s.keys[j]) * d);
    for (int64_t i = 0; i < d * (int64_t)sizeof(A); i += 64) __builtin_prefetch(at + i, 0, 2);
  }
}
constexpr int64_t AHEAD = 32;  // keys

// Of a turn's 16 keys their values, which are needed when all scores are there, and the keys of the next turn but one.
template <class A>
void fetch_turn(const Segment& s, int64_t j, int64_t keys_seen, const A* keys, const A* values, int64_t d) {
  fetch(s, j, std::min(j + 16, keys_seen), values, d);
  fetch(s, j + AHEAD, std::min(j + AHEAD + 16, keys_seen), keys, d);
}

// Attention of up to VECTORS vectors.
template <class A> void attend(const Model& m, const Segment& s, int64_t window, const int64_t* positions,
                               const Queries<A>& q, const A* keys, const A* values) {
  Scratch& t = t_scratch;
  const int count = q.count();
  const int64_t d = m.head_dim, room = up(s.num_keys, 16);
  grow(t.scores, VECTORS * room);
  grow(t.out, VECTORS * d);
  const View view = look(s, window, positions, q.r0, q.rows, q.heads, t.tail);
  auto slot = [&](int64_t j) { return s.base >= 0 ? s.base + j : s.keys[j]; };
  auto key_at = [&](int64_t j) { return keys + slot(j) * d; };
  auto value_at = [&](int64_t j) { return values + slot(j) * d; };
  float* score[VECTORS];
  float* sum[VECTORS];
  for (int i = 0; i < count; i++) score[i] = t.scores.data() + i * room, sum[i] = t.out.data() + i * d;

#if PL_DOT_BF16
  using Number = A;
#else
  using Number = float;  // queries once, and sixteen keys once for all vectors
#endif
  if constexpr (!std::is_same_v<A, Number>) grow(t.wide, (VECTORS + 16) * d);
  const auto number = [&](const A* x, int64_t place) -> const Number* {
    if constexpr (std::is_same_v<A, Number>) return x;
    else return widen(x, d, t.wide.data() + place * d), t.wide.data() + place * d;
  };
  const Number *near[16], *query[VECTORS];
  alignas(64) float found[16];
  for (int i = 0; i < count; i++) query[i] = number(q.query[i], i);
  for (int64_t j = 0; j < view.common; j += 16) {
    const int64_t n = std::min<int64_t>(16, view.common - j);
    fetch_turn(s, j, view.common, keys, values, d);
    for (int64_t i = 0; i < 16; i++) near[i] = number(key_at(j + std::min(i, n - 1)), VECTORS + i);
    for (int i = 0; i < count; i++) {
      save(found, scores16(query[i], near, d) * splat(m.scale));
      std::memcpy(score[i] + j, found, n * sizeof(float));
    }
  }
  float total[VECTORS];
  for (int i = 0; i < count; i++) {
    const int32_t* own = t.tail.data() + view.tail_begin[i];
    const int64_t owned = view.tail_end[i] - view.tail_begin[i];
    for (int64_t j = 0; j < owned; j += 16) {
      const int64_t n = std::min<int64_t>(16, owned - j);
      for (int64_t x = 0; x < 16; x++) near[x] = number(key_at(own[j + std::min(x, n - 1)]), VECTORS + x);
      save(found, scores16(query[i], near, d) * splat(m.scale));
      std::memcpy(score[i] + view.common + j, found, n * sizeof(float));
    }
    total[i] = soften(score[i], view.common + owned);
    std::memset(sum[i], 0, d * sizeof(float));
  }
  accumulate_any<A>(count, sum, score, view.common, d, value_at);
  for (int i = 0; i < count; i++) {
    const int32_t* own = t.tail.data() + view.tail_begin[i];
    const int64_t owned = view.tail_end[i] - view.tail_begin[i];
    const float* rest[1] = {score[i] + view.common};
    accumulate_any<A>(1, sum + i, rest, owned, d, [&](int64_t j) { return value_at(own[j]); });
    const float scale = 1.0f / total[i];
    for (int64_t x = 0; x < d; x += 16) put16(q.out[i] + x, load(sum[i] + x) * splat(scale));
  }
}

}  // namespace
