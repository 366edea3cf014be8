// Products of rows of x with weights in blocks; see blocks.h for the order in which they are added.

#pragma once

#if !defined(PL_VNNI) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PL_AVX2 1
#endif

namespace {

template <class F> constexpr Bytes::Start start_of(int part) {
  if (F::PARTS == 2) return part ? Bytes::SECOND_BY_32 : Bytes::FIRST_BY_32;
  return F::ZERO ? Bytes::BY_1 : F::SHIFT == 4 ? Bytes::BY_8 : F::SHIFT == 3 ? Bytes::BY_16 : Bytes::BY_128;
}

#if PL_VNNI
inline __m512 halves16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline __m512 bytes16(const uint8_t* p, bool sign) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return _mm512_cvtepi32_ps(sign ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}
// 2^(e - 128), as ggml has it.
inline __m512 exponents16(const uint8_t* p) {
  const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), one = _mm512_set1_epi32(1);
  const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, one), 23);
  const __mmask16 small = _mm512_cmple_epi32_mask(e, one);
  return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, small, _mm512_set1_epi32(0x200000), e));
}

struct Codes {  // of 32 inputs, 0 and more
  __m512i line[I8_BLOCK / 4];
};
template <class F> [[gnu::always_inline]] inline Codes codes_of(const uint8_t* w) {
  Codes codes;
  if constexpr (F::BITS == 8)
    for (int i = 0; i < 8; i++) codes.line[i] = _mm512_loadu_si512(w + i * LINE);
  else {
    const __m512i lower = _mm512_set1_epi8(15);
    for (int i = 0; i < 4; i++) {
      const __m512i both = _mm512_loadu_si512(w + i * LINE);
      codes.line[i] = _mm512_and_si512(both, lower);
      codes.line[i + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), lower);
    }
  }
  if constexpr (F::TABLE != nullptr) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)F::TABLE));
    for (int i = 0; i < 8; i++) codes.line[i] = _mm512_shuffle_epi8(table, codes.line[i]);
  }
  if constexpr (F::BITS == 5)
    for (int i = 0; i < 8; i++) {
      uint64_t mask;
      std::memcpy(&mask, w + Packed<F>::UPPER + i * 8, 8);
      codes.line[i] = _mm512_mask_add_epi8(codes.line[i], mask, codes.line[i], _mm512_set1_epi8(16));
    }
  if constexpr (F::BITS == 6) {
    const __m512i mask = _mm512_set1_epi8(48);
    for (int i = 0; i < 8; i += 4) {
      const __m512i upper = _mm512_loadu_si512(w + Packed<F>::UPPER + i / 4 * LINE);
      const __m512i moved[4] = {_mm512_slli_epi16(upper, 4), _mm512_slli_epi16(upper, 2), upper,
                                _mm512_srli_epi16(upper, 2)};
      for (int j = 0; j < 4; j++)
        codes.line[i + j] = _mm512_or_si512(codes.line[i + j], _mm512_and_si512(moved[j], mask));
    }
  }
  return codes;
}

// Of step `step` of a block.
template <class F> [[gnu::always_inline]] inline __m512 scale_of(const uint8_t* block, int step, int part) {
  using P = Packed<F>;
  const uint8_t* at = block + P::scales(step, part);
  if constexpr (F::SCALE == HALF) return halves16(at);
  else if constexpr (F::SCALE == EXPONENT) return exponents16(at);
  else return _mm512_mul_ps(halves16(block + P::FACTORS), bytes16(at, F::SCALE == SIGNED));
}
template <class F> [[gnu::always_inline]] inline __m512 least_of(const uint8_t* block, int step) {
  using P = Packed<F>;
  const uint8_t* at = block + P::LEASTS + step * P::WIDTH;
  if constexpr (F::SCALE == HALF) return halves16(at);
  else {
    const __m512 below = _mm512_mul_ps(halves16(block + P::FACTORS + 2 * LANES), bytes16(at, false));
    return _mm512_sub_ps(_mm512_setzero_ps(), below);
  }
}

// The zeros of a block: times a row's negative sum, which both fit 16 bits.
template <class F> [[gnu::always_inline]] inline __m512i zeros_of(const uint8_t* block) {
  if constexpr (!F::ZERO) return _mm512_setzero_si512();
  else return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(block + Packed<F>::ZEROS)));
}

// So many bytes before their use weights are asked for. One to four rows wait for memory: early, into the second-level
// cache, since there are too few places in which the first one waits. More rows compute for as long as it takes: into
// the first one. Measured.
template <int R> constexpr int ASKED_AHEAD = R > 4 ? 2048 : 8192;
template <int R> constexpr int ASKED_INTO = R > 4 ? 3 : 2;

// R rows, a panel, against a block after the other of 16 outputs. What is asked for ahead may lie behind the last one:
// the next 16 outputs, which come next.
template <class F, int R> void block_product(const uint8_t* w, int64_t k, const Panel& in, float* c) {
  using P = Packed<F>;
  const int32_t *x = in.x, *start[] = {in.start[start_of<F>(0)], in.start[start_of<F>(1)]};
  const float *scale = in.scale, *sums = in.sum;
  constexpr int LINES = 8 / F::PARTS, SHARE = (P::BYTES + P::STEPS - 1) / P::STEPS;  // bytes of 32 inputs
  constexpr int AHEAD = ASKED_AHEAD<R> + (P::STEPS > 1 ? P::SCALES : 0);  // the first step needs the scales of all
  __m512 sum[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_ps();
  for (int64_t b = k / F::VALUES; b; b--, w += P::BYTES)
    for (int step = 0; step < P::STEPS; step++, x += 8 * R, scale += R, sums += R) {
      for (int i = 0; i < SHARE; i += 64) __builtin_prefetch(w + AHEAD + step * SHARE + i, 0, ASKED_INTO<R>);
      const Codes codes = codes_of<F>(w + step * P::STEP);
      const __m512i zeros = zeros_of<F>(w);
#pragma GCC unroll 2
      for (int part = 0; part < F::PARTS; part++) {
        __m512i whole[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          whole[r] = F::SHIFT < 0 && !F::ZERO ? _mm512_setzero_si512() : _mm512_set1_epi32(start[part][r]);
          if (F::ZERO) whole[r] = _mm512_madd_epi16(zeros, whole[r]);
        }
        start[part] += R;
#pragma GCC unroll 8
        for (int i = part * LINES; i < (part + 1) * LINES; i++)
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) whole[r] = dot_bytes(whole[r], codes.line[i], x[i * R + r]);
        const __m512 by = scale_of<F>(w, step, part);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
          sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[r]), _mm512_mul_ps(by, _mm512_set1_ps(scale[r])), sum[r]);
      }
      if constexpr (F::LEAST) {
        const __m512 least = least_of<F>(w, step);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(sums[r]), sum[r]);
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) _mm512_storeu_ps(c + r * BLOCKS * LANES, sum[r]);
}
#elif PL_AVX2
// Eight outputs, half a line, at a time.
inline __m256 halves8(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline __m256 bytes8(const uint8_t* p, bool sign) {
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
  return _mm256_cvtepi32_ps(sign ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}
template <class F> [[gnu::always_inline]] inline __m256 scale_of(const uint8_t* block, int step, int part, int half) {
  using P = Packed<F>;
  const uint8_t* at = block + P::scales(step, part);
  if constexpr (F::SCALE == HALF) return halves8(at + half * 16);
  else if constexpr (F::SCALE == EXPONENT) {  // see exponents16
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(at + half * 8))), one = _mm256_set1_epi32(1);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), e);
    return (__m256)_mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(e, one));
  } else
    return _mm256_mul_ps(halves8(block + P::FACTORS + half * 16), bytes8(at + half * 8, F::SCALE == SIGNED));
}
template <class F> [[gnu::always_inline]] inline __m256 least_of(const uint8_t* block, int step, int half) {
  using P = Packed<F>;
  const uint8_t* at = block + P::LEASTS + step * P::WIDTH;
  if constexpr (F::SCALE == HALF) return halves8(at + half * 16);
  else {
    const __m256 below =
        _mm256_mul_ps(halves8(block + P::FACTORS + 2 * LANES + half * 16), bytes8(at + half * 8, false));
    return _mm256_sub_ps(_mm256_setzero_ps(), below);
  }
}

// The zeros of a block: times a row's negative sum, which both fit 16 bits.
template <class F> [[gnu::always_inline]] inline __m256i zeros_of(const uint8_t* block, int half) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(block + Packed<F>::ZEROS + half * 8)));
}

// Line `i` of a step: codes of 0 and more.
template <class F> [[gnu::always_inline]] inline __m256i codes_of(const uint8_t* w, int i, int half) {
  const auto line = [&](int at) { return _mm256_loadu_si256((const __m256i*)(w + at + half * 32)); };
  if constexpr (F::BITS == 8) return line(i * LINE);
  const __m256i both = line(i % 4 * LINE);
  __m256i codes = _mm256_and_si256(i < 4 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
  if constexpr (F::TABLE != nullptr) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)F::TABLE));
    codes = _mm256_shuffle_epi8(table, codes);
  }
  if constexpr (F::BITS == 5) {
    int32_t bits;
    std::memcpy(&bits, w + Packed<F>::UPPER + i * 8 + half * 4, 4);
    const __m256i byte = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i own = _mm256_set1_epi64x((int64_t)0x8040201008040201);  // its bit of that byte
    const __m256i found = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte), own);
    codes = _mm256_or_si256(codes, _mm256_and_si256(_mm256_cmpeq_epi8(found, own), _mm256_set1_epi8(16)));
  }
  if constexpr (F::BITS == 6) {
    const __m256i upper = line(Packed<F>::UPPER + i / 4 * LINE);
    const __m256i moved = i % 4 == 0   ? _mm256_slli_epi16(upper, 4)
                          : i % 4 == 1 ? _mm256_slli_epi16(upper, 2)
                          : i % 4 == 2 ? upper
                                       : _mm256_srli_epi16(upper, 2);
    codes = _mm256_or_si256(codes, _mm256_and_si256(moved, _mm256_set1_epi8(48)));
  }
  return codes;
}

// Codes times bytes of x are added up in 32 bits. Without an instruction for that they are added in 16 bits first:
// products of two codes of 4 bits fit eight times, of 5 bits four times, of 6 bits twice, and of 8 bits once, with the
// code's sign moved to x.
#if defined(__AVXVNNI__)
template <class F> constexpr bool SIGNED_CODES = false;
template <class F> constexpr int IN_16_BITS = 1;
#else
template <class F> constexpr bool SIGNED_CODES = F::BITS == 8 || F::TABLE != nullptr;
template <class F> constexpr int IN_16_BITS = SIGNED_CODES<F> ? 1 : F::BITS == 4 ? 8 : F::BITS == 5 ? 4 : 2;
#endif

// Keeps a value in a register at this place: compilers regroup the sums of a step into a tree, and keep an address for
// each of its rows; neither fits 16 registers.
[[gnu::always_inline]] inline void here(__m256i& x) { asm("" : "+x"(x)); }
[[gnu::always_inline]] inline void here(const int32_t*& x) { asm("" : "+r"(x)); }

// R rows, from `row` of a panel on, against H halves of 16 outputs, from half `half` on, and `blocks` blocks of inputs,
// of which the first begins with step `first` of x: what comes before that is in c already. Asks for the weights that
// are `ahead` bytes further on; 0: for none.
template <class F, int R, int H>
void block_product(const uint8_t* w, int64_t blocks, int64_t first, const Panel& in, int row, int half, float* c,
                   int64_t ahead) {
  using P = Packed<F>;
  constexpr int LINES = 8 / F::PARTS, FEW = std::min(IN_16_BITS<F>, LINES);
  constexpr int SHARE = (P::BYTES + P::STEPS - 1) / P::STEPS;  // bytes of a step
  const int width = in.width;
  const int32_t* x = in.x + first * 8 * width + row;
  int64_t at = first * width + row;
  c += half * 8;
  __m256 sum[H][R];
#pragma GCC unroll 8
  for (int h = 0; h < H; h++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      sum[h][r] = first ? _mm256_loadu_ps(c + r * BLOCKS * LANES + h * 8) : _mm256_setzero_ps();
  for (; blocks; blocks--, w += P::BYTES)
    for (int step = 0; step < P::STEPS; step++, x += 8 * width, at += width) {
      if (ahead)
        for (int i = 0; i < SHARE; i += LINE) __builtin_prefetch(w + ahead + step * SHARE + i, 0, 3);
#pragma GCC unroll 2
      for (int h = 0; h < H; h++) {
#pragma GCC unroll 2
        for (int part = 0; part < F::PARTS; part++) {
          __m256i whole[R];
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            whole[r] = (F::SHIFT < 0 && !F::ZERO) || SIGNED_CODES<F>
                           ? _mm256_setzero_si256()
                           : _mm256_set1_epi32(in.start[start_of<F>(part)][at + r]);
            if (F::ZERO) whole[r] = _mm256_madd_epi16(zeros_of<F>(w, half + h), whole[r]);
          }
          const int32_t* at_x = x + part * LINES * width;
#pragma GCC unroll 8
          for (int i = part * LINES; i < (part + 1) * LINES; i += FEW) {
#if defined(__AVXVNNI__)
            const __m256i codes = codes_of<F>(w + step * P::STEP, i, half + h);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
              whole[r] = _mm256_dpbusd_avx_epi32(whole[r], codes, _mm256_set1_epi32(at_x[r]));
            at_x += width, here(at_x);
#else
            __m256i few[R];
#pragma GCC unroll 8
            for (int j = 0; j < FEW; j++, at_x += width) {
              __m256i codes = codes_of<F>(w + step * P::STEP, i + j, half + h), sizes = codes;
              if (SIGNED_CODES<F>)
                codes = _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80)), sizes = _mm256_abs_epi8(codes);
              here(at_x);
#pragma GCC unroll 8
              for (int r = 0; r < R; r++) {
                __m256i bytes = _mm256_set1_epi32(at_x[r]);
                if (SIGNED_CODES<F>) bytes = _mm256_sign_epi8(bytes, codes);
                const __m256i pairs = _mm256_maddubs_epi16(sizes, bytes);
                few[r] = j ? _mm256_add_epi16(few[r], pairs) : pairs;
                here(few[r]);
              }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
              whole[r] = _mm256_add_epi32(whole[r], _mm256_madd_epi16(few[r], _mm256_set1_epi16(1)));
#endif
          }
          const __m256 by = scale_of<F>(w, step, part, half + h);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            const __m256 scale = _mm256_mul_ps(by, _mm256_set1_ps(in.scale[at + r]));
            sum[h][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[r]), scale, sum[h][r]);
          }
        }
        if constexpr (F::LEAST) {
          const __m256 least = least_of<F>(w, step, half + h);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) sum[h][r] = _mm256_fmadd_ps(least, _mm256_set1_ps(in.sum[at + r]), sum[h][r]);
        }
      }
    }
#pragma GCC unroll 8
  for (int h = 0; h < H; h++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) _mm256_storeu_ps(c + r * BLOCKS * LANES + h * 8, sum[h][r]);
}
#elif defined(__aarch64__)
// Four outputs, a quarter of a line, at a time.
inline float32x4_t halves4(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
inline uint32x4_t bytes4(const uint8_t* p) {
  return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word(p, 0)))));
}
template <class F> [[gnu::always_inline]] inline float32x4_t scale_of(const uint8_t* block, int step, int part, int q) {
  using P = Packed<F>;
  const uint8_t* at = block + P::scales(step, part) + q * (P::WIDTH / 4);
  if constexpr (F::SCALE == HALF) return halves4(at);
  else if constexpr (F::SCALE == EXPONENT) {  // see exponents16
    const uint32x4_t e = bytes4(at), one = vdupq_n_u32(1), normal = vshlq_n_u32(vsubq_u32(e, one), 23);
    const uint32x4_t small = vshlq_u32(vdupq_n_u32(0x200000), vreinterpretq_s32_u32(e));
    return vreinterpretq_f32_u32(vbslq_u32(vcgtq_u32(e, one), normal, small));
  } else {
    const uint32x4_t bytes = bytes4(at);
    const int32x4_t sign = vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_u32(bytes), 24), 24);
    return vmulq_f32(halves4(block + P::FACTORS + q * 8),
                     F::SCALE == SIGNED ? vcvtq_f32_s32(sign) : vcvtq_f32_u32(bytes));
  }
}
template <class F> [[gnu::always_inline]] inline float32x4_t least_of(const uint8_t* block, int step, int q) {
  using P = Packed<F>;
  const uint8_t* at = block + P::LEASTS + step * P::WIDTH + q * (P::WIDTH / 4);
  if constexpr (F::SCALE == HALF) return halves4(at);
  else {
    const float32x4_t below = vmulq_f32(halves4(block + P::FACTORS + 2 * LANES + q * 8), vcvtq_f32_u32(bytes4(at)));
    return vsubq_f32(vdupq_n_f32(0), below);
  }
}

// Codes of 8 bits and those of a table less what stands for zero; others as they are, 0 and more.
template <class F> constexpr bool SIGNED_CODES = F::BITS == 8 || F::TABLE != nullptr;
template <class F> [[gnu::always_inline]] inline int8x16_t codes_of(const uint8_t* w, int i, int q) {
  const uint8x16_t high = vdupq_n_u8(0x80);
  if constexpr (F::BITS == 8) return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + i * LINE + q * 16), high));
  const uint8x16_t both = vld1q_u8(w + i % 4 * LINE + q * 16);
  uint8x16_t codes = i < 4 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4);
  if constexpr (F::TABLE != nullptr) codes = vqtbl1q_u8(veorq_u8(vld1q_u8(F::TABLE), high), codes);
  if constexpr (F::BITS == 5) {
    constexpr uint8_t BYTE[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    constexpr uint8_t OWN[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};  // its bit of that byte
    uint16_t bits;
    std::memcpy(&bits, w + Packed<F>::UPPER + i * 8 + q * 2, 2);
    const uint8x16_t of_byte = vqtbl1q_u8(vreinterpretq_u8_u16(vdupq_n_u16(bits)), vld1q_u8(BYTE));
    codes = vorrq_u8(codes, vandq_u8(vtstq_u8(of_byte, vld1q_u8(OWN)), vdupq_n_u8(16)));
  }
  if constexpr (F::BITS == 6) {
    const uint8x16_t upper = vld1q_u8(w + Packed<F>::UPPER + i / 4 * LINE + q * 16);
    codes = vorrq_u8(codes, vandq_u8(vshlq_u8(upper, vdupq_n_s8((int8_t)(4 - i % 4 * 2))), vdupq_n_u8(48)));
  }
  return vreinterpretq_s8_u8(codes);
}

// The same four bytes of R rows of x: of four rows in a lane each, of fewer in turns.
template <int R> [[gnu::always_inline]] inline int32x4_t rows_of(const int32_t* x) {
  if constexpr (R == 4) return vld1q_s32(x);
  else if constexpr (R == 2) return vcombine_s32(vld1_s32(x), vld1_s32(x));
  else return vdupq_n_s32(*x);
}
// sum + the products of 4 times four codes with the four bytes of row r.
[[gnu::always_inline]] inline int32x4_t dot_bytes(int32x4_t sum, int8x16_t codes, int32x4_t rows, int r) {
  const int8x16_t x = vreinterpretq_s8_s32(rows);
#if PL_NEON_DOTS
  switch (r) {  // the number of a lane is a part of the instruction
    case 0: return vdotq_laneq_s32(sum, codes, x, 0);
    case 1: return vdotq_laneq_s32(sum, codes, x, 1);
    case 2: return vdotq_laneq_s32(sum, codes, x, 2);
    default: return vdotq_laneq_s32(sum, codes, x, 3);
  }
#else
  const int8x8_t own = vreinterpret_s8_s32(vdup_n_s32(vreinterpretq_s32_s8(x)[r]));
  const int16x8_t low = vmull_s8(vget_low_s8(codes), own), high = vmull_s8(vget_high_s8(codes), own);
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

// As with AVX2: a half is two quarters. From two rows on, where there are products of matrices of bytes, [2 rows][8
// inputs] by [8 inputs][2 outputs], two lines are turned into these.
template <class F, int R, int H>
void block_product(const uint8_t* w, int64_t blocks, int64_t first, const Panel& in, int row, int half, float* c,
                   int64_t ahead) {
  using P = Packed<F>;
  constexpr int LINES = 8 / F::PARTS, Q = 2 * H;
  constexpr int SHARE = (P::BYTES + P::STEPS - 1) / P::STEPS;  // bytes of a step
  const int width = in.width, from = 2 * half;
  const int32_t* x = in.x + first * 8 * width + row;
  int64_t at = first * width + row;
  c += half * 8;
  float32x4_t sum[Q][R];
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sum[q][r] = first ? vld1q_f32(c + r * BLOCKS * LANES + q * 4) : vdupq_n_f32(0);
  for (; blocks; blocks--, w += P::BYTES)
    for (int step = 0; step < P::STEPS; step++, x += 8 * width, at += width) {
      if (ahead)
        for (int i = 0; i < SHARE; i += LINE) __builtin_prefetch(w + ahead + step * SHARE + i, 0, 3);
      const uint8_t* lines = w + step * P::STEP;
#pragma GCC unroll 2
      for (int part = 0; part < F::PARTS; part++) {
        int32x4_t whole[Q][R];
#pragma GCC unroll 8
        for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) whole[q][r] = vdupq_n_s32(0);
#if defined(__ARM_FEATURE_MATMUL_INT8)
        if constexpr (R > 1) {
#pragma GCC unroll 8
          for (int i = part * LINES; i < (part + 1) * LINES; i += 2) {
            const int32x4_t x0 = rows_of<R>(x + i * width), x1 = rows_of<R>(x + (i + 1) * width);
            const int8x16_t pair[2] = {(int8x16_t)vzip1q_s32(x0, x1), (int8x16_t)vzip2q_s32(x0, x1)};
#pragma GCC unroll 8
            for (int q = 0; q < Q; q++) {
              const int32x4_t c0 = (int32x4_t)codes_of<F>(lines, i, from + q),
                              c1 = (int32x4_t)codes_of<F>(lines, i + 1, from + q);
              const int8x16_t outputs[2] = {(int8x16_t)vzip1q_s32(c0, c1), (int8x16_t)vzip2q_s32(c0, c1)};
#pragma GCC unroll 8
              for (int r = 0; r < R; r++) whole[q][r] = vmmlaq_s32(whole[q][r], pair[r / 2], outputs[r % 2]);
            }
          }
#pragma GCC unroll 8
          for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r += 2) {
              const int64x2_t a = (int64x2_t)whole[q][r], b = (int64x2_t)whole[q][r + 1];
              whole[q][r] = (int32x4_t)vtrn1q_s64(a, b), whole[q][r + 1] = (int32x4_t)vtrn2q_s64(a, b);
            }
        } else
#endif
#pragma GCC unroll 8
          for (int i = part * LINES; i < (part + 1) * LINES; i++) {
            const int32x4_t four = rows_of<R>(x + i * width);
#pragma GCC unroll 8
            for (int q = 0; q < Q; q++) {
              const int8x16_t codes = codes_of<F>(lines, i, from + q);
#pragma GCC unroll 8
              for (int r = 0; r < R; r++) whole[q][r] = dot_bytes(whole[q][r], codes, four, r);
            }
          }
#pragma GCC unroll 8
        for (int q = 0; q < Q; q++) {
          float32x4_t by = vdupq_n_f32(1);
          if constexpr (F::SCALE != NO_SCALE) by = scale_of<F>(w, step, part, from + q);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            const int32_t start = in.start[start_of<F>(part)][at + r];
            if constexpr (F::ZERO)
              whole[q][r] = vmlaq_n_s32(whole[q][r], (int32x4_t)bytes4(w + P::ZEROS + (from + q) * 4), start);
            else if constexpr (F::SHIFT >= 0 && !SIGNED_CODES<F>)
              whole[q][r] = vaddq_s32(whole[q][r], vdupq_n_s32(start));
            sum[q][r] = vfmaq_f32(sum[q][r], vcvtq_f32_s32(whole[q][r]), vmulq_n_f32(by, in.scale[at + r]));
          }
        }
      }
      if constexpr (F::LEAST)
#pragma GCC unroll 8
        for (int q = 0; q < Q; q++) {
          const float32x4_t least = least_of<F>(w, step, from + q);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) sum[q][r] = vfmaq_n_f32(sum[q][r], least, in.sum[at + r]);
        }
    }
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) vst1q_f32(c + r * BLOCKS * LANES + q * 4, sum[q][r]);
}
#else
// Up to ROWS rows, whose sums lie in c.
template <class F>
void block_product(const uint8_t* w, int64_t k, const Bytes& in, int64_t row, int rows, float* c) {
  using P = Packed<F>;
  constexpr int PART = I8_BLOCK / F::PARTS;
  for (int r = 0; r < rows; r++) std::memset(c + r * BLOCKS * LANES, 0, LANES * sizeof(float));
  for (int64_t b = 0, j = 0; b < k / F::VALUES; b++, w += P::BYTES)
    for (int step = 0; step < P::STEPS; step++, j++) {
      int8_t codes[LANES][I8_BLOCK];
      float scales[F::PARTS][LANES], leasts[LANES];
      for (int lane = 0; lane < LANES; lane++) {
        for (int i = 0; i < I8_BLOCK; i++) codes[lane][i] = code_at<F>(w, step, lane, i);
        for (int part = 0; part < F::PARTS; part++) scales[part][lane] = scale_at<F>(w, step, part, lane);
        if (F::LEAST) leasts[lane] = least_at<F>(w, step, lane);
      }
      for (int r = 0; r < rows; r++) {
        const Panel panel = panel_of(in, row + r);
        const int64_t place = (row + r) % 8, at = j * panel.width + place;
        int8_t x[I8_BLOCK];
        for (int i = 0; i < 8; i++) std::memcpy(x + 4 * i, panel.x + (j * 8 + i) * panel.width + place, 4);
        for (int lane = 0; lane < LANES; lane++) {
          float& y = c[r * BLOCKS * LANES + lane];
          for (int part = 0; part < F::PARTS; part++) {
            int32_t whole = 0;
            for (int i = part * PART; i < (part + 1) * PART; i++) whole += codes[lane][i] * x[i];
            y = std::fma((float)whole, scales[part][lane] * panel.scale[at], y);
          }
          if (F::LEAST) y = std::fma(leasts[lane], panel.sum[at], y);
        }
      }
    }
}
#endif

// All rows of a product, a panel at a time where vectors compute: a block is unpacked once for it.
template <class F>
void block_products(const uint8_t* w, int64_t k, const Bytes& in, int64_t row, int rows, float* c) {
#if PL_VNNI
  for (; rows > 0; row += 8, rows -= 8, c += 8 * BLOCKS * LANES) {
    const Panel panel = panel_of(in, row);
    if (panel.width == 8) block_product<F, 8>(w, k, panel, c);
    else if (panel.width == 6) block_product<F, 6>(w, k, panel, c);
    else if (panel.width == 4) block_product<F, 4>(w, k, panel, c);
    else if (panel.width == 2) block_product<F, 2>(w, k, panel, c);
    else block_product<F, 1>(w, k, panel, c);
  }
#elif PL_AVX2 || defined(__aarch64__)
  // Of one and two rows all sums fit the registers. More rows take a half after the other, in parts of k that stay in the
  // first-level cache for all of them; the last sweep asks for the next part.
  constexpr int64_t MOST = 640 / F::VALUES;
  const int64_t total = k / F::VALUES, parts = (total + MOST - 1) / MOST;
  if (rows <= 2) {
    if (panel_of(in, row).width == 2) block_product<F, 2, 2>(w, total, 0, panel_of(in, row), 0, 0, c, 2048);
    else block_product<F, 1, 2>(w, total, 0, panel_of(in, row), 0, 0, c, 2048);
    return;
  }
  for (int64_t part = 0, b = 0, blocks; part < parts; part++, b += blocks, w += blocks * Packed<F>::BYTES) {
    blocks = (total - b) / (parts - part);
    const int64_t first = b * Packed<F>::STEPS;
    for (int from = 0; from < rows; from += 8) {
      const Panel panel = panel_of(in, row + from);
      for (int half = 0; half < 2; half++)
        for (int r = 0; r < panel.width; r += 4) {
          const bool last = half && r + 4 >= panel.width && from + 8 >= rows;
          const int64_t ahead = last ? blocks * Packed<F>::BYTES : 0;
          float* y = c + (from + r) * BLOCKS * LANES;
          if (panel.width - r >= 4) block_product<F, 4, 1>(w, blocks, first, panel, r, half, y, ahead);
          else if (panel.width - r == 2) block_product<F, 2, 1>(w, blocks, first, panel, r, half, y, ahead);
          else block_product<F, 1, 1>(w, blocks, first, panel, r, half, y, ahead);
        }
    }
  }
#else
  block_product<F>(w, k, in, row, rows, c);
#endif
}

}  // namespace
