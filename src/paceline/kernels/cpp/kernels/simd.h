// Sixteen floats at a time, and what numbers a network is made of.

#pragma once

#if defined(__AVX2__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define PL_AVX512 1
#endif
#if defined(PL_AVX512) && defined(__AVX512BF16__)
#define PL_DOT_BF16 1
#endif
#if defined(PL_AVX512) && defined(__AVX512VNNI__)
#define PL_VNNI 1
#endif
#if defined(PL_DOT_BF16) && defined(PL_VNNI) && defined(__linux__) && \
    defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define PL_AMX 1
#endif
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define PL_NEON_DOTS 1
#endif
#if defined(PL_NEON_DOTS) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PL_NEON_BF16 1
#endif

namespace {

using bf16 = uint16_t;

// Sixteen floats, as vectors of the machine's width: a compiler passes wider ones through memory. A product
// and a sum are contracted where fma16 says so and nowhere else (-ffp-contract=off), so that no two instances
// of a template can round differently.
#if PL_AVX512
constexpr int PIECE = 16;
#elif defined(__AVX__)
constexpr int PIECE = 8;
#else
constexpr int PIECE = 4;
#endif
constexpr int PIECES = 16 / PIECE;
constexpr int SUMS = PIECES == 1 ? 16 : 4;  // of sixteen floats, that fit into registers beside what makes them
typedef float floats __attribute__((vector_size(PIECE * 4)));
typedef int32_t ints __attribute__((vector_size(PIECE * 4)));

inline floats fill(float x) {
#if PL_AVX512
  return (floats)_mm512_set1_ps(x);
#elif defined(__AVX__)
  return (floats)_mm256_set1_ps(x);
#elif defined(__aarch64__)
  return (floats)vdupq_n_f32(x);
#else
  return floats{x, x, x, x};
#endif
}
inline floats fma(floats a, floats b, floats c) {
#if PL_AVX512
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

struct v16 {
  floats p[PIECES];
#if PL_AVX512
  v16(__m512 x) : p{(floats)x} {}
  operator __m512() const { return (__m512)p[0]; }
#endif
  v16() : p{} {}
  explicit v16(float x) { for (floats& f : p) f = fill(x); }
};
template <class F> inline v16 each(v16 a, v16 b, F f) {
  v16 y;
  for (int i = 0; i < PIECES; i++) y.p[i] = f(a.p[i], b.p[i]);
  return y;
}
inline v16 operator+(v16 a, v16 b) { return each(a, b, [](floats x, floats y) { return x + y; }); }
inline v16 operator-(v16 a, v16 b) { return each(a, b, [](floats x, floats y) { return x - y; }); }
inline v16 operator*(v16 a, v16 b) { return each(a, b, [](floats x, floats y) { return x * y; }); }
inline v16 operator/(v16 a, v16 b) { return each(a, b, [](floats x, floats y) { return x / y; }); }
// b where either is NaN.
inline v16 lesser(v16 a, v16 b) { return each(a, b, [](floats x, floats y) { return x < y ? x : y; }); }
inline v16 greater(v16 a, v16 b) { return each(a, b, [](floats x, floats y) { return x > y ? x : y; }); }
inline v16 splat(float x) { return v16(x); }
inline v16 load(const float* p) {
  v16 v;
  for (int i = 0; i < PIECES; i++) std::memcpy(&v.p[i], p + i * PIECE, sizeof(floats));
  return v;
}
inline void save(float* p, v16 v) {
  for (int i = 0; i < PIECES; i++) std::memcpy(p + i * PIECE, &v.p[i], sizeof(floats));
}
inline v16 fma16(v16 a, v16 b, v16 c) {
  for (int i = 0; i < PIECES; i++) c.p[i] = fma(a.p[i], b.p[i], c.p[i]);
  return c;
}

constexpr int LANES = 16;    // outputs of a weight block
constexpr int ROWS = 16;     // rows that a product handles at once
constexpr int BLOCKS = 4;    // weight blocks that a product handles at once
constexpr int VECTORS = 4;   // query vectors that attention handles at once
constexpr int TILE_ROWS = 16;  // the same where it runs on tiles
constexpr int TILE_KEYS = 32;  // keys of one tile of values
constexpr int64_t MOST_DIMS = 512;  // of a head, on tiles
constexpr int K_STEP = 32;   // bf16 weights are padded to a multiple of this along k
constexpr int I8_BLOCK = 32;  // of k, that has one scale where x is rounded to bytes
#if PL_VNNI || PL_NEON_DOTS
constexpr int I8_STEP = 4;    // of k, that lie together in int8 weights
#else
constexpr int I8_STEP = 1;
#endif
constexpr int SHORT_K = 8;   // or to this, which saves most of what adapters of a small rank read

enum Kind : int32_t { F32 = 0, BF16 = 1, I8 = 2, BF16_SHORT = 4 };  // the last: k is at most SHORT_K
constexpr int64_t MIXED = 15;  // weights in blocks whose rows are of several types: a table of `Line`
constexpr int64_t GGML = 16;   // from here on: weights in blocks, by their type in a GGUF file
enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };
enum Isa : int32_t {  // levels of instructions, in the order of `LEVELS` (kernels/__init__.py)
  BASELINE = 0,
  AVX2 = 1, AVX_VNNI = 2, AVX512 = 3, AVX512_VNNI = 4, AVX512_BF16 = 5, AMX_BF16 = 6,
  NEON_DOTPROD = 1, NEON_I8MM = 2, NEON_BF16 = 3
};
int g_isa = -1;
bool g_runs_ahead = false;  // the processor itself asks for lines ahead soon enough, where few rows are multiplied

inline float wide(bf16 x) { uint32_t u = (uint32_t)x << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline float wide(float x) { return x; }
inline bf16 narrow(float f) {
  uint32_t u; std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16)((u >> 16) | 0x40);  // NaN stays NaN
  return (bf16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);                 // to nearest, ties to even
}
inline void put(bf16* p, float f) { *p = narrow(f); }
inline void put(float* p, float f) { *p = f; }
inline v16 load_wide(const float* p) { return load(p); }
inline v16 load_wide(const bf16* p) {
#if PL_AVX512
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
#else
  v16 v;
  for (int i = 0; i < PIECES; i++) {
#if defined(__AVX2__)
    v.p[i] = (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + i * PIECE))), 16);
#else
    typedef uint16_t halves __attribute__((vector_size(PIECE * 2)));
    halves h;
    std::memcpy(&h, p + i * PIECE, sizeof h);
    v.p[i] = (floats)(__builtin_convertvector(h, ints) << 16);
#endif
  }
  return v;
#endif
}
// As `put` rounds.
inline void put16(float* p, v16 v) { save(p, v); }
inline void put16(bf16* p, v16 v) {
#if PL_AVX512
  const __m512i u = _mm512_castps_si512(v), half = _mm512_srli_epi32(u, 16);
  const __m512i odd = _mm512_and_si512(half, _mm512_set1_epi32(1));
  __m512i near = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  near = _mm512_mask_or_epi32(near, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), half, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(near));
#elif defined(__AVX2__)
  __m256i near[2];
  for (int i = 0; i < 2; i++) {
    const __m256i u = (__m256i)v.p[i], upper = _mm256_srli_epi32(u, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    near[i] = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i nan = (__m256i)_mm256_cmp_ps((__m256)v.p[i], (__m256)v.p[i], _CMP_UNORD_Q);
    near[i] = _mm256_blendv_epi8(near[i], _mm256_or_si256(upper, _mm256_set1_epi32(0x40)), nan);
  }
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(near[0], near[1]), 0xd8));
#elif defined(__aarch64__)
  for (int i = 0; i < 4; i++) {
    const uint32x4_t u = (uint32x4_t)v.p[i], odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t near = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t nan = vorrq_u32(u, vdupq_n_u32(0x400000));
    const uint32x4_t number = vceqq_f32((float32x4_t)v.p[i], (float32x4_t)v.p[i]);
    vst1_u16(p + i * 4, vshrn_n_u32(vbslq_u32(number, near, nan), 16));
  }
#else
  float all[16];
  save(all, v);
  for (int i = 0; i < 16; i++) put(p + i, all[i]);
#endif
}
// Lanes 8 apart are added first, then those 4, 2 and 1 apart.
inline float sum16(v16 v) {
#if defined(__AVX2__)
#if PL_AVX512
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  const __m256 eight = (__m256)(v.p[0] + v.p[1]);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#elif defined(__aarch64__)
  const float32x4_t four = (float32x4_t)((v.p[0] + v.p[2]) + (v.p[1] + v.p[3]));
  return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
#else
  float s[16];
  save(s, v);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) s[i] += s[i + width];
  return s[0];
#endif
}

inline float max16(v16 v) {
#if PL_AVX512
  return _mm512_reduce_max_ps(v);
#elif defined(__AVX2__)
  const __m256 eight = _mm256_max_ps((__m256)v.p[0], (__m256)v.p[1]);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#elif defined(__aarch64__)
  const auto larger = [](floats x, floats y) { return vmaxq_f32((float32x4_t)x, (float32x4_t)y); };
  return vmaxvq_f32(vmaxq_f32(larger(v.p[0], v.p[1]), larger(v.p[2], v.p[3])));
#else
  float s[16];
  save(s, v);
  return *std::max_element(s, s + 16);
#endif
}

// exp to about two units in the last place; arguments beyond +-87 are clamped.
inline v16 exp16(v16 x) {
  const v16 most = splat(87.0f), least = splat(-87.0f);
  x = greater(least, lesser(most, x));  // in this order NaN stays NaN
  const v16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  v16 n = fma16(x, splat(1.44269504088896341f), shift) - shift;
  v16 r = fma16(n, splat(-0.693359375f), x);
  r = fma16(n, splat(2.12194440e-4f), r);
  v16 y = splat(1.9875691500e-4f);
  y = fma16(y, r, splat(1.3981999507e-3f));
  y = fma16(y, r, splat(8.3334519073e-3f));
  y = fma16(y, r, splat(4.1665795894e-2f));
  y = fma16(y, r, splat(1.6666665459e-1f));
  y = fma16(y, r, splat(5.0000001201e-1f));
  y = fma16(y, r * r, r) + splat(1.0f);
  for (int i = 0; i < PIECES; i++) y.p[i] *= (floats)((__builtin_convertvector(n.p[i], ints) + 127) << 23);
  return y;
}

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Where an address sanitizer watches, memory that is grown has no room to spare, and the parts of a buffer lie apart
// with poisoned bytes between: a step beyond an end is seen then.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t SPARE = 1, FENCE = 64;
inline void watch(const char* p, int64_t bytes) { __asan_poison_memory_region(p, bytes); }
inline void unwatch(const char* p, int64_t bytes) { __asan_unpoison_memory_region(p, bytes); }
#else
constexpr int64_t SPARE = 2, FENCE = 0;
inline void watch(const char*, int64_t) {}
inline void unwatch(const char*, int64_t) {}
#endif

// At least n elements; what was there may be lost.
template <class T> inline void grow(std::vector<T>& v, int64_t n) {
  if ((int64_t)v.size() < n) v.resize(n * SPARE);
}

}  // namespace

extern "C" {

// The level of instructions in use, at most `most`; to be called once, before all else.
int pl_init(int most) {
#if PL_DOT_BF16 && PL_VNNI
  int isa = AVX512_BF16;
#elif PL_VNNI
  int isa = AVX512_VNNI;
#elif PL_AVX512
  int isa = AVX512;
#elif defined(__AVX2__) && defined(__AVXVNNI__)
  int isa = AVX_VNNI;
#elif defined(__AVX2__)
  int isa = AVX2;
#elif PL_NEON_BF16
  int isa = NEON_BF16;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  int isa = NEON_I8MM;
#elif PL_NEON_DOTS
  int isa = NEON_DOTPROD;
#else
  int isa = BASELINE;
#endif
#if PL_AMX
  // A process asks for the tile registers once (ARCH_REQ_XCOMP_PERM, XTILE_DATA).
  if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) isa = AMX_BF16;
#endif
  g_isa = std::min(isa, most);
#if defined(__AVX2__)
  // Zen 5, family 26: measured.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) g_runs_ahead = ((eax >> 8) & 15) + ((eax >> 20) & 255) == 26;
#endif
  return g_isa;
}

}  // extern "C"
