// Products of bytes on AMX tiles: with weights in blocks, with the bits of block_products.h, and with int8 weights, with
// those of int8.h.
//
// Formats differ in how a step, 32 inputs of 16 outputs, is unpacked. A step goes through three stages: vectors unpack
// its codes, less what stands for zero, in the order of a tile; tiles multiply them with all rows, which gives exact
// integers; vectors scale these and add them, in the order of blocks.h. A tile that is loaded waits for what was stored
// a moment ago, and a product of tiles takes long to end: so the stages work on different steps in the same turn, and
// the steps of several blocks of outputs follow each other without a gap.

#pragma once

#if PL_AMX
namespace {

// Codes that lie in memory as a tile wants them, too large by 128, need not be unpacked.
template <class F> constexpr bool AS_THEY_ARE = F::BITS == 8 && F::SHIFT == 0;

struct alignas(64) Lines {
  int8_t line[I8_BLOCK / 4][LINE];
};

// Step `step` of a packed block.
template <class F> void unpack_step(const uint8_t* block, int step, Lines& to) {
  constexpr bool SHIFTED = F::SHIFT >= 0 && !F::ZERO;
  const Codes codes = codes_of<F>(block + step * Packed<F>::STEP);
  __m512i zero = _mm512_set1_epi8((char)(128 >> std::max(F::SHIFT, 0)));
  if constexpr (F::ZERO)
    zero = _mm512_shuffle_epi8(zeros_of<F>(block),
                               _mm512_broadcast_i32x4(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0)));
  for (int i = 0; i < I8_BLOCK / 4; i++)
    _mm512_store_si512(to.line[i], SHIFTED || F::ZERO ? _mm512_sub_epi8(codes.line[i], zero) : codes.line[i]);
}

// Tiles of the sums, of x [rows, 32 / PARTS] and of codes, by their numbers, which instructions hold. A step takes
// four in turns, so that no product waits until the sums before it are stored.
#define FOR_TILES(turn, use)                \
  if constexpr ((turn) % 4 == 0) {          \
    use(0, 4, 6);                           \
  } else if constexpr ((turn) % 4 == 1) {   \
    use(1, 5, 7);                           \
  } else if constexpr ((turn) % 4 == 2) {   \
    use(2, 4, 6);                           \
  } else {                                  \
    use(3, 5, 7);                           \
  }

template <bool UNSIGNED, int TURN>
[[gnu::always_inline]] inline void multiply_tile(const int8_t* x, const int8_t* codes) {
#define MULTIPLY(sum, a, b)     \
  tile_load(a, x, I8_BLOCK);    \
  tile_load(b, codes, LINE);    \
  _tile_zero(sum);              \
  if constexpr (UNSIGNED) {     \
    _tile_dpbsud(sum, a, b);    \
  } else {                      \
    _tile_dpbssd(sum, a, b);    \
  }
  FOR_TILES(TURN, MULTIPLY)
#undef MULTIPLY
}
template <int TURN> [[gnu::always_inline]] inline void store_tile(int32_t* sums) {
#define STORE(sum, a, b) _tile_stored(sum, sums, LINE)
  FOR_TILES(TURN, STORE)
#undef STORE
}
#undef FOR_TILES

// Adds a step's sums of R rows; `at` is the step's place in the panel's scales, sums and starts.
template <class F, int R>
[[gnu::always_inline]] inline void add_step(const uint8_t* block, int step, const int32_t* whole, const Panel& in,
                                            int64_t at, __m512 sum[R]) {
#pragma GCC unroll 2
  for (int part = 0; part < F::PARTS; part++) {
    __m512 by = _mm512_setzero_ps();
    if constexpr (F::SCALE != NO_SCALE) by = scale_of<F>(block, step, part);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      __m512i exact = _mm512_load_si512(whole + (part * R + r) * LANES);
      if constexpr (AS_THEY_ARE<F>) exact = _mm512_add_epi32(exact, _mm512_set1_epi32(in.start[Bytes::BY_128][at + r]));
      __m512 scale = _mm512_set1_ps(in.scale[at + r]);
      if constexpr (F::SCALE != NO_SCALE) scale = _mm512_mul_ps(by, scale);
      sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scale, sum[r]);
    }
  }
  if constexpr (F::LEAST) {
    const __m512 least = least_of<F>(block, step);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sum[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(in.sum[at + r]), sum[r]);
  }
}

// 16 outputs after 16 of some blocks, 32 inputs after 32.
template <class F> struct Steps {
  const uint8_t* const* next_block;
  int64_t n;  // of a block
  const uint8_t* block = *next_block++;
  int64_t step = 0;
  int inner = 0;
  // Whether that was the last one of a block.
  [[gnu::always_inline]] bool next(int64_t left) {
    if (++step == n) {
      step = inner = 0;
      if (left > 0) block = *next_block++;
      return true;
    }
    if (++inner == Packed<F>::STEPS) inner = 0, block += Packed<F>::BYTES;
    return false;
  }
};

// Steps that a stage is ahead of the last one: measured.
constexpr int STORED_AHEAD = 1, MULTIPLIED_AHEAD = 2, UNPACKED_AHEAD = 4;
constexpr int KEPT = 4;  // steps whose lines and sums are held: as many as there are turns

// R rows, a panel, against `blocks` blocks of outputs into c.
template <class F, int R> struct TilePanel {
  static constexpr int SHARE = (Packed<F>::BYTES + Packed<F>::STEPS - 1) / Packed<F>::STEPS;
  static constexpr int AHEAD = ASKED_AHEAD<1> + (Packed<F>::STEPS > 1 ? Packed<F>::SCALES : 0);

  static void run(const uint8_t* const w[], int blocks, int64_t n, const Panel& in, float* c) {
    Lines lines[KEPT];
    alignas(64) int32_t whole[KEPT][F::PARTS * R * LANES];
    const int64_t total = blocks * n;
    Steps<F> unpacked{w, n}, multiplied{w, n}, added{w, n};
    __m512 sum[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_ps();
    const auto turn = [&](auto number, int64_t i) __attribute__((always_inline)) {
      constexpr int T = number(), PARTS = F::PARTS;
      if (const int64_t at = i + UNPACKED_AHEAD; at < total) {
        for (int j = 0; j < SHARE; j += 64)
          __builtin_prefetch(unpacked.block + AHEAD + unpacked.inner * SHARE + j, 0, 2);
        Lines& to = lines[(T + UNPACKED_AHEAD) % KEPT];
        if constexpr (!AS_THEY_ARE<F>) unpack_step<F>(unpacked.block, unpacked.inner, to);
        unpacked.next(total - at - 1);
      }
      if (const int64_t at = i + MULTIPLIED_AHEAD; at >= 0 && at < total) {
        const int8_t* x = (const int8_t*)in.x + multiplied.step * (R * I8_BLOCK);
        const int8_t* codes = lines[(T + MULTIPLIED_AHEAD) % KEPT].line[0];
        if constexpr (AS_THEY_ARE<F>) codes = (const int8_t*)multiplied.block;
        constexpr int FIRST = (T + MULTIPLIED_AHEAD) * PARTS;
        multiply_tile<AS_THEY_ARE<F>, FIRST>(x, codes);
        if constexpr (PARTS == 2)
          multiply_tile<false, FIRST + 1>(x + I8_BLOCK / 2, codes + I8_BLOCK / 8 * LINE);
        multiplied.next(total - at - 1);
      }
      if (const int64_t at = i + STORED_AHEAD; at >= 0 && at < total) {
        constexpr int FIRST = (T + STORED_AHEAD) * PARTS;
        int32_t* sums = whole[(T + STORED_AHEAD) % KEPT];
        store_tile<FIRST>(sums);
        if constexpr (PARTS == 2) store_tile<FIRST + 1>(sums + R * LANES);
      }
      if (i < 0 || i >= total) return;
      add_step<F, R>(added.block, added.inner, whole[T], in, added.step * R, sum);
      if (added.next(total - i - 1)) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) _mm512_storeu_ps(c + r * BLOCKS * LANES, sum[r]), sum[r] = _mm512_setzero_ps();
        c += LANES;
      }
    };
    for (int64_t i = -UNPACKED_AHEAD; i < total; i += 4) {
      turn(std::integral_constant<int, 0>(), i);
      turn(std::integral_constant<int, 1>(), i + 1);
      turn(std::integral_constant<int, 2>(), i + 2);
      turn(std::integral_constant<int, 3>(), i + 3);
    }
  }
};

// Up to ROWS rows.
template <class F>
void block_tiles(const uint8_t* const w[], int blocks, int64_t k, const Bytes& in, int64_t row, float* c) {
  const Panel panel = panel_of(in, row);
  use_tiles(F::PARTS == 2 ? TILES_OF_HALVES : TILES_OF_BYTES, panel.width);
  const auto run = [&](auto rows) { TilePanel<F, rows()>::run(w, blocks, k / I8_BLOCK, panel, c); };
  if (panel.width == 16) run(std::integral_constant<int, 16>());
  else if (panel.width == 12) run(std::integral_constant<int, 12>());
  else run(std::integral_constant<int, 8>());
}

}  // namespace
#endif
