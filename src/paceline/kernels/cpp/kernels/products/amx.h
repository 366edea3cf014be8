// Products on AMX tiles.

#pragma once

namespace {

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

// What the tiles are set for, and for how many rows.
enum Tiles { NO_TILES, TILES_OF_PAIRS, TILES_OF_BYTES, TILES_OF_HALVES };
thread_local struct { Tiles now = NO_TILES; int set = 0, rows = 0; } t_tiles;  // rows: of the stage, at most ROWS

void use_tiles(Tiles wanted, int rows) {
  if (t_tiles.now == wanted && t_tiles.set == rows) return;
  t_tiles.now = wanted, t_tiles.set = rows;
  TileConfig c;
  const int parts = wanted == TILES_OF_HALVES ? 2 : 1, depth = wanted == TILES_OF_PAIRS ? 16 : I8_BLOCK / 4 / parts;
  for (int t = 0; t < 4; t++) c.bytes[t] = 64, c.rows[t] = rows;  // 0-3: sums [rows, 16], float or int32
  // 4: x [rows, 32] bf16. Of bytes 4 and 5: x [rows, 32], or half of it.
  for (int t = 4; t < 6; t++) c.bytes[t] = depth * 4, c.rows[t] = rows;
  if (wanted == TILES_OF_PAIRS) c.bytes[5] = 64, c.rows[5] = depth;
  // Weights [pairs or fours of k, 16 outputs]; of pairs also 5.
  for (int t = 6; t < 8; t++) c.bytes[t] = 64, c.rows[t] = depth;
  load_tile_config(c);
}

template <int B> void amx_product(const bf16* const w[], int64_t k, Input<bf16> in, float* c) {
  use_tiles(TILES_OF_PAIRS, t_tiles.rows);
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

}  // namespace
