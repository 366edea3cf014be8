// Keys and values in bytes: a row is head_dim of them, and behind them the float that one counts for.

#pragma once

namespace {

inline void pack_row(const float* x, int64_t d, int8_t* row) {
  float most = 0;
  for (int64_t i = 0; i < d; i++) most = std::max(most, std::fabs(x[i]));
  const float scale = most / 127, by = most > 0 ? 127 / most : 0;
  for (int64_t i = 0; i < d; i++) row[i] = (int8_t)std::nearbyint(x[i] * by);
  std::memcpy(row + d, &scale, sizeof scale);
}

// d is a multiple of 16, as of every head.
inline void unpack_row(const int8_t* row, int64_t d, float* x) {
  float scale;
  std::memcpy(&scale, row + d, sizeof scale);
  for (int64_t i = 0; i < d; i++) x[i] = row[i] * scale;
}
inline void unpack_row(const int8_t* row, int64_t d, bf16* x) {
  float scale;
  std::memcpy(&scale, row + d, sizeof scale);
  int64_t i = 0;
#if PL_DOT_BF16
  const __m512 by = _mm512_set1_ps(scale);
  auto part = [&](int64_t at) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(row + at)))), by);
  };
  for (; i + 32 <= d; i += 32) _mm512_storeu_si512(x + i, (__m512i)_mm512_cvtne2ps_pbh(part(i + 16), part(i)));
#endif
  for (; i < d; i++) put(x + i, row[i] * scale);
}

// Keys and values of one K/V head of a segment as attention reads them, by key. A thread keeps them for the query heads
// that share this head, since it takes them one after the other.
struct Unpacked {
  std::vector<char> room;
  Segment segment;                // the one given, whose keys lie one behind the other here
  const int8_t* of = nullptr;     // the head's keys in the cache; null: nothing is here
  const Segment* from = nullptr;

  template <class A>
  void fill(const Segment& s, int64_t begin, int64_t d, const int8_t* keys, const int8_t* values, A*& k, A*& v) {
    grow(room, 2 * s.num_keys * d * (int64_t)sizeof(A) + 64);
    k = (A*)up((int64_t)room.data(), 64), v = k + s.num_keys * d;
    if (of == keys && from == &s) return;
    segment = s, segment.base = 0, segment.keys = nullptr, of = keys, from = &s;
    for (int64_t j = begin; j < s.num_keys; j++) {
      const int64_t at = (s.base >= 0 ? s.base + j : s.keys[j]) * (d + SCALE_ROOM);
      unpack_row(keys + at, d, k + j * d), unpack_row(values + at, d, v + j * d);
    }
  }
};
thread_local Unpacked t_unpacked;

}  // namespace
