// Products of many rows with weights in blocks on AMX tiles, with the bits of block_products.h.
//
// Formats differ in how a step, 32 inputs of 16 outputs, is unpacked: to codes less what stands for zero, in the order
// of a tile, and to scales as floats. One product of tiles then gives a step's sums of sixteen rows as exact integers,
// which vectors scale and add in the order of blocks.h. The three go through some steps one after the other: a tile is
// loaded from memory, where what was stored a moment ago is not yet to be had.

#pragma once

#if PL_AMX
namespace {

template <int PARTS> struct alignas(64) Step {
  int8_t line[PARTS == 2 ? 12 : 8][LINE];  // with two scales: each half beside four lines of zeros
  float scale[PARTS][LANES], least[LANES];
};
template <int PARTS> constexpr int64_t STRETCH = 8 / PARTS;  // steps: their sums take 8 KB

// Steps begin .. end - 1 of packed blocks.
template <class F> void unpack_steps(const uint8_t* w, int64_t begin, int64_t end, Step<F::PARTS>* to) {
  using P = Packed<F>;
  for (int64_t j = begin; j < end; j++, to++) {
    const int step = (int)(j % P::STEPS);
    const uint8_t* block = w + j / P::STEPS * P::BYTES;
    const Codes codes = codes_of<F>(block + step * P::STEP);
    __m512i zero = _mm512_set1_epi8((char)(F::SHIFT < 0 ? 0 : 128 >> std::max(F::SHIFT, 0)));
    if constexpr (F::ZERO)
      zero = _mm512_shuffle_epi8(zeros_of<F>(block), _mm512_broadcast_i32x4(_mm_set_epi32(
                                                         0x0c0c0c0c, 0x08080808, 0x04040404, 0)));
    for (int i = 0; i < 8; i++)
      _mm512_store_si512(to->line[F::PARTS == 2 && i >= 4 ? i + 4 : i], _mm512_sub_epi8(codes.line[i], zero));
    for (int i = 4; i < 8 && F::PARTS == 2; i++) _mm512_store_si512(to->line[i], _mm512_setzero_si512());
    for (int part = 0; part < F::PARTS; part++) _mm512_store_ps(to->scale[part], scale_of<F>(block, step, part));
    if constexpr (F::LEAST) _mm512_store_ps(to->least, least_of<F>(block, step));
  }
}

// Sixteen rows, a panel from step `x` on, times `count` steps.
template <int PARTS> using Sums = int32_t[STRETCH<PARTS>][PARTS][ROWS][LANES];
template <int PARTS> void multiply_steps(const int32_t* x, const Step<PARTS>* step, int64_t count, Sums<PARTS> whole) {
  for (int64_t j = 0; j < count; j++) {
    tile_load(4, x + j * (ROWS * I8_BLOCK / 4), I8_BLOCK);
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      tile_load(5, step[j].line[4 * part], LINE);
      _tile_zero(0);
      _tile_dpbssd(0, 4, 5);
      _tile_stored(0, whole[j][part], LINE);
    }
  }
}

// Adds what R rows have in `count` steps to c; their scales and sums, of ROWS rows each, are those of the first step. The
// memory is asked for `share` bytes a step meanwhile.
template <int PARTS, bool LEAST, int R>
void add_steps(const Step<PARTS>* step, int64_t count, const Sums<PARTS> whole, const float* scale, const float* total,
               const uint8_t* ahead, int share, float* c) {
  __m512 sum[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) sum[r] = _mm512_loadu_ps(c + r * BLOCKS * LANES);
  for (int64_t j = 0; j < count; j++, step++, scale += ROWS, total += ROWS) {
    for (int i = 0; i < share; i += 64) __builtin_prefetch(ahead + j * share + i, 0, 3);
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      const __m512 by = _mm512_load_ps(step->scale[part]);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const __m512 found = _mm512_cvtepi32_ps(_mm512_load_si512(whole[j][part][r]));
        sum[r] = _mm512_fmadd_ps(found, _mm512_mul_ps(by, _mm512_set1_ps(scale[r])), sum[r]);
      }
    }
    if constexpr (LEAST) {
      const __m512 least = _mm512_load_ps(step->least);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sum[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(total[r]), sum[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) _mm512_storeu_ps(c + r * BLOCKS * LANES, sum[r]);
}

// 16 outputs that were unpacked for the first rows of many, for those that follow.
struct Kept16 {
  const uint8_t* of = nullptr;
  std::vector<char> steps;
};
thread_local Kept16 t_kept16[BLOCKS];

// Up to ROWS rows; `slot` says which this weight is of those that are computed together.
template <class F>
void block_tiles(const uint8_t* w, int64_t k, const Bytes& in, int64_t row, int rows, int slot, float* c) {
  constexpr int64_t MOST = STRETCH<F::PARTS>;
  constexpr int SHARE = Packed<F>::BYTES / Packed<F>::STEPS;
  const int64_t n = k / I8_BLOCK;
  const bool keep = in.rows > ROWS;
  Kept16& kept = t_kept16[slot];
  const bool packed = !keep || row == 0 || kept.of != w;
  Step<F::PARTS> few[MOST];
  alignas(64) Sums<F::PARTS> whole;
  if (keep) grow(kept.steps, (n + 1) * (int64_t)sizeof few[0]), kept.of = w;
  const auto all = (Step<F::PARTS>*)up((int64_t)kept.steps.data(), 64);
  const Panel panel = panel_of(in, row);
  for (int r = 0; r < ROWS; r++) std::memset(c + r * BLOCKS * LANES, 0, LANES * sizeof(float));
  use_tiles(TILES_OF_BYTES);
  for (int64_t j = 0; j < n; j += MOST) {
    const int64_t count = std::min(MOST, n - j), at = j * ROWS;
    Step<F::PARTS>* steps = keep ? all + j : few;
    if (packed) unpack_steps<F>(w, j, j + count, steps);
    multiply_steps<F::PARTS>(panel.x + at * (I8_BLOCK / 4), steps, count, whole);
    const auto add = rows > 8 ? add_steps<F::PARTS, F::LEAST, ROWS> : add_steps<F::PARTS, F::LEAST, 8>;
    add(steps, count, whole, panel.scale + at, panel.sum + at, w + (j + MOST) * SHARE, packed ? SHARE : 0, c);
  }
}

}  // namespace
#endif
