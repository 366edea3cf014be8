// Products with weights in blocks of inputs that have scales of their own, as GGUF files have them, and AWQ and GPTQ.
//
// Packed are [outputs / 16][k / VALUES] blocks of 16 outputs. A block begins with its codes, 32 inputs after 32, in
// lines of 64 bytes: a line is [16 outputs][4 inputs]. Four lines hold the lower four bits, those of inputs 0 .. 15 in
// their lower halves and those of 16 .. 31 in their upper ones. A fifth bit stands in 64 bits for each four inputs; a
// fifth and a sixth stand in two lines. Behind all codes come the scales, the least values, the factors and the zeros, 16
// outputs side by side.
//
// Same bits everywhere. Rows of x are rounded to bytes by blocks of 32 (`round_rows`). The products of the codes that
// share a scale, less the zero times the sum of their x, make an exact integer; then, in this order over k and nowhere contracted otherwise,
//   sum = fma((float)whole, scale_w * scale_x, sum), and with least values sum = fma(least, scale_x * sum_x, sum).
// So neither the number of rows nor the instructions change a bit.

#pragma once

namespace {

inline float half(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  uint32_t bits;
  if (exponent == 31) bits = sign | 0x7f800000 | fraction << 13;
  else if (exponent) bits = sign | (exponent + 112) << 23 | fraction << 13;
  else {
    const float small = (float)fraction * 0x1p-24f;
    std::memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

constexpr int LINE = 64;  // bytes: four inputs of 16 outputs

// The formats. FILE: bytes of a block in a file. BITS: of a code. SHIFT: zero is code 128 >> SHIFT, or 0 below 0.
// SCALE: what a scale is. PARTS: scales of 32 inputs. WHOLE: a block has one scale. LEAST: whether there are least
// values. ZERO: whether a block has the code that stands for zero, below 16. codes(b, step, i): in a byte each, codes
// 4 i .. 4 i + 3 of these 32 inputs.
// SIX_BITS and SIGNED have a factor, a half, beside them.
enum Scale { HALF, SIX_BITS, SIGNED, EXPONENT, NO_SCALE };

constexpr uint8_t NL_CODES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t FP4_CODES[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

inline uint32_t word(const uint8_t* p, int i) {
  uint32_t four;
  std::memcpy(&four, p + 4 * i, 4);
  return four;
}
inline uint32_t nibbles(const uint8_t* p, int i) { return word(p, i % 4) >> i / 4 * 4 & 0x0f0f0f0f; }
// Four bits, behind 4 i others, as the fifth bits of four bytes.
inline uint32_t fifths(const uint8_t* p, int i) {
  const uint32_t bits = word(p, 0) >> 4 * i;
  return (bits & 1) << 4 | (bits & 2) << 11 | (bits & 4) << 18 | (bits & 8) << 25;
}

struct Q4_0 {
  static constexpr int TYPE = 2, VALUES = 32, FILE = 18, BITS = 4, SHIFT = 4, PARTS = 1;
  static constexpr Scale SCALE = HALF;
  static constexpr bool LEAST = false, WHOLE = false, ZERO = false;
  static constexpr const uint8_t* TABLE = nullptr;
  static uint32_t codes(const uint8_t* b, int, int i) { return nibbles(b + 2, i); }
};
struct Q4_1 : Q4_0 {
  static constexpr int TYPE = 3, FILE = 20, SHIFT = -1;
  static constexpr bool LEAST = true;
  static uint32_t codes(const uint8_t* b, int, int i) { return nibbles(b + 4, i); }
};
struct Q5_0 : Q4_0 {
  static constexpr int TYPE = 6, FILE = 22, BITS = 5, SHIFT = 3;
  static uint32_t codes(const uint8_t* b, int, int i) { return nibbles(b + 6, i) | fifths(b + 2, i); }
};
struct Q5_1 : Q4_1 {
  static constexpr int TYPE = 7, FILE = 24, BITS = 5;
  static uint32_t codes(const uint8_t* b, int, int i) { return nibbles(b + 8, i) | fifths(b + 4, i); }
};
struct Q8_0 : Q4_0 {
  static constexpr int TYPE = 8, FILE = 34, BITS = 8, SHIFT = 0;
  static uint32_t codes(const uint8_t* b, int, int i) { return word(b + 2, i) ^ 0x80808080; }
};
struct IQ4_NL : Q4_0 {
  static constexpr int TYPE = 20, SHIFT = 0;
  static constexpr const uint8_t* TABLE = NL_CODES;
};
struct MXFP4 : IQ4_NL {
  static constexpr int TYPE = 39, FILE = 17;
  static constexpr Scale SCALE = EXPONENT;
  static constexpr const uint8_t* TABLE = FP4_CODES;
  static uint32_t codes(const uint8_t* b, int, int i) { return nibbles(b + 1, i); }
  static uint8_t scale(const uint8_t* b, int) { return b[0]; }
};
struct IQ4_XS : IQ4_NL {
  static constexpr int TYPE = 23, VALUES = 256, FILE = 136, FACTOR = 0;
  static constexpr Scale SCALE = SIGNED;
  static uint32_t codes(const uint8_t* b, int step, int i) { return nibbles(b + 8 + step * 16, i); }
  static uint8_t scale(const uint8_t* b, int j) {
    const int lower = b[4 + j / 2] >> j % 2 * 4 & 15, upper = b[2 + j / 4] >> j % 4 * 2 & 3;
    return (uint8_t)((lower | upper << 4) - 32);
  }
};
struct Q4_K : Q4_1 {
  static constexpr int TYPE = 12, VALUES = 256, FILE = 144, FACTOR = 0;
  static constexpr Scale SCALE = SIX_BITS;
  static uint32_t codes(const uint8_t* b, int step, int i) {
    return word(b + 16 + step / 2 * 32, i) >> step % 2 * 4 & 0x0f0f0f0f;
  }
  static uint8_t scale(const uint8_t* b, int j) {
    return j < 4 ? b[4 + j] & 63 : (b[8 + j] & 15) | (b[j] >> 2 & 48);
  }
  static uint8_t least(const uint8_t* b, int j) {
    return j < 4 ? b[8 + j] & 63 : b[8 + j] >> 4 | (b[4 + j] >> 2 & 48);
  }
};
struct Q5_K : Q4_K {
  static constexpr int TYPE = 13, FILE = 176, BITS = 5;
  static uint32_t codes(const uint8_t* b, int step, int i) {
    return (word(b + 48 + step / 2 * 32, i) >> step % 2 * 4 & 0x0f0f0f0f) |
           (word(b + 16, i) >> step & 0x01010101) << 4;
  }
};
struct Q6_K : Q4_0 {
  static constexpr int TYPE = 14, VALUES = 256, FILE = 210, BITS = 6, SHIFT = 2, PARTS = 2, FACTOR = 208;
  static constexpr Scale SCALE = SIGNED;
  static uint32_t codes(const uint8_t* b, int step, int i) {
    const int half = step / 4, quarter = step % 4;
    return (word(b + half * 64 + quarter % 2 * 32, i) >> quarter / 2 * 4 & 0x0f0f0f0f) |
           (word(b + 128 + half * 32, i) >> quarter * 2 & 0x03030303) << 4;
  }
  static uint8_t scale(const uint8_t* b, int j) { return b[192 + j]; }
};

// Of checkpoints that are quantised in groups of inputs: a scale, where ZEROS the zero in a byte, and the codes as in
// Q4_0, 32 inputs after 32. No file has these.
template <int GROUP, bool ZEROS> struct Grouped : Q4_0 {
  static constexpr int TYPE = 128 + GROUP / 16 + ZEROS, VALUES = GROUP, HEAD = 2 + ZEROS, FILE = HEAD + GROUP / 2;
  static constexpr int SHIFT = ZEROS ? -1 : 4;
  static constexpr bool WHOLE = true, ZERO = ZEROS;
  static uint32_t codes(const uint8_t* b, int step, int i) { return nibbles(b + HEAD + step * 16, i); }
};

struct Int8 : Q8_0 {  // int8 weights, whose scales belong to whole outputs
  static constexpr Scale SCALE = NO_SCALE;
};

// Bytes of a packed block, and where its parts begin.
template <class F> struct Packed {
  static constexpr int STEPS = F::VALUES / I8_BLOCK;  // of 32 inputs
  static constexpr int UPPER = F::BITS == 8 ? 8 * LINE : 4 * LINE;  // of a step: behind the lower bits
  static constexpr int STEP = UPPER + (F::BITS == 5 ? LINE : F::BITS == 6 ? 2 * LINE : 0);
  static constexpr int WIDTH = F::SCALE == NO_SCALE ? 0 : F::SCALE == HALF ? 2 * LANES : LANES;  // bytes of 16 scales
  static constexpr int SCALES = STEPS * STEP;
  static constexpr int LEASTS = SCALES + (F::WHOLE ? 1 : STEPS * F::PARTS) * WIDTH;
  static constexpr int FACTORS = LEASTS + (F::LEAST ? STEPS * WIDTH : 0);
  static constexpr bool HAS_FACTORS = F::SCALE == SIX_BITS || F::SCALE == SIGNED;
  static constexpr int ZEROS = FACTORS + (HAS_FACTORS ? (F::LEAST ? 4 : 2) * LANES : 0);
  static constexpr int BYTES = ZEROS + (F::ZERO ? LANES : 0);
  static constexpr int scales(int step, int part) {
    return SCALES + (F::WHOLE ? 0 : (step * F::PARTS + part) * WIDTH);
  }
};

// Sixteen rows of a file, one block of each, as a packed block. False: a scale is no finite number.
template <class F> bool pack_block(const uint8_t* const from[LANES], uint8_t* to) {
  using P = Packed<F>;
  for (int step = 0; step < P::STEPS; step++) {
    alignas(64) uint32_t lines[P::STEP / 4];  // four codes each
    for (int i = 0; i < 8; i++)
      for (int lane = 0; lane < LANES; lane++) {
        const uint32_t codes = F::codes(from[lane], step, i);
        const uint32_t lower = codes & 0x0f0f0f0f, upper = codes >> 4 & 0x0f0f0f0f;
        uint32_t& line = lines[i % (F::BITS == 8 ? 8 : 4) * LANES + lane];
        if (F::BITS == 8) line = codes;
        else line = i < 4 ? lower : line | lower << 4;
        if (F::BITS == 5) {
          const uint8_t four = (uint8_t)((upper & 1) | (upper >> 7 & 2) | (upper >> 14 & 4) | (upper >> 21 & 8));
          uint8_t& bits = ((uint8_t*)lines)[P::UPPER + i * 8 + lane / 2];
          bits = lane % 2 ? bits | four << 4 : four;
        }
        if (F::BITS == 6) {
          uint32_t& bits = lines[P::UPPER / 4 + i / 4 * LANES + lane];
          bits = (i % 4 ? bits : 0) | upper << i % 4 * 2;
        }
      }
    std::memcpy(to + step * P::STEP, lines, P::STEP);
  }
  bool finite = true;
  const auto halves = [&](int at, int lane, int source) {
    uint16_t h;
    std::memcpy(&h, from[lane] + source, 2);
    std::memcpy(to + at + 2 * lane, &h, 2);
    finite = finite && (h >> 10 & 31) != 31;
  };
  for (int lane = 0; lane < LANES; lane++) {
    if constexpr (F::SCALE == HALF) {
      halves(P::SCALES, lane, 0);
      if (F::LEAST) halves(P::LEASTS, lane, 2);
      if (F::ZERO) to[P::ZEROS + lane] = from[lane][2];
    } else {
      for (int j = 0; j < P::STEPS * F::PARTS; j++)
        to[P::SCALES + j * LANES + lane] = F::scale(from[lane], j);
      if constexpr (F::LEAST)
        for (int j = 0; j < P::STEPS; j++) to[P::LEASTS + j * LANES + lane] = F::least(from[lane], j);
      if constexpr (P::HAS_FACTORS) {
        halves(P::FACTORS, lane, F::FACTOR);
        if (F::LEAST) halves(P::FACTORS + 2 * LANES, lane, F::FACTOR + 2);
      }
    }
  }
  return finite;
}

// Code `i` of the 32 of a step, less what stands for zero.
template <class F> inline int8_t code_at(const uint8_t* block, int step, int lane, int i) {
  const uint8_t* w = block + step * Packed<F>::STEP;
  const int at = i / 4 * LINE + lane * 4 + i % 4;
  const int less = F::ZERO ? block[Packed<F>::ZEROS + lane] : F::SHIFT < 0 ? 0 : 128 >> std::max(F::SHIFT, 0);
  if (F::BITS == 8) return (int8_t)(w[at] - less);
  int code = w[at % (4 * LINE)] >> i / 16 * 4 & 15;
  if (F::TABLE) code = F::TABLE[code];
  if (F::BITS == 5) code |= (w[Packed<F>::UPPER + at / 8] >> at % 8 & 1) << 4;
  if (F::BITS == 6) code |= (w[Packed<F>::UPPER + i / 16 * LINE + at % LINE] >> i / 4 % 4 * 2 & 3) << 4;
  return (int8_t)(code - less);
}
inline float half_at(const uint8_t* p, int lane) {
  uint16_t h;
  std::memcpy(&h, p + 2 * lane, 2);
  return half(h);
}
template <class F> inline float scale_at(const uint8_t* block, int step, int part, int lane) {
  using P = Packed<F>;
  const uint8_t* at = block + P::scales(step, part);
  if (F::SCALE == HALF) return half_at(at, lane);
  if (F::SCALE == EXPONENT) {
    const uint32_t bits = at[lane] < 2 ? 0x200000u << at[lane] : (uint32_t)(at[lane] - 1) << 23;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  return half_at(block + P::FACTORS, lane) * (F::SCALE == SIGNED ? (float)(int8_t)at[lane] : (float)at[lane]);
}
template <class F> inline float least_at(const uint8_t* block, int step, int lane) {
  using P = Packed<F>;
  const uint8_t* at = block + P::LEASTS + step * P::WIDTH;
  return F::SCALE == HALF ? half_at(at, lane) : 0.0f - half_at(block + P::FACTORS + 2 * LANES, lane) * (float)at[lane];
}

// Output `lane` of packed blocks as numbers: k of them.
template <class F> void unpack_lane(const uint8_t* w, int lane, int64_t k, float* out) {
  for (int64_t b = 0; b < k / F::VALUES; b++, w += Packed<F>::BYTES)
    for (int step = 0; step < Packed<F>::STEPS; step++)
      for (int i = 0; i < I8_BLOCK; i++) {
        const float scale = scale_at<F>(w, step, i * F::PARTS / I8_BLOCK, lane);
        const float value = scale * (float)code_at<F>(w, step, lane, i);
        *out++ = F::LEAST ? value + least_at<F>(w, step, lane) : value;
      }
}

// One of the formats: f(F{}).
template <class R, class Fn> R of_format(int64_t kind, Fn f) {
  switch (kind - GGML) {
    case Q4_0::TYPE: return f(Q4_0{});
    case Q4_1::TYPE: return f(Q4_1{});
    case Q5_0::TYPE: return f(Q5_0{});
    case Q5_1::TYPE: return f(Q5_1{});
    case Q4_K::TYPE: return f(Q4_K{});
    case Q5_K::TYPE: return f(Q5_K{});
    case Q6_K::TYPE: return f(Q6_K{});
    case IQ4_NL::TYPE: return f(IQ4_NL{});
    case IQ4_XS::TYPE: return f(IQ4_XS{});
    case MXFP4::TYPE: return f(MXFP4{});
    case Grouped<64, false>::TYPE: return f(Grouped<64, false>{});
    case Grouped<128, false>::TYPE: return f(Grouped<128, false>{});
    case Grouped<32, true>::TYPE: return f(Grouped<32, true>{});
    case Grouped<64, true>::TYPE: return f(Grouped<64, true>{});
    case Grouped<128, true>::TYPE: return f(Grouped<128, true>{});
    default: return f(Q8_0{});
  }
}
// Bytes of 16 outputs and one block, and inputs of a block.
int64_t block_bytes(int64_t kind) {
  return of_format<int64_t>(kind, [](auto format) { return Packed<decltype(format)>::BYTES; });
}
int64_t block_values(int64_t kind) {
  return of_format<int64_t>(kind, [](auto format) { return decltype(format)::VALUES; });
}

}  // namespace
