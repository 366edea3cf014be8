// Rows of x as bytes, and products of bytes (VNNI; on aarch64: block_products.h).

#pragma once

namespace {

static_assert(I8_BLOCK == K_STEP, "rows are padded to whole blocks");

// One block of one row: its bytes, four at a time, the scale, and the sums of the first half and of all. What is no
// number stays in the scale.
inline int32_t round_block(const bf16* x, int32_t* y, int64_t rows, float* scale, int32_t* half) {
  int32_t four[I8_BLOCK / 4], first, total;
  // Sizes of bf16 numbers are in the order of their bits, of which those of no number are the largest.
  uint16_t bits = 0;
#if defined(__AVX2__)
  const __m256i size = _mm256_set1_epi16(0x7fff), lower = _mm256_loadu_si256((const __m256i*)x),
                upper = _mm256_loadu_si256((const __m256i*)(x + 16));
  const __m256i of_two = _mm256_max_epu16(_mm256_and_si256(lower, size), _mm256_and_si256(upper, size));
  const __m128i of_four = _mm_max_epu16(_mm256_castsi256_si128(of_two), _mm256_extracti128_si256(of_two, 1));
  bits = ~(uint16_t)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(of_four, _mm_set1_epi16(-1))));
#else
  for (int i = 0; i < I8_BLOCK; i++) bits = std::max<uint16_t>(bits, x[i] & 0x7fff);
#endif
  const float most = wide((bf16)bits);
  const bool number = bits < 0x7f80;
  const bool sound = number && most > 1e-30f;  // so that 127 / most is a number, too
  const float by = sound ? 127.0f / most : 0.0f;
#if defined(__AVX2__)
#if PL_AVX512
  const __mmask16 all = sound ? 0xffff : 0;
  const auto sixteen = [&](int i) {
    return _mm512_cvtsepi32_epi8(_mm512_maskz_cvtps_epi32(all, _mm512_mul_ps(load_wide(x + i), _mm512_set1_ps(by))));
  };
  const __m256i bytes = _mm256_set_m128i(sixteen(16), sixteen(0));
#else
  const auto sixteen = [&](int i) {
    const v16 y = load_wide(x + i) * splat(by);
    return _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)y.p[0]), _mm256_cvtps_epi32((__m256)y.p[1]));
  };
  __m256i bytes = _mm256_packs_epi16(sixteen(0), sixteen(16));  // in fours that are out of order
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  if (!sound) bytes = _mm256_setzero_si256();
#endif
  _mm256_storeu_si256((__m256i*)four, bytes);
  const __m256i raised = _mm256_xor_si256(bytes, _mm256_set1_epi8((char)0x80));
  const __m256i sums = _mm256_sad_epu8(raised, _mm256_setzero_si256());  // of eight bytes each, 8 * 128 too large
  const __m256i pairs = _mm256_add_epi64(sums, _mm256_unpackhi_epi64(sums, sums));
  first = _mm256_extract_epi32(pairs, 0) - 16 * 128, total = first + _mm256_extract_epi32(pairs, 4) - 16 * 128;
#elif defined(__aarch64__)
  int8x16_t bytes[2];
  for (int i = 0; i < 2; i++) {
    const v16 y = load_wide(x + i * 16) * splat(by);  // what is no number becomes 0
    const auto eight = [&](int j) {
      const int32x4_t low = vcvtnq_s32_f32((float32x4_t)y.p[j]), high = vcvtnq_s32_f32((float32x4_t)y.p[j + 1]);
      return vmovn_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high)));
    };
    bytes[i] = vcombine_s8(eight(0), eight(2));
  }
  std::memcpy(four, bytes, sizeof four);
  first = vaddlvq_s8(bytes[0]), total = first + vaddlvq_s8(bytes[1]);
#else
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

// `order` is that of a Linear.
void round_rows(const bf16* x, int64_t stride, int64_t rows, int64_t k, const int32_t* order, bool tiled, Bytes& y) {
  y.rows = rows, y.blocks = k / I8_BLOCK, y.tiled = tiled;
  const int64_t blocks = y.blocks, sums = up(rows, y.panel()) * blocks;
  grow(y.x, sums * I8_BLOCK / 4), grow(y.scale, sums), grow(y.sum, sums);
  for (auto& start : y.start) grow(start, sums);
  for (int64_t panel = 0; panel < rows; panel += y.panel()) {
    const int width = y.width(panel), step = tiled ? 1 : width, next = tiled ? I8_BLOCK / 4 : 1;  // of four, of rows
    for (int64_t b = 0; b < blocks; b++)
      for (int r = 0; r < width; r++) {
        const int64_t at = panel * blocks + b * width + r;
        int32_t *bytes = &y.x[(panel * blocks + b * width) * (I8_BLOCK / 4) + r * next], first = 0, total = 0;
        if (panel + r < rows) {
          const bf16 *row = x + (panel + r) * stride, *block = row + b * I8_BLOCK;
          bf16 gathered[I8_BLOCK];
          if (order) {
            for (int i = 0; i < I8_BLOCK; i++) gathered[i] = row[order[b * I8_BLOCK + i]];
            block = gathered;
          }
          total = round_block(block, bytes, step, &y.scale[at], &first);
        } else {
          for (int i = 0; i < I8_BLOCK / 4; i++) bytes[i * step] = 0;
          y.scale[at] = 0;
        }
        y.start[Bytes::BY_128][at] = -128 * total, y.sum[at] = y.scale[at] * (float)total;
        if (tiled) continue;  // tiles need no more
        y.start[Bytes::BY_16][at] = -16 * total;
        y.start[Bytes::BY_8][at] = -8 * total, y.start[Bytes::BY_1][at] = -total;
        y.start[Bytes::FIRST_BY_32][at] = -32 * first, y.start[Bytes::SECOND_BY_32][at] = -32 * (total - first);
      }
  }
}

#if PL_VNNI
// sum + the products of 16 times four codes with the same four bytes of x. The instruction reads these bytes itself:
// compilers make a register of them first, and of these there are too few.
[[gnu::always_inline]] inline __m512i dot_bytes(__m512i sum, __m512i codes, const int32_t& x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(x));
  return sum;
}

// R rows, a panel, against B weight blocks; a block's sum is exact, and blocks are added one after the other. Of what
// is needed next B weight blocks are asked for, those from `first` on.
template <int R, int B>
void byte_product(const int8_t* const w[], int64_t blocks, const Panel& in, float* c, const Next& next, int first) {
  const int32_t *x = in.x, *start = in.start[Bytes::BY_128];
  const float* scale = in.scale;
  const int8_t* lines[B];
  const char* then[B];
  for (int b = 0; b < B; b++) lines[b] = w[b], then[b] = next.stream(first + b, w[b]);
  __m512 sum[R][B];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) sum[r][b] = _mm512_setzero_ps();
  for (int64_t j = 0; j < blocks; j++, x += I8_BLOCK / 4 * R, start += R, scale += R) {
    __m512i whole[R][B];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++) whole[r][b] = _mm512_set1_epi32(start[r]);
#pragma GCC unroll 8
    for (int i = 0; i < I8_BLOCK / 4; i++) {
      __m512i line[B];
      for (int b = 0; b < B; b++) {
        line[b] = _mm512_loadu_si512(lines[b] + i * 4 * LANES);
        __builtin_prefetch(then[b] + i * 64, 0, 2);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) whole[r][b] = dot_bytes(whole[r][b], line[b], x[i * R + r]);
    }
    for (int b = 0; b < B; b++) lines[b] += I8_BLOCK * LANES, then[b] += I8_BLOCK * LANES;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++)
        sum[r][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[r][b]), _mm512_set1_ps(scale[r]), sum[r][b]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) _mm512_storeu_ps(c + r * BLOCKS * LANES + b * LANES, sum[r][b]);
}

template <int R, int B> void byte_rows(const int8_t* const w[], int blocks, int64_t k, const Panel& in, float* c,
                                       const Next& next) {
  int b = 0;
  for (; b + B <= blocks; b += B) byte_product<R, B>(w + b, k / I8_BLOCK, in, c + b * LANES, next, b);
  for (; b < blocks; b++) byte_product<R, 1>(w + b, k / I8_BLOCK, in, c + b * LANES, next, b);
}

// Few rows read several streams of weights at once; of more rows a block stays in the cache for the next eight.
void byte_products(const int8_t* const w[], int blocks, int64_t k, const Bytes& in, int64_t row, int rows, float* c,
                   const Next& next) {
  if (rows <= 4) {
    const Panel panel = panel_of(in, row);
    if (panel.width == 1) byte_rows<1, 4>(w, blocks, k, panel, c, next);
    else if (panel.width == 2) byte_rows<2, 4>(w, blocks, k, panel, c, next);
    else byte_rows<4, 2>(w, blocks, k, panel, c, next);
    return;
  }
  for (int b = 0; b < blocks; b++)
    for (int r = 0; r < rows; r += 8) {
      const Panel panel = panel_of(in, row + r);
      const Next ask = r ? Next{} : next;
      float* y = c + r * BLOCKS * LANES + b * LANES;
      if (panel.width == 8) byte_product<8, 1>(w + b, k / I8_BLOCK, panel, y, ask, b);
      else if (panel.width == 6) byte_product<6, 1>(w + b, k / I8_BLOCK, panel, y, ask, b);
      else if (panel.width == 4) byte_product<4, 1>(w + b, k / I8_BLOCK, panel, y, ask, b);
      else if (panel.width == 2) byte_product<2, 1>(w + b, k / I8_BLOCK, panel, y, ask, b);
      else byte_product<1, 1>(w + b, k / I8_BLOCK, panel, y, ask, b);
    }
}
#endif

}  // namespace
