// Products on AMX tiles.

#pragma once

namespace {

#if PL_AMX
// 16 outputs by four of k -> two lines of 16 pairs. Stored weights are 128 too large; a small integer's float32 has
// nothing below its upper half, which is its bf16.
inline void widened(const int8_t* w, bf16* out) {
  const __m512i four = _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8((char)0x80));
  auto wide_as = [](__m512i x) { return (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(x, 24)); };
  const __m512i a = wide_as(_mm512_slli_epi32(four, 24)), b = wide_as(_mm512_slli_epi32(four, 16));
  const __m512i c = wide_as(_mm512_slli_epi32(four, 8)), d = wide_as(four);
  _mm512_storeu_si512(out, _mm512_or_si512(b, _mm512_srli_epi32(a, 16)));
  _mm512_storeu_si512(out + 32, _mm512_or_si512(d, _mm512_srli_epi32(c, 16)));
}
#endif

#if PL_AMX
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// gcc's own intrinsics do not say that the memory is read (the configuration's: PR 114098, mended in gcc 14; a tile's:
// never), so that the compiler may drop or delay the stores in front of them.
inline void load_tile_config(const TileConfig& c) { asm volatile("ldtilecfg %0" ::"m"(c)); }
#define tile_load(tile, base, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")

// What the tiles are set for: products of pairs take up to as many rows as the stage has.
enum Tiles { NO_TILES, TILES_OF_PAIRS, TILES_OF_BYTES };
thread_local struct { Tiles now = NO_TILES; int rows = 0; } t_tiles;

void use_tiles(Tiles wanted) {
  if (t_tiles.now == wanted) return;
  t_tiles.now = wanted;
  TileConfig c;
  if (wanted == TILES_OF_BYTES) {
    c.bytes[0] = 64, c.rows[0] = ROWS;          // 0: sums [rows, 16] int32
    c.bytes[4] = I8_BLOCK, c.rows[4] = ROWS;    // 4: x [rows, 32] bytes
    c.bytes[5] = 64, c.rows[5] = I8_BLOCK / 4;  // 5: codes [8 fours of k, 16 outputs]
    return load_tile_config(c);
  }
  const int rows = t_tiles.rows;
  for (int t = 0; t < 4; t++) c.bytes[t] = 64, c.rows[t] = rows;  // 0-3: sums [rows, 16] float
  c.bytes[4] = 64, c.rows[4] = rows;                              // 4: x [rows, 32] bf16
  for (int t = 5; t < 8; t++) c.bytes[t] = 64, c.rows[t] = 16;    // 5-7: weights [16 pairs of k, 16 outputs]
  load_tile_config(c);
}

template <int B> void amx_product(const bf16* const w[], int64_t k, Input<bf16> in, float* c) {
  use_tiles(TILES_OF_PAIRS);
  _tile_zero(0);
  if (B > 1) _tile_zero(1);
  if (B > 2) _tile_zero(2);
  if (B > 3) _tile_zero(3);
  const int64_t stride = in.stride * 2;
  for (int64_t i = 0; i < k; i += 32) {
    tile_load(4, in.x + i, stride);
    tile_load(5, w[0] + i * 16, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (B > 1) { tile_load(6, w[1] + i * 16, 64); _tile_dpbf16ps(1, 4, 6); }
    if (B > 2) { tile_load(7, w[2] + i * 16, 64); _tile_dpbf16ps(2, 4, 7); }
    if (B > 3) { tile_load(5, w[3] + i * 16, 64); _tile_dpbf16ps(3, 4, 5); }
  }
  const int64_t out = BLOCKS * LANES * 4;
  _tile_stored(0, c, out);
  if (B > 1) _tile_stored(1, c + 16, out);
  if (B > 2) _tile_stored(2, c + 32, out);
  if (B > 3) _tile_stored(3, c + 48, out);
}
#endif

#if PL_AMX
// The same for k = SHORT_K. The lines of a tile beyond it are zero and stay so.
template <int B> void amx_short(const bf16* const w[], Input<bf16> in, float* c) {
  alignas(64) static thread_local bf16 lines[BLOCKS][K_STEP * LANES];
  const bf16* whole[BLOCKS] = {lines[0], lines[1], lines[2], lines[3]};
  for (int b = 0; b < B; b++)
    for (int i = 0; i < SHORT_K * LANES; i += 32) _mm512_store_si512(lines[b] + i, _mm512_loadu_si512(w[b] + i));
  amx_product<B>(whole, K_STEP, in, c);
}
#endif

#if PL_AMX
// The same for int8 weights, which bf16 holds exactly: a stretch of k at a time becomes tiles in the first-level cache.
template <int B> void amx_product(const int8_t* const w[], int64_t k, Input<bf16> in, float* c) {
  constexpr int64_t WIDENED = 256;  // of k
  alignas(64) bf16 wide_w[BLOCKS][WIDENED * LANES];
  use_tiles(TILES_OF_PAIRS);
  _tile_zero(0);
  if (B > 1) _tile_zero(1);
  if (B > 2) _tile_zero(2);
  if (B > 3) _tile_zero(3);
  const int64_t stride = in.stride * 2;
  for (int64_t from = 0; from < k; from += WIDENED) {
    const int64_t length = std::min(WIDENED, k - from);
    for (int b = 0; b < B; b++)
      for (int64_t i = 0; i < length * LANES; i += 64) widened(w[b] + from * LANES + i, wide_w[b] + i);
    for (int64_t i = 0; i < length; i += 32) {
      tile_load(4, in.x + from + i, stride);
      tile_load(5, wide_w[0] + i * 16, 64);
      _tile_dpbf16ps(0, 4, 5);
      if (B > 1) { tile_load(6, wide_w[1] + i * 16, 64); _tile_dpbf16ps(1, 4, 6); }
      if (B > 2) { tile_load(7, wide_w[2] + i * 16, 64); _tile_dpbf16ps(2, 4, 7); }
      if (B > 3) { tile_load(5, wide_w[3] + i * 16, 64); _tile_dpbf16ps(3, 4, 5); }
    }
  }
  const int64_t out = BLOCKS * LANES * 4;
  _tile_stored(0, c, out);
  if (B > 1) _tile_stored(1, c + 16, out);
  if (B > 2) _tile_stored(2, c + 32, out);
  if (B > 3) _tile_stored(3, c + 48, out);
}
#endif

}  // namespace
