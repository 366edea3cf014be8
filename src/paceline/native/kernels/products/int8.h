// Rows of x as bytes, and products of bytes (VNNI).

#pragma once

namespace {

static_assert(I8_BLOCK == K_STEP, "rows are padded to whole blocks");

// One block of one row: its bytes, four at a time, the scale, and the sums of the first half and of all. What is no number stays in the scale.
inline int32_t round_block(const bf16* x, int32_t* y, int64_t rows, float* scale, int32_t* half) {
  int32_t four[I8_BLOCK / 4], first, total;
#if PL_AVX512
  const __m512 a = load_wide(x), b = load_wide(x + 16);
  const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
  const bool number =
      most <= FLT_MAX && !_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) && !_mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q);
  const bool sound = number && most > 1e-30f;  // so that 127 / most is a number, too
  const __m512 by = _mm512_set1_ps(sound ? 127.0f / most : 0.0f);
  const __mmask16 all = sound ? 0xffff : 0;
  const __m512i low = _mm512_maskz_cvtps_epi32(all, _mm512_mul_ps(a, by)),
                high = _mm512_maskz_cvtps_epi32(all, _mm512_mul_ps(b, by));
  _mm_storeu_si128((__m128i*)four, _mm512_cvtsepi32_epi8(low));
  _mm_storeu_si128((__m128i*)(four + 4), _mm512_cvtsepi32_epi8(high));
  first = _mm512_reduce_add_epi32(low), total = first + _mm512_reduce_add_epi32(high);
#else
  float most = 0;
  bool number = true;
  for (int i = 0; i < I8_BLOCK; i++) {
    const float size = std::fabs(wide(x[i]));
    number = number && size <= FLT_MAX;
    most = std::max(most, size);
  }
  const bool sound = number && most > 1e-30f;
  const float by = sound ? 127.0f / most : 0.0f;
  int8_t bytes[I8_BLOCK];
  first = total = 0;
  for (int i = 0; i < I8_BLOCK; i++) {
    total += bytes[i] = sound ? (int8_t)std::nearbyintf(wide(x[i]) * by) : 0;
    if (i < I8_BLOCK / 2) first = total;
  }
  std::memcpy(four, bytes, sizeof four);
#endif
  for (int i = 0; i < I8_BLOCK / 4; i++) y[i * rows] = four[i];
  *scale = sound ? most / 127.0f : number ? 0.0f : NAN, *half = first;
  return total;
}

void round_rows(const bf16* x, int64_t stride, int64_t rows, int64_t k, Bytes& y) {
  const int64_t blocks = k / I8_BLOCK;
  y.rows = rows;
  const int64_t sums = rows * blocks + 1;  // one more: see `block_products`
  grow(y.x, rows * k / 4 + 1), grow(y.scale, sums), grow(y.start, sums), grow(y.first, sums), grow(y.sum, sums);
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t r = 0; r < rows; r++) {
      const int64_t at = b * rows + r;
      const int32_t total =
          round_block(x + r * stride + b * I8_BLOCK, &y.x[b * I8_BLOCK / 4 * rows + r], rows, &y.scale[at], &y.first[at]);
      y.first[at] *= -128, y.start[at] = -128 * total, y.sum[at] = y.scale[at] * (float)total;
    }
}

#if PL_VNNI
// R rows against B weight blocks; a block's sum is exact, and blocks are added one after the other. Of what is needed
// next B weight blocks are asked for, those from `first` on.
template <int R, int B> void byte_product(const int8_t* const w[], int64_t k, const Bytes& in, int64_t row, float* c,
                                          const Next& next, int first) {
  const int64_t blocks = k / I8_BLOCK, rows = in.rows;
  const int32_t *x = in.x.data() + row, *start = in.start.data() + row;
  const float* scale = in.scale.data() + row;
  const int8_t* lines[B];
  for (int b = 0; b < B; b++) lines[b] = w[b];
  __m512 sum[R][B];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) sum[r][b] = _mm512_setzero_ps();
  Next mine = next;
  mine.blocks = std::min(next.blocks, first + B);
  for (int64_t j = 0; j < blocks; j++, start += rows, scale += rows) {
    for (int64_t i = 0; i < I8_BLOCK / 4; i++) mine.ask(j * I8_BLOCK / 4 + i, first);
    __m512i whole[R][B];
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++) whole[r][b] = _mm512_set1_epi32(start[r]);
#pragma GCC unroll 8
    for (int i = 0; i < I8_BLOCK / 4; i++, x += rows) {
      __m512i line[B];
      for (int b = 0; b < B; b++) line[b] = _mm512_loadu_si512(lines[b] + i * 4 * LANES);
      for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) whole[r][b] = _mm512_dpbusd_epi32(whole[r][b], line[b], _mm512_set1_epi32(x[r]));
    }
    for (int b = 0; b < B; b++) lines[b] += I8_BLOCK * LANES;
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++)
        sum[r][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[r][b]), _mm512_set1_ps(scale[r]), sum[r][b]);
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) _mm512_storeu_ps(c + r * BLOCKS * LANES + b * LANES, sum[r][b]);
}

template <int R, int B> void byte_rows(const int8_t* const w[], int blocks, int64_t k, const Bytes& in, int64_t row,
                                       float* c, const Next& next) {
  int b = 0;
  for (; b + B <= blocks; b += B) byte_product<R, B>(w + b, k, in, row, c + b * LANES, next, b);
  for (; b < blocks; b++) byte_product<R, 1>(w + b, k, in, row, c + b * LANES, next, b);
}

// Few rows read several streams of weights at once; many rows keep a block in the cache, eight rows at a time.
void byte_products(const int8_t* const w[], int blocks, int64_t k, const Bytes& in, int64_t row, int rows, float* c,
                   const Next& next) {
  if (rows <= 4) {
    if (rows == 1) byte_rows<1, 4>(w, blocks, k, in, row, c, next);
    else if (rows == 2) byte_rows<2, 4>(w, blocks, k, in, row, c, next);
    else if (rows == 3) byte_rows<3, 2>(w, blocks, k, in, row, c, next);
    else byte_rows<4, 2>(w, blocks, k, in, row, c, next);
    return;
  }
  for (int b = 0; b < blocks; b++) {
    int r = 0;
    float* y = c + b * LANES;
    const Next none{};
    for (; r + 8 <= rows; r += 8) byte_product<8, 1>(w + b, k, in, row + r, y + r * BLOCKS * LANES, r ? none : next, b);
    if (rows - r >= 4) byte_product<4, 1>(w + b, k, in, row + r, y + r * BLOCKS * LANES, r ? none : next, b), r += 4;
    if (rows - r == 1) byte_product<1, 1>(w + b, k, in, row + r, y + r * BLOCKS * LANES, none, b);
    else if (rows - r == 2) byte_product<2, 1>(w + b, k, in, row + r, y + r * BLOCKS * LANES, none, b);
    else if (rows - r == 3) byte_product<3, 1>(w + b, k, in, row + r, y + r * BLOCKS * LANES, none, b);
  }
}
#endif

}  // namespace
