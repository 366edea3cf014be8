// Products on vectors.

#pragma once

namespace {

#if PL_DOT_BF16
// Vector products: R rows against B weight blocks, every sum in a register of its own; turn `turn` of `turns` of such
// rows.
template <int R, int B>
void product_rb(const bf16* const w[], int64_t k, Input<bf16> in, float* c, const Next& next, int turn, int turns) {
  v16 sum[R][B] = {};
  for (int64_t i = 0; i < k; i += 2) {
    next.ask(i / 2, turn, turns);
    __m512bh line[B];
    for (int b = 0; b < B; b++) line[b] = (__m512bh)_mm512_loadu_si512(w[b] + i * 16);
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, in.x + r * in.stride + i, 4);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      for (int b = 0; b < B; b++) sum[r][b] = _mm512_dpbf16_ps(sum[r][b], line[b], x);
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) save(c + r * BLOCKS * LANES + b * LANES, sum[r][b]);
}
#endif

inline floats piece(const float* p) {
  floats f;
  std::memcpy(&f, p, sizeof f);
  return f;
}
inline floats weights(const float* w, int) { return piece(w); }
// Of as many pairs the first ones, or the second ones.
inline floats weights(const bf16* w, int odd) {
  ints line;
  std::memcpy(&line, w, sizeof line);
  return odd ? (floats)(line & (int32_t)0xffff0000) : (floats)(line << 16);
}
inline floats weights(const int8_t* w, int) {
#if PL_AVX512
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)w)));
#elif defined(__AVX2__)
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)w)));
#elif defined(__aarch64__)
  int32_t four;
  std::memcpy(&four, w, 4);
  return (floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
#else
  typedef int8_t bytes __attribute__((vector_size(PIECE)));
  bytes b;
  std::memcpy(&b, w, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, ints), floats);
#endif
}

constexpr int64_t DEPTH = 512;  // of k, whose x of eight rows and weights of 16 outputs stay in the first-level cache

// R rows of float32, or of bf16 where an instruction multiplies and adds pairs of these, against B weight blocks, from
// input `begin` to `end`: what comes before is in c already. Every sum has a register of its own. Of the cache lines
// that are needed next, this turn asks for one in `turns`, from block `first` on, every `step`-th block.
template <int R, int B, class W, class A>
[[gnu::noinline]] void float_product(const W* const w[], int64_t begin, int64_t end, Input<A> in, float* c,
                                     const Next& next, int turn, int turns, int first, int step) {
  constexpr int64_t PER_LINE = 4 / sizeof(W);  // inputs of a cache line
  constexpr int P = B * PIECES;                // registers of a row's sums
  constexpr int STEP = std::is_same_v<W, bf16> ? 2 : 1;  // inputs of an output that lie together
  floats sum[R][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int p = 0; p < P; p++)
      sum[r][p] = begin ? piece(c + r * BLOCKS * LANES + p * PIECE) : floats{};
  const int64_t share = 32 / PER_LINE / turns;
  const char* then[B];
  for (int b = 0; b < B; b++) then[b] = next.stream(first + b, w[b]);
  for (int64_t i = begin, stop; i < end;) {
    stop = std::min<int64_t>(end, i + 32);
    for (int b = 0; b < B; b++) {
      const char* from = then[b] + (i / PER_LINE + turn * share) * 64;
      for (int64_t line = 0; line < share; line++) __builtin_prefetch(from + line * 64, 0, 2);
    }
#if PL_NEON_BF16
    if constexpr (std::is_same_v<A, bf16>)
      for (; i < stop; i += 2) {
        bfloat16x8_t line[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) std::memcpy(&line[p], w[p / PIECES] + i * 16 + p % PIECES * 8, 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          int32_t pair;
          std::memcpy(&pair, in.x + r * in.stride + i, 4);
          const bfloat16x8_t x = (bfloat16x8_t)vdupq_n_s32(pair);
#pragma GCC unroll 16
          for (int p = 0; p < P; p++) sum[r][p] = (floats)vbfdotq_f32((float32x4_t)sum[r][p], line[p], x);
        }
      }
    else
#endif
    for (; i < stop; i += STEP)
#pragma GCC unroll 2
      for (int odd = 0; odd < STEP; odd++) {
        floats line[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) line[p] = weights(w[p / PIECES] + i * 16 + p % PIECES * PIECE * STEP, odd);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const floats x = fill(in.x[r * in.stride + i + odd]);
#pragma GCC unroll 16
          for (int p = 0; p < P; p++) sum[r][p] = fma(line[p], x, sum[r][p]);
        }
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) std::memcpy(c + r * BLOCKS * LANES + p * PIECE, &sum[r][p], sizeof(floats));
}
template <int R, int B, class W, class A>
void product_rb(const W* const w[], int64_t k, Input<A> in, float* c, const Next& next, int turn, int turns) {
  float_product<R, B>(w, 0, k, in, c, next, 0, 1, turn, turns);
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
  // Two or more rows of four blocks are more sums than there are registers: a block after the other, in parts that stay
  // in the first-level cache for all rows.
  const auto part = [&](auto rows_now, auto blocks_now, int b, int64_t begin, int row, int turn, int turns) {
    float_product<rows_now(), blocks_now()>(w + b, begin, std::min(k, begin + DEPTH), in.from(row),
                                            c + row * BLOCKS * LANES + b * LANES, next, turn, turns, b, blocks);
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 3> three;
  constexpr std::integral_constant<int, 4> four;
  constexpr std::integral_constant<int, 5> five;
  constexpr std::integral_constant<int, 6> six;
  const int turns = (rows + 5) / 6;
  for (int b = 0; rows > 1 && b < blocks; b += rows == 2 ? 2 : 1)
    for (int64_t begin = 0; begin < k; begin += DEPTH)
      for (int turn = 0, row = 0, r; turn < turns; turn++, row += r) {
        r = (rows - row + turns - turn - 1) / (turns - turn);
        if (rows == 2 && b + 1 < blocks) part(two, two, b, begin, row, turn, turns);
        else if (r == 2) part(two, one, b, begin, row, turn, turns);
        else if (r == 3) part(three, one, b, begin, row, turn, turns);
        else if (r == 4) part(four, one, b, begin, row, turn, turns);
        else if (r == 5) part(five, one, b, begin, row, turn, turns);
        else part(six, one, b, begin, row, turn, turns);
      }
  if (rows > 1) return;
#endif
#if PL_DOT_BF16
  if constexpr (std::is_same_v<A, bf16>)
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
