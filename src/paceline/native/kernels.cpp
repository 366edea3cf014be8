// A decoder's layers on a CPU, for any number of rows: one call a pass, no work per operation.
//
// What decides the time of a small pass is how fast the weights stream from memory and how little happens
// between two of them. So the weights lie in the order in which they are read, a layer is five stages that
// threads meet behind, and everything between two products is done on the block that is still in
// registers or in the first-level cache.
//
// Same bits at every width. A row's result depends on that row alone: every product sums over k in one fixed
// order whatever the number of rows, attention sums over the row's own visible keys in their logical order,
// one after the other. Plain decoding, a chunk of a prompt and a tree of drafts give a row the same bits.
// (int8 weights leave that rule in wide passes on tiles, unless they are I8_EXACT.)
//
// Weights are stored by blocks of 16 outputs: [outputs / 16][k / step][16][step] with step = 2 for bf16 (the
// layout of the dot-product instructions, and of an AMX tile when 16 such lines are taken together), step = 1
// for float32, and for int8 step = 4 where there are dot products of bytes (I8_STEP), else 1.
//
// int8 products. Where a processor multiplies bytes (VNNI), a row of x is rounded to 8 bits by blocks of I8_BLOCK
// along k, each with its own scale (max|x| / 127), as the Q8_0 format of llama.cpp does; products of a block are summed as
// integers, blocks as floats in order. Elsewhere x stays as it is and the weights become float32.

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include <system_error>
#include <thread>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#if defined(__AVX2__)
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
#if defined(PL_DOT_BF16) && defined(PL_VNNI) && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define PL_AMX 1
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
constexpr int SUMS = PIECES == 1 ? 16 : 4;  // of sixteen floats, that fit into the registers beside what they are made of
typedef float floats __attribute__((vector_size(PIECE * 4)));
typedef int32_t ints __attribute__((vector_size(PIECE * 4)));

struct v16 {
  floats p[PIECES];
#if PL_AVX512
  v16(__m512 x) : p{(floats)x} {}
  operator __m512() const { return (__m512)p[0]; }
#endif
  v16() : p{} {}
  explicit v16(float x) { for (floats& f : p) f = floats{} + x; }
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
inline v16 lesser(v16 a, v16 b) { return each(a, b, [](floats x, floats y) { return x < y ? x : y; }); }   // b where
inline v16 greater(v16 a, v16 b) { return each(a, b, [](floats x, floats y) { return x > y ? x : y; }); }  // either is NaN
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
#if PL_AVX512
  return _mm512_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < PIECES; i++)
#if defined(__AVX__) && defined(__FMA__)
    c.p[i] = (floats)_mm256_fmadd_ps((__m256)a.p[i], (__m256)b.p[i], (__m256)c.p[i]);
#elif defined(__aarch64__)
    c.p[i] = (floats)vfmaq_f32((float32x4_t)c.p[i], (float32x4_t)a.p[i], (float32x4_t)b.p[i]);
#else
    c.p[i] = a.p[i] * b.p[i] + c.p[i];
#endif
  return c;
#endif
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
#if PL_VNNI
constexpr int I8_STEP = 4;    // of k, that lie together in int8 weights
#else
constexpr int I8_STEP = 1;
#endif
constexpr int SHORT_K = 8;   // or to this, which saves most of what adapters of a small rank read

enum Kind : int32_t { F32 = 0, BF16 = 1, I8 = 2, I8_EXACT = 3, BF16_SHORT = 4 };  // the last: k is at most SHORT_K
enum Isa : int32_t { GENERIC = 0, AVX512_BF16 = 1, AMX_BF16 = 2 };
int g_isa = -1;

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
// Sixteen pairs -> the first ones and the second ones.
inline void load_pairs(const bf16* p, v16& first, v16& second) {
  for (int i = 0; i < PIECES; i++) {
    ints line;
    std::memcpy(&line, p + i * PIECE * 2, sizeof line);
    first.p[i] = (floats)(line << 16), second.p[i] = (floats)(line & (int32_t)0xffff0000);
  }
}
inline float sum16(v16 v) {
  float s[16];
  save(s, v);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) s[i] += s[i + width];
  return s[0];
}

inline float max16(v16 v) {
#if PL_AVX512
  return _mm512_reduce_max_ps(v);
#endif
  float s[16];
  save(s, v);
  return *std::max_element(s, s + 16);
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

// Where an address sanitizer watches, memory that is grown has no room to spare, and the parts of a buffer lie apart with
// poisoned bytes between: a step beyond an end is seen then.
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

// ---- Token ids alone: n-grams and suffixes of a text, and what drafted nodes are worth ----------------------------------------------

// Where each n-gram of a growing text was last seen, as the position that follows it: `NgramIndex` of drafters/ngram.py.
struct NgramText {
  struct Hash {
    const NgramText* text;
    int64_t n;
    size_t operator()(int64_t follower) const {
      uint64_t sum = 0;
      for (int64_t i = follower - n; i < follower; i++) sum = (sum ^ (uint64_t)text->tokens[i]) * 0x9e3779b97f4a7c15u, sum ^= sum >> 29;
      return sum;
    }
  };
  struct Same {
    const NgramText* text;
    int64_t n;
    bool operator()(int64_t a, int64_t b) const {
      return std::equal(text->tokens.begin() + (a - n), text->tokens.begin() + a, text->tokens.begin() + (b - n));
    }
  };
  using Places = std::unordered_map<int64_t, int64_t, Hash, Same>;  // an n-gram is named by the end of its first occurrence

  int64_t shortest, longest, indexed = 1;
  std::vector<int64_t> tokens;
  std::vector<Places> latest;  // by n, from the longest on

  NgramText(int64_t shortest, int64_t longest) : shortest(shortest), longest(longest) {
    for (int64_t n = longest; n >= shortest; n--) latest.emplace_back(16, Hash{this, n}, Same{this, n});
  }

  void extend(const int64_t* more, int64_t count) {
    tokens.insert(tokens.end(), more, more + count);
    const int64_t end = tokens.size();
    for (; indexed < end; indexed++)
      for (int64_t n = std::min(longest, indexed); n >= shortest; n--) latest[longest - n][indexed] = indexed;
  }

  // The last occurrence of the longest n-gram that ends the text, and how many tokens in front of it are alike, `most` at most;
  // 0: there is none.
  int64_t find(int64_t most, int64_t& follower) const {
    const int64_t end = tokens.size();
    for (int64_t n = std::min(longest, end); n >= shortest; n--) {
      const auto found = latest[longest - n].find(end);
      if (found == latest[longest - n].end()) continue;
      follower = found->second;
      for (const int64_t limit = std::min(most, follower); n < limit && tokens[follower - 1 - n] == tokens[end - 1 - n];) n++;
      return n;
    }
    return 0;
  }
};

// All runs of up to `most` + 1 tokens of some texts, and how often each occurs: `SuffixAutomaton` of drafters/suffix.py, step by step.
struct Suffixes {
  struct Edge {
    int64_t token;
    int32_t target, next;  // next: the edge of the same state that was made after it, or -1
  };

  const int64_t most;
  int64_t size = 0;  // tokens taken in
  int32_t last = 0;
  std::vector<int32_t> length{0}, link{-1}, first{-1}, final{-1}, edge_count{0};  // of states; their edges in the order in which they were made
  std::vector<int64_t> count{0};
  std::vector<Edge> edges;
  std::vector<int32_t> table = std::vector<int32_t>(64, -1);  // edges by state and token, open addressing
  std::vector<int32_t> owner;                                  // of edges: their state

  explicit Suffixes(int64_t most) : most(most) {}

  static size_t mix(int32_t state, int64_t token) {
    uint64_t h = ((uint64_t)(uint32_t)state << 32 ^ (uint64_t)token) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
  }

  // Where the edge is in the table, or would be.
  size_t place(int32_t state, int64_t token) const {
    const size_t mask = table.size() - 1;
    size_t at = mix(state, token) & mask;
    while (table[at] >= 0 && !(owner[table[at]] == state && edges[table[at]].token == token)) at = (at + 1) & mask;
    return at;
  }

  int32_t edge_of(int32_t state, int64_t token) const { return table[place(state, token)]; }

  int32_t next(int32_t state, int64_t token) const {
    const int32_t edge = edge_of(state, token);
    return edge < 0 ? -1 : edges[edge].target;
  }

  void join(int32_t state, int64_t token, int32_t target) {
    if (2 * (edges.size() + 1) > table.size()) {
      table.assign(2 * table.size(), -1);
      for (size_t e = 0; e < edges.size(); e++) table[place(owner[e], edges[e].token)] = e;
    }
    const int32_t edge = edges.size();
    table[place(state, token)] = edge;
    edges.push_back({token, target, -1}), owner.push_back(state);
    (first[state] < 0 ? first[state] : edges[final[state]].next) = edge;
    final[state] = edge, edge_count[state]++;
  }

  int32_t add(int32_t runs, int32_t shorter, int64_t seen) {
    length.push_back(runs), link.push_back(shorter), count.push_back(seen);
    first.push_back(-1), final.push_back(-1), edge_count.push_back(0);
    return length.size() - 1;
  }

  int32_t split(int32_t state, int64_t token, int32_t known) {
    const int32_t shorter = add(length[state] + 1, link[known], count[known]);
    for (int32_t e = first[known]; e >= 0; e = edges[e].next) join(shorter, edges[e].token, edges[e].target);
    link[known] = shorter;
    for (int32_t e; state >= 0 && (e = edge_of(state, token)) >= 0 && edges[e].target == known; state = link[state]) edges[e].target = shorter;
    return shorter;
  }

  int32_t step(int64_t token) {
    int32_t state = last, known = next(state, token);
    if (known >= 0) return length[known] == length[state] + 1 ? known : split(state, token, known);
    const int32_t made = add(length[state] + 1, 0, 0);
    for (; state >= 0 && edge_of(state, token) < 0; state = link[state]) join(state, token, made);
    if (state >= 0) {
      known = next(state, token);
      const int32_t shorter = length[known] == length[state] + 1 ? known : split(state, token, known);
      link[made] = shorter;
    }
    return made;
  }

  void append(int64_t token) {
    const int32_t current = step(token);
    for (int32_t state = current; state > 0; state = link[state]) count[state]++;
    last = length[link[current]] >= most ? link[current] : current;
    size++;
  }

  void settle(int32_t& state, int64_t matched) const {
    while (state > 0 && length[link[state]] >= matched) state = link[state];
  }

  void follow(int32_t& state, int64_t& matched, int64_t token) const {
    int32_t edge;
    while ((edge = edge_of(state, token)) < 0 && state > 0) state = link[state], matched = length[state];
    const int32_t target = edge < 0 ? -1 : edges[edge].target;
    if (target <= 0) {
      state = 0, matched = 0;
      return;
    }
    state = target, matched = std::min(matched + 1, most);
    settle(state, matched);
  }

  void continued(int32_t& state, int64_t& matched) const {
    while (state > 0 && !edge_count[state]) state = link[state], matched = length[state];
  }

  // The edge whose runs are most frequent, of equals the one made last, and its share.
  int32_t likeliest(int32_t state, double& share) const {
    int32_t best = first[state];
    if (edge_count[state] == 1) return share = 1.0, best;
    int64_t highest = 0, total = 0;
    for (int32_t e = first[state]; e >= 0; e = edges[e].next) {
      const int64_t seen = count[edges[e].target];
      total += seen;
      if (seen >= highest) best = e, highest = seen;
    }
    return share = (double)highest / (double)total, best;
  }
};

// A running text with the runs in it, and where its last tokens occur there and in texts that it shares with others.
struct SuffixText {
  struct Match {
    const Suffixes* runs;
    int64_t number, state = 0, matched = 0, seen = 0, size = 0;  // number: of the automaton; its address may be taken by another one
  };

  Suffixes own;
  int32_t state = 0;
  int64_t matched = 0;
  std::vector<int64_t> tokens;
  std::vector<Match> shared;

  explicit SuffixText(int64_t most) : own(most) {}

  void extend(const int64_t* more, int64_t count) {
    for (int64_t i = 0; i < count; i++) {  // first matched, then appended, so that a match always ends before the last token
      own.follow(state, matched, more[i]);
      own.append(more[i]);
      own.settle(state, matched);
    }
    tokens.insert(tokens.end(), more, more + count);
  }

  void catch_up(Match& match) const {
    const Suffixes& runs = *match.runs;
    const int64_t end = tokens.size();
    int32_t state = match.state;
    if (match.size != runs.size || end - match.seen > runs.most) state = 0, match.matched = 0, match.seen = std::max<int64_t>(0, end - runs.most);
    for (; match.seen < end; match.seen++) runs.follow(state, match.matched, tokens[match.seen]);
    match.state = state, match.size = runs.size;
  }
};

// How estimates of drafted nodes are corrected: engine/chances.py, whose constants come with every call.
struct Correction {
  int64_t depths, edges;
  const double *constants, *edge;  // odds of a node without an estimate, memory, weight of a node in a lean, its fading, most of it

  Correction(const int64_t* counts, const double* numbers) : depths(counts[0]), edges(counts[1]), constants(numbers), edge(numbers + 5) {}

  double odds(double log_chance) const {
    if (log_chance != log_chance) return constants[0];
    const double chance = std::exp(std::min(0.0, log_chance));
    return chance / std::max(1 - chance, 1e-4);
  }

  int64_t cell(double odds, int64_t depth) const {
    int64_t row = 0;
    for (int64_t d = depth - 1; d; d >>= 1) row++;
    return std::min(row, depths - 1) * (edges + 1) + (std::upper_bound(edge, edge + edges, odds) - edge);
  }

  void learn(double* hits, double* tries, double* odds, int64_t cell, bool right) const {
    hits[cell] = constants[1] * hits[cell] + right, tries[cell] = constants[1] * tries[cell] + 1;
    odds[cell] = (hits[cell] + 0.01) / (tries[cell] - hits[cell] + 0.01);
  }

  double leaning(double lean, bool right, double given) const {
    const double moved = constants[3] * (lean + constants[2] * (right - given));
    return std::max(-constants[4], std::min(constants[4], moved));
  }
};

}  // namespace

extern "C" {

struct Linear {        // y = x W^T * scale + bias
  const void* weight;  // packed
  const float* scale;  // [n], int8 only
  const float* bias;   // [n] or null
  int64_t n, k;        // outputs, inputs
  int64_t kind;        // Kind
};

struct Layer {
  Linear qkv, out, up, down;  // up holds gate, then up
  const float* attention_norm;  // or null: none
  const float* mlp_norm;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  int64_t window;       // 0: every earlier key is visible
};

struct Model {
  int64_t d_model, heads, kv_heads;
  int64_t head_dim, own_head_dim;  // a multiple of LANES, zero behind the model's own
  int64_t d_ff;                    // likewise
  int64_t rotated, vocab;
  int64_t wide_activations;  // 1: float32 activations and cache, 0: bf16
  float eps, scale;
  Layer* layers;
  const float* norm;  // or null: states are normed already
  Linear head;
};

struct Segment {        // rows of one sequence; see attention/base.py
  int64_t start, stop;
  int64_t prefix, num_keys;
  int64_t base;                    // slot of key 0 where slots are contiguous, else -1
  const int64_t* keys;             // [num_keys] slots where they are not
  const uint8_t* visible;          // [rows, num_keys - prefix] or null: a chain
  const int64_t* block_positions;  // [num_keys - prefix] or null: prefix, prefix + 1, ..
};

struct LowRank {  // beside a Linear: y += up (down x); the factor alpha / rank is in the weights of `up`, and for
  Linear down;    // int8 outputs the inverse of their scale. [rank, inputs]; no weight: that Linear has no adapter
  Linear up;      // [outputs, rank]
};

struct AdapterRange {      // rows with adapters; ranges are in order and disjoint
  int64_t start, stop;
  int64_t rank;
  const LowRank* adapter;  // [layers][qkv, out, up, down, mlp]; mlp: rows go through it in place of the MLP
};

struct StreamSet {         // lossless streams that start as f(M) + P_j, f the identity; see network/streams.py
  int64_t gamma;
  int64_t insertion;         // the first layer that they go through
  const void* embeddings;    // P [gamma, d_model]
  const LowRank* adapter;    // [layers][qkv, out, up, down, mlp] of stream rows, or null
  int64_t rank;
};

struct Limit {           // streams of one main row that attend to few of the keys that it sees; see network/stream_rows.py
  int64_t row;           // the main row
  int64_t start, stop;   // rows of its streams; their segment begins with the keys of the main row's
  int64_t keys;          // so many of those may be chosen: all but streams'
  int64_t most;          // that are, the main row's own among them
};

struct Pass {
  int64_t rows;
  const void* hidden_in;  // [rows, d_model]
  void* hidden_out;       // [rows, d_model]
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows], -1: K and V are not kept
  int64_t slot_base;         // where slots is null: first of the contiguous ones
  const float* cos;          // [positions, rotated / 2]
  const float* sin;
  int64_t num_positions;     // rows of that table
  void* const* k_cache;      // [layers] of [kv_heads, slots, head_dim]
  void* const* v_cache;
  int64_t head_stride;       // elements between two heads of a cache: slots * head_dim
  const Segment* segments;
  int64_t num_segments;
  int64_t threads;
  int64_t layers;            // of the whole model
  const AdapterRange* adapters;
  int64_t num_adapters;
  const Limit* limits;       // by their streams' rows, ascending; a segment of such rows holds no others
  int64_t num_limits;
};

struct Taps {            // states that are copied out of a pass
  int64_t layers;
  const int64_t* after;  // [layers] so many layers have been run then; ascending
  int64_t rows;
  const int64_t* which;  // [rows] of the pass, or null: the first ones
  void* out;             // [layers, rows, d_model]
  double ms;             // out: that copying took
};

struct Fuse {            // how a row of a state drafter is made of a state and a token's embedding
  Linear both;           // [d_model, 2 d_model] of [token, state], or [d_model, d_model] of their sum
  Linear state;          // [d_model, d_model] of a state without a token; n = 0: there is always one
  const void* constant;  // [d_model] activations, what the latter adds
  int64_t sum;
  const float* norm;     // of the target's states, which come raw; null: none
  double eps;
};

struct TokenInfo {       // the bias of token t's children is table factors_t (Lyanna, section 5.1)
  Linear table;          // [vocab, rank]
  const void* factors;   // [vocab, rank] activations
};

struct Heads {           // Medusa's: x_j = x + SiLU(W_j x + b_j), of a state x behind the final norm
  int64_t count;
  Linear blocks;         // [count * d_model, d_model], one below the other, with their biases
  const Linear* own;     // [count] output heads, or null: the model's serves all
};

struct Rules;

struct SparseView {        // the last tokens of a text and its first ones, the sinks, whose keys stand in front of the window
  int64_t sinks, window;   // the row's own among the latter; what lies between is the gap
  const float* cos;        // [gaps, rotated / 2] by which the sinks' keys are turned on
  const float* sin;
  int64_t num_gaps;        // rows of that table
};

struct Chain {             // one sequence's draft: its pending tokens, then a token a step
  const int64_t* pending;  // tokens whose K and V are still to be computed; one or more
  int64_t num_pending;
  int64_t position;        // of the first of them
  int64_t steps;           // tokens wanted, one or more
  int64_t base;            // as in Segment; slots of every position up to the last but one token's
  const int64_t* keys;
  float floor;             // a chain ends once its cumulative log-probability is below this
  int64_t* tokens;         // [steps] out
  float* log_q;            // [steps] out, of each token alone
  int64_t made;            // out: tokens written, each the fruit of one pass
  const Rules* rules;      // tokens are drawn as the sequence will draw its own; null: the likeliest ones
  const SparseView* view;  // what each row sees of the text; null: all. With one pending token
  int64_t scratch;         // first of the slots for the view's sinks
};

struct Rules {         // how a sequence chooses from a row of logits: core/sampling.py, `SequenceSampler.rules`
  uint64_t key;        // of seed, sample and purpose; the position is still to be mixed in
  double temperature;  // 0: the likeliest token; below 0: by rules that are not known here
  int64_t top_k;       // 0: all
  double top_p;        // 1: all
  double min_p;        // its natural logarithm; above 0: all
};

}  // extern "C"

namespace {

// ---------------------------------------------------------------------------------------------- refusals

// What an entry point returns; where it is not DONE, nothing was done. Ids, positions and slots come from elsewhere:
// all of them are held against what they index, once a row and once a key, before the first is used.
enum Refusal : int { DONE = 0, BAD_POSITION = 1, BAD_TOKEN = 2, BAD_SLOT = 3, BAD_SEGMENT = 4, BAD_ADAPTERS = 5, BAD_COUNT = 6 };

// Whether first .. first + count - 1 lie in 0 .. end - 1.
inline bool within(int64_t first, int64_t count, int64_t end) {
  return first >= 0 && count >= 0 && count <= end && first <= end - count;
}

// Whether all of x lie in least .. end - 1: what is below `least` wraps round to a large number.
inline bool all_within(const int64_t* x, int64_t n, int64_t least, int64_t end) {
  uint64_t worst = 0;
  for (int64_t i = 0; i < n; i++) worst = std::max(worst, (uint64_t)x[i] - (uint64_t)least);
  return n == 0 || (end > least && worst < (uint64_t)end - (uint64_t)least);
}

// Keys 0 .. n - 1 of a sequence, contiguous from `base` on or listed; places among them are 32 bits wide.
inline bool keys_within(int64_t base, const int64_t* keys, int64_t n, int64_t slots) {
  if (n < 0 || n > INT32_MAX) return false;
  return base >= 0 ? within(base, n, slots) : keys && all_within(keys, n, 0, slots);
}

inline int64_t cache_slots(const Model& m, const Pass& p) { return p.head_stride / m.head_dim; }

Refusal check_segments(const Model& m, const Pass& p) {
  int64_t row = 0;
  for (int64_t i = 0; i < p.num_segments; i++) {
    const Segment& s = p.segments[i];
    if (s.start != row || s.stop < row || s.stop > p.rows) return BAD_SEGMENT;  // every row in one of them, in order
    if (s.prefix < 0 || s.prefix > s.num_keys || s.stop - s.start > s.num_keys) return BAD_SEGMENT;
    if (!keys_within(s.base, s.keys, s.num_keys, cache_slots(m, p))) return BAD_SLOT;
    row = s.stop;
  }
  return row == p.rows ? DONE : BAD_SEGMENT;
}

Refusal check_adapters(const Pass& p) {
  int64_t row = 0;
  for (int64_t i = 0; i < p.num_adapters; i++) {
    const AdapterRange& a = p.adapters[i];
    if (a.start < row || a.stop <= a.start || a.stop > p.rows || a.rank < 1 || !a.adapter) return BAD_ADAPTERS;
    row = a.stop;
  }
  return DONE;
}

// The segment of a row that is there, of segments that cover all rows.
inline const Segment& segment_of(const Pass& p, int64_t row) {
  return *(std::upper_bound(p.segments, p.segments + p.num_segments, row, [](int64_t r, const Segment& s) { return r < s.start; }) - 1);
}

Refusal check_limits(const Pass& p) {
  int64_t end = 0;  // of the streams before, where they end within a segment
  for (int64_t i = 0; i < p.num_limits; i++) {
    const Limit& l = p.limits[i];
    if (l.row < 0 || l.row >= l.start || l.start >= l.stop || l.stop > p.rows || l.most < 1 || l.start < end) return BAD_COUNT;
    const Segment &main = segment_of(p, l.row), &s = segment_of(p, l.start);
    if (main.stop > s.start || l.stop > s.stop || l.keys < main.stop - main.start || l.keys > std::min(main.num_keys, s.num_keys)) return BAD_SEGMENT;
    if (s.prefix > l.keys) return BAD_SEGMENT;
    const bool first = i == 0 || segment_of(p, p.limits[i - 1].start).start != s.start, last = i + 1 == p.num_limits || p.limits[i + 1].start >= s.stop;
    if (l.start != (first ? s.start : end) || (last && l.stop != s.stop)) return BAD_SEGMENT;  // all rows of the segment
    end = l.stop;
  }
  for (int64_t i = 0; i < p.num_limits; i++)  // a main row has all its keys
    for (int64_t j = 0; j < p.num_limits; j++)
      if (p.limits[i].row >= p.limits[j].start && p.limits[i].row < p.limits[j].stop) return BAD_SEGMENT;
  return DONE;
}

Refusal check_rows(const Model& m, const Pass& p) {
  const int64_t slots = cache_slots(m, p);
  if (p.rows < 0 || p.threads < 1) return BAD_COUNT;
  if (!all_within(p.positions, p.rows, 0, m.rotated ? p.num_positions : INT64_MAX)) return BAD_POSITION;
  return (p.slots ? all_within(p.slots, p.rows, -1, slots) : within(p.slot_base, p.rows, slots)) ? DONE : BAD_SLOT;
}

Refusal check_pass(const Model& m, const Pass& p, int start, int stop) {
  if (start < 0 || stop > p.layers) return BAD_COUNT;
  Refusal found = check_rows(m, p);
  if (found == DONE) found = check_segments(m, p);
  if (found == DONE) found = check_adapters(p);
  return found == DONE ? check_limits(p) : found;
}

Refusal check_view(const Model& m, const SparseView& v, const Chain& c, int64_t slots, int64_t keys) {
  if (v.sinks < 0 || v.window < 1 || v.window > INT32_MAX || c.num_pending != 1) return BAD_COUNT;
  if (!within(c.scratch, v.sinks, slots)) return BAD_SLOT;
  const int64_t gap = keys - v.sinks - v.window;  // of the last row
  return m.rotated && v.sinks && gap >= v.num_gaps ? BAD_POSITION : DONE;
}

Refusal check_chain(const Model& m, const Pass& p, const Chain& c) {
  const int64_t slots = cache_slots(m, p);
  if (c.num_pending < 1 || c.steps < 1) return BAD_COUNT;
  if (c.position < 0) return BAD_POSITION;
  if (c.position > slots || c.num_pending > slots || c.steps > slots) return BAD_SLOT;  // so that the sum is a number
  const int64_t keys = c.position + c.num_pending + c.steps - 1;
  if (m.rotated && keys > p.num_positions) return BAD_POSITION;
  if (!all_within(c.pending, c.num_pending, 0, m.vocab)) return BAD_TOKEN;
  if (!keys_within(c.base, c.keys, keys, slots)) return BAD_SLOT;
  return c.view ? check_view(m, *c.view, c, slots, keys) : DONE;
}

Refusal check_chains(const Model& m, const Pass& p, int64_t limit, const Chain* chains, int64_t count) {
  if (p.threads < 1 || count < 0 || limit < 1 || limit > m.vocab) return BAD_COUNT;
  for (int64_t i = 0; i < count; i++) {
    const Refusal found = check_chain(m, p, chains[i]);
    if (found != DONE) return found;
  }
  return DONE;
}

// ----------------------------------------------------------------------------------------------- threads

// Threads that wait for each other for microseconds must not wait for one that does not run: a busy process beside us
// takes a core for milliseconds. So a job is a row of stages, a stage is claimed in pieces by whoever comes, and the next
// stage begins when all pieces are done, whichever threads did them: one that does not run is waited for only where it
// has begun a piece. Who waits spins for a short while and then sleeps. Where the caller waited long, it goes on alone for
// a few times as long, and for twice that where it has to wait again soon after: a short disturbance costs little more than
// itself, and beside a process that stays the others are seldom tried.
//
// Which thread computes a piece changes no bits.

constexpr int SPINS = 20000;        // turns of a spin, some hundreds of microseconds: longer than from one pass to the next
constexpr int64_t LONG_WAIT = 300;  // microseconds for a piece, and a quarter of what the job took
constexpr int64_t JUDGED = 5;       // stages of a job of which no single one takes that share by itself
constexpr int64_t ALONE = 4;        // times such a wait that the others are left out for; doubled up to
constexpr int64_t LONGEST = 400000; // microseconds, while it happens again before as much time has gone by with them
constexpr int MOST_THREADS = 256;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;
inline int64_t microseconds(Clock::duration d) { return std::chrono::duration_cast<std::chrono::microseconds>(d).count(); }

// Where a thread's part of a stage begins: a stage's units are dealt in steps, and each thread begins with its own part.
inline int64_t part_of(int64_t units, int64_t step, int64_t thread, int64_t width) {
  return std::min(units, (units + step - 1) / step * thread / width * step);
}

// What a thread claimed of a stage: units begin .. end - 1, after which it will claim those up to `limit`.
struct Claim {
  int64_t begin, end, limit;
  int64_t thread, width;  // who, of how many
  bool fresh;             // this thread's first of the stage
};

// What the threads of a team work at.
struct Job {
  virtual int64_t stages() const = 0;
  virtual int64_t units(int64_t stage) const = 0;  // one or more
  virtual int64_t step(int64_t stage) const = 0;   // units that are claimed together
  virtual void work(int64_t stage, const Claim& claim) = 0;
 protected:
  ~Job() = default;
};

void free_tiles();

// The threads of one calling thread, itself the first.
class Team {
 public:
  // By as many threads, or by fewer where there are no more to be had. What it throws ends the process.
  void run(int64_t threads, Job& job) {
    int64_t T = std::min<int64_t>(threads, MOST_THREADS);
    const Clock::time_point start = Clock::now();
    if (T > 1 && start < alone_until_) T = 1;
    if (T > 1) T = std::min(T, hire(T - 1) + 1);
    if (T == 1) {
      for (int64_t stage = 0; stage < job.stages(); stage++) {
        const int64_t units = job.units(stage);
        job.work(stage, {0, units, units, 0, 1, true});
      }
      return free_tiles();
    }
    Clock::duration longest{};
    const bool wider = T > width_.exchange(T);
    if (wider) wider_.fetch_add(1), wake(wider_);
    job_ = &job, first_ = now_.load(std::memory_order_relaxed) + 1, last_ = first_ + (uint32_t)job.stages();
    open(first_);
    for (uint32_t stage = first_; stage != last_;) {
      take(stage);
      const Clock::time_point before = Clock::now();
      if (const uint32_t next = spin(stage); next != stage) { stage = next; continue; }
      stage = sleep(stage);
      longest = std::max(longest, Clock::now() - before);
    }
    free_tiles();
    if (job.stages() >= JUDGED && microseconds(longest) > LONG_WAIT) judge(longest, start);
  }

  ~Team() {
    ended_ = true;
    wider_.fetch_add(1), wake(wider_);
    publish(now_.load() + 1);
    for (std::thread& t : threads_) t.join();
  }

 private:
  // A stage that is open. Claims carry its number: whoever comes late cannot claim a piece of another one that lies here by
  // then, and reads nothing of a job before he has a piece of it, for which the job waits.
  struct alignas(64) Part { std::atomic<uint64_t> next{0}; };  // number << 32 | units claimed
  struct alignas(64) Slot {
    std::atomic<int64_t> units{0}, step{1}, width{0};
    alignas(64) std::atomic<int64_t> left{0};
    Part parts[MOST_THREADS];
  };
  static constexpr uint32_t SLOTS = 4;

  void open(uint32_t stage) {
    Slot& s = slots_[stage % SLOTS];
    const bool work = stage != last_;
    const int64_t units = work ? job_->units(stage - first_) : 0, width = width_;
    for (int64_t t = 0; t < width; t++) s.parts[t].next.store(~0ull, std::memory_order_relaxed);  // no stage's number
    std::atomic_thread_fence(std::memory_order_release);
    s.units.store(units, std::memory_order_relaxed), s.left.store(units, std::memory_order_relaxed);
    s.step.store(work ? job_->step(stage - first_) : 1, std::memory_order_relaxed), s.width.store(width, std::memory_order_relaxed);
    for (int64_t t = 0; t < width; t++) s.parts[t].next.store((uint64_t)stage << 32, std::memory_order_release);
    publish(stage);
  }

  // Works at a stage until no piece is left, at its own part first; whoever does the last piece opens the next stage.
  void take(uint32_t stage, int64_t t = 0) {
    Slot& s = slots_[stage % SLOTS];
    bool fresh = true;
    const int64_t width = s.width.load(std::memory_order_relaxed);  // of another stage, perhaps: no claim succeeds then
    if (t >= width) return;
    for (int64_t i = 0; i < width; i++)
      if (take_part(s, stage, t, (t + i) % width, fresh)) return open(stage + 1);
  }

  // Claims in one part until nothing is left there; whether the last piece of the stage was among them.
  bool take_part(Slot& s, uint32_t stage, int64_t t, int64_t part, bool& fresh) {
    std::atomic<uint64_t>& next = s.parts[part].next;
    uint64_t at = next.load(std::memory_order_acquire);
    while (at >> 32 == stage) {
      const int64_t units = s.units.load(std::memory_order_relaxed), step = s.step.load(std::memory_order_relaxed);
      const int64_t width = s.width.load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);  // what was read may be another stage's: the claim fails then
      const int64_t limit = part_of(units, step, part + 1, width), begin = part_of(units, step, part, width) + (int64_t)(uint32_t)at;
      if (begin >= limit) return false;
      const int64_t size = (std::max<int64_t>((limit - begin) / 2, 1) + step - 1) / step * step, end = std::min(limit, begin + size);
      if (!next.compare_exchange_weak(at, at + (uint64_t)(end - begin), std::memory_order_acq_rel)) continue;
      job_->work(stage - first_, {begin, end, limit, t, width, fresh});
      fresh = false;
      if (s.left.fetch_sub(end - begin, std::memory_order_acq_rel) == end - begin) return true;
      at = next.load(std::memory_order_acquire);
    }
    return false;
  }

  void work(int64_t t) {
    uint32_t stage = 0;
    while (!ended_) {
      const uint32_t old = wider_.load();
      if (width_.load() <= t) {  // not needed until a job is wider
        while (!ended_ && wider_.load() == old) wait(wider_, old);
        continue;
      }
      uint32_t next = spin(stage);
      if (next == stage) {
        free_tiles();
        next = sleep(stage);
      }
      stage = next;
      if (!ended_) take(stage, t);
    }
  }

  uint32_t spin(uint32_t old) const {
    for (int i = 0; i < SPINS; i++) {
      const uint32_t now = now_.load(std::memory_order_acquire);
      if (now != old) return now;
      pause();
    }
    return old;
  }

  uint32_t sleep(uint32_t old) {
    sleepers_.fetch_add(1);
    while (now_.load() == old) wait(now_, old);
    sleepers_.fetch_sub(1);
    return now_.load();
  }

  void publish(uint32_t stage) {
    now_.store(stage);
    if (sleepers_.load() > 0) wake(now_);
  }

  // Sleep while a word is `old`, or for a moment: the caller looks again.
  static void wait(std::atomic<uint32_t>& word, uint32_t old) {
#if defined(__linux__)
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    (void)word, (void)old;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
  }
  static void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
  }

  // The caller waited that long in a job.
  void judge(Clock::duration wait, Clock::time_point start) {
    const Clock::time_point now = Clock::now();
    if (wait <= (now - start) / 4) return;
    const bool soon = now - alone_until_ < alone_;
    alone_ = std::min<Clock::duration>(std::max(ALONE * wait, soon ? 2 * alone_ : Clock::duration{}), std::chrono::microseconds(LONGEST));
    alone_until_ = now + alone_;
  }

  int64_t hire(int64_t wanted) {
    try {
      while ((int64_t)threads_.size() < wanted) threads_.emplace_back([this, t = (int64_t)threads_.size() + 1] { work(t); });
    } catch (const std::system_error&) {  // the system gives no more
    }
    return (int64_t)threads_.size();
  }

  std::vector<std::thread> threads_;
  Slot slots_[SLOTS];
  alignas(64) std::atomic<uint32_t> now_{0};  // the stage that is open; between two jobs one without units
  std::atomic<int> sleepers_{0};
  std::atomic<uint32_t> wider_{0};  // jobs that were wider than the one before
  std::atomic<int64_t> width_{1};   // threads of the last job
  alignas(64) Job* job_ = nullptr;
  uint32_t first_ = 0, last_ = 0;
  std::atomic<bool> ended_{false};
  Clock::duration alone_{};          // for how long the others were left out last time
  Clock::time_point alone_until_{};  // and until when
};

// The calling thread's own. A forked process has no other threads: it gets a new team, and the old one stays as it was.
Team& team() {
  struct Owner {
    Team* team = nullptr;
    pid_t process = 0;
    ~Owner() { if (process == getpid()) delete team; }
  };
  static thread_local Owner owner;
  if (owner.process != getpid()) owner.team = new Team, owner.process = getpid();
  return *owner.team;
}

// ---------------------------------------------------------------------------------------------- products

// Rows of x rounded to bytes, for products with int8 weights.
struct Bytes {
  std::vector<int32_t> x;      // [k / 4, rows] four bytes each
  std::vector<float> scale;    // [k / I8_BLOCK, rows]
  std::vector<int32_t> start;  // [k / I8_BLOCK, rows] -128 times the block's sum: stored weights are 128 too large
  int64_t rows = 0;
};

template <class A> struct Input {  // rows of x; bf16 rows are padded to K_STEP
  const A* x;
  int64_t stride;
  const Bytes* bytes = nullptr;  // the same rows, `row` first, where the weights ask for them
  int64_t row = 0;
  Input from(int64_t r) const { return {x + r * stride, stride, bytes, row + r}; }
};

inline bool is_i8(int64_t kind) { return kind == I8 || kind == I8_EXACT; }
inline int64_t padded_k(int64_t kind, int64_t k) {
  if (kind == BF16_SHORT) return SHORT_K;
  return kind == BF16 || (is_i8(kind) && I8_STEP > 1) ? up(k, K_STEP) : k;
}

// Weights that a thread will read after those that it reads now: the lines of 64 bytes of some blocks. A product asks the memory
// for them while it computes; else the memory waits while many rows go through a block, and then they for it.
struct Next {
  const char* at[BLOCKS];
  int blocks = 0;
  int64_t lines = 0;  // of a block
  // Line `line` of blocks first, first + step, .. Never a call, which would put all sums of a product aside.
  [[gnu::always_inline]] void ask(int64_t line, int first = 0, int step = 1) const {
    if (line < lines)
      for (int b = first; b < blocks; b += step) __builtin_prefetch(at[b] + line * 64, 0, 2);
  }
};

inline Next next_of(const Linear& l, const int64_t block[], int blocks) {
  Next next;
  const int64_t bytes = LANES * padded_k(l.kind, l.k) * (is_i8(l.kind) ? 1 : l.kind == F32 ? 4 : 2);
  next.blocks = blocks, next.lines = bytes / 64;
  for (int b = 0; b < blocks; b++) next.at[b] = (const char*)l.weight + block[b] * bytes;
  return next;
}

// The first blocks that a thread computes of a layer's outputs, `pair` blocks further on those of its second half.
inline Next next_part(const Linear& l, int64_t begin, int64_t end, int64_t pair = 0) {
  const int blocks = (int)std::min<int64_t>(pair ? BLOCKS / 2 : BLOCKS, end - begin);
  int64_t block[BLOCKS] = {};
  for (int i = 0; i < blocks; i++) {
    block[i] = begin + i;
    if (pair) block[blocks + i] = pair + begin + i;
  }
  return next_of(l, block, std::max(0, pair ? 2 * blocks : blocks));
}

#if PL_VNNI
static_assert(I8_BLOCK == K_STEP, "rows are padded to whole blocks");

inline void round_block(const bf16* x, int32_t* y, int64_t rows, float* scale, int32_t* start) {
  const __m512 a = load_wide(x), b = load_wide(x + 16);
  const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
  const bool number = most <= FLT_MAX && !_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) && !_mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q);
  const bool sound = number && most > 1e-30f;  // so that 127 / most is a number, too
  const __m512 by = _mm512_set1_ps(sound ? 127.0f / most : 0.0f);
  const __mmask16 all = sound ? 0xffff : 0;
  const __m512i low = _mm512_maskz_cvtps_epi32(all, _mm512_mul_ps(a, by)), high = _mm512_maskz_cvtps_epi32(all, _mm512_mul_ps(b, by));
  int32_t four[I8_BLOCK / 4];
  _mm_storeu_si128((__m128i*)four, _mm512_cvtsepi32_epi8(low));
  _mm_storeu_si128((__m128i*)(four + 4), _mm512_cvtsepi32_epi8(high));
  for (int i = 0; i < I8_BLOCK / 4; i++) y[i * rows] = four[i];
  *start = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
  *scale = sound ? most / 127.0f : number ? 0.0f : NAN;  // what is no number stays in the sum
}

void round_rows(const bf16* x, int64_t stride, int64_t rows, int64_t k, Bytes& y) {
  const int64_t blocks = k / I8_BLOCK;
  y.rows = rows;
  grow(y.x, rows * k / 4), grow(y.scale, rows * blocks), grow(y.start, rows * blocks);
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t r = 0; r < rows; r++)
      round_block(x + r * stride + b * I8_BLOCK, &y.x[b * I8_BLOCK / 4 * rows + r], rows, &y.scale[b * rows + r], &y.start[b * rows + r]);
}

// R rows against B weight blocks; a block's sum is exact, and blocks are added one after the other. Of what is needed next B
// weight blocks are asked for, those from `first` on.
template <int R, int B> void byte_product(const int8_t* const w[], int64_t k, const Bytes& in, int64_t row, float* c, const Next& next, int first) {
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
      for (int b = 0; b < B; b++) sum[r][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[r][b]), _mm512_set1_ps(scale[r]), sum[r][b]);
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) _mm512_storeu_ps(c + r * BLOCKS * LANES + b * LANES, sum[r][b]);
}

template <int R, int B> void byte_rows(const int8_t* const w[], int blocks, int64_t k, const Bytes& in, int64_t row, float* c, const Next& next) {
  int b = 0;
  for (; b + B <= blocks; b += B) byte_product<R, B>(w + b, k, in, row, c + b * LANES, next, b);
  for (; b < blocks; b++) byte_product<R, 1>(w + b, k, in, row, c + b * LANES, next, b);
}

// Few rows read several streams of weights at once; many rows keep a block in the cache, eight rows at a time.
void byte_products(const int8_t* const w[], int blocks, int64_t k, const Bytes& in, int64_t row, int rows, float* c, const Next& next) {
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
struct alignas(64) TileConfig { uint8_t palette = 1, start = 0, reserved[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; };

// gcc's own intrinsics do not say that the memory is read (the configuration's: PR 114098, mended in gcc 14; a tile's: never),
// so that the compiler may drop or delay the stores in front of them.
inline void load_tile_config(const TileConfig& c) { asm volatile("ldtilecfg %0" ::"m"(c)); }
#define tile_load(tile, base, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")

void configure_tiles(int rows) {
  TileConfig c;
  for (int t = 0; t < 4; t++) c.bytes[t] = 64, c.rows[t] = rows;  // 0-3: sums [rows, 16] float
  c.bytes[4] = 64, c.rows[4] = rows;                              // 4: x [rows, 32] bf16
  for (int t = 5; t < 8; t++) c.bytes[t] = 64, c.rows[t] = 16;    // 5-7: weights [16 pairs of k, 16 outputs]
  load_tile_config(c);
}

template <int B> void amx_product(const bf16* const w[], int64_t k, Input<bf16> in, float* c) {
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
  constexpr int64_t STRETCH = 256;  // of k
  alignas(64) bf16 wide_w[BLOCKS][STRETCH * LANES];
  _tile_zero(0);
  if (B > 1) _tile_zero(1);
  if (B > 2) _tile_zero(2);
  if (B > 3) _tile_zero(3);
  const int64_t stride = in.stride * 2;
  for (int64_t from = 0; from < k; from += STRETCH) {
    const int64_t length = std::min(STRETCH, k - from);
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

// Vector products: R rows against B weight blocks, every sum in a register of its own; turn `turn` of `turns` of such rows.
template <int R, int B> void dot_product(const bf16* const w[], int64_t k, Input<bf16> in, float* c, const Next& next, int turn, int turns) {
  v16 sum[R][B] = {};
  for (int64_t i = 0; i < k; i += 2) {
    next.ask(i / 2, turn, turns);
#if PL_DOT_BF16
    __m512bh line[B];
    for (int b = 0; b < B; b++) line[b] = (__m512bh)_mm512_loadu_si512(w[b] + i * 16);
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, in.x + r * in.stride + i, 4);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      for (int b = 0; b < B; b++) sum[r][b] = _mm512_dpbf16_ps(sum[r][b], line[b], x);
    }
#else
    v16 low[B], high[B];
    for (int b = 0; b < B; b++) load_pairs(w[b] + i * 16, low[b], high[b]);
    for (int r = 0; r < R; r++) {
      const bf16* x = in.x + r * in.stride + i;
      const v16 x0 = splat(wide(x[0])), x1 = splat(wide(x[1]));
      for (int b = 0; b < B; b++) sum[r][b] = fma16(high[b], x1, fma16(low[b], x0, sum[r][b]));
    }
#endif
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) save(c + r * BLOCKS * LANES + b * LANES, sum[r][b]);
}

inline v16 weights16(const float* w) { return load(w); }
inline v16 weights16(const int8_t* w) {
#if PL_AVX512
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)w)));
#else
  v16 v;
  for (int i = 0; i < PIECES; i++) {
#if defined(__AVX2__)
    v.p[i] = (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(w + i * PIECE))));
#else
    typedef int8_t bytes __attribute__((vector_size(PIECE)));
    bytes b;
    std::memcpy(&b, w + i * PIECE, sizeof b);
    v.p[i] = __builtin_convertvector(__builtin_convertvector(b, ints), floats);
#endif
  }
  return v;
#endif
}

template <int R, int B, class W, class A>
void fma_product(const W* const w[], int64_t k, Input<A> in, float* c, const Next& next, int turn, int turns) {
  constexpr int64_t per_line = 4 / sizeof(W);
  v16 sum[R][B] = {};
  for (int64_t i = 0; i < k; i++) {
    if (i % per_line == 0) next.ask(i / per_line, turn, turns);
    v16 line[B];
    for (int b = 0; b < B; b++) line[b] = weights16(w[b] + i * 16);
    for (int r = 0; r < R; r++) {
      const v16 x = splat(wide(in.x[r * in.stride + i]));
      for (int b = 0; b < B; b++) sum[r][b] = fma16(line[b], x, sum[r][b]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) save(c + r * BLOCKS * LANES + b * LANES, sum[r][b]);
}

template <int R, int B> void product_rb(const bf16* const w[], int64_t k, Input<bf16> in, float* c, const Next& next, int turn, int turns) {
  dot_product<R, B>(w, k, in, c, next, turn, turns);
}
template <int R, int B, class A> void product_rb(const float* const w[], int64_t k, Input<A> in, float* c, const Next& next, int turn, int turns) {
  fma_product<R, B>(w, k, in, c, next, turn, turns);
}
template <int R, int B, class A> void product_rb(const int8_t* const w[], int64_t k, Input<A> in, float* c, const Next& next, int turn, int turns) {
  fma_product<R, B>(w, k, in, c, next, turn, turns);
}

template <int B, class W, class A> void vector_product(const W* const w[], int64_t k, Input<A> in, int rows, float* c, const Next& next) {
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

template <class W, class A> void product_w(const W* const w[], int blocks, int64_t k, Input<A> in, int rows, float* c, const Next& next) {
#if !PL_AVX512
  // Two or more rows of four blocks are more sums than there are registers.
  if (rows > 1) {
    for (int b = 0; b < blocks; b++) vector_product<1>(w + b, k, in, rows, c + b * LANES, {});
    return;
  }
#endif
  if (blocks == 1) vector_product<1>(w, k, in, rows, c, next);
  else if (blocks == 2) vector_product<2>(w, k, in, rows, c, next);
  else if (blocks == 3) vector_product<3>(w, k, in, rows, c, next);
  else vector_product<4>(w, k, in, rows, c, next);
}

// One product: up to ROWS rows of x against up to BLOCKS weight blocks (any of the matrix), into c [ROWS][64].
inline void product(const Linear& l, const int64_t block[], int blocks, Input<float> in, int rows, float* c, const Next& next = {}) {
  const float* w[BLOCKS];
  for (int b = 0; b < blocks; b++) w[b] = (const float*)l.weight + block[b] * LANES * l.k;
  product_w(w, blocks, l.k, in, rows, c, next);
}
template <class W> void product_of(const Linear& l, const int64_t block[], int blocks, Input<bf16> in, int rows, float* c, const Next& next) {
  const int64_t k = padded_k(l.kind, l.k);
  const W* w[BLOCKS];
  for (int b = 0; b < blocks; b++) w[b] = (const W*)l.weight + block[b] * LANES * k;
#if PL_AMX
  // int8 weights must be made wide first, which pays for a full tile of rows. The two ways round differently: I8_EXACT
  // always takes the other one.
  if constexpr (std::is_same_v<W, bf16>)
    if (g_isa == AMX_BF16 && l.kind == BF16_SHORT) {
      if (blocks == 1) amx_short<1>(w, in, c);
      else if (blocks == 2) amx_short<2>(w, in, c);
      else if (blocks == 3) amx_short<3>(w, in, c);
      else amx_short<4>(w, in, c);
      return;
    }
  const bool wanted = l.kind == BF16 || (l.kind == I8 && rows == ROWS);
  if (g_isa == AMX_BF16 && wanted) {
    if (blocks == 1) amx_product<1>(w, k, in, c);
    else if (blocks == 2) amx_product<2>(w, k, in, c);
    else if (blocks == 3) amx_product<3>(w, k, in, c);
    else amx_product<4>(w, k, in, c);
    return;
  }
#endif
#if PL_VNNI
  if constexpr (std::is_same_v<W, int8_t>) return byte_products(w, blocks, k, *in.bytes, in.row, rows, c, next);
#endif
  product_w(w, blocks, k, in, rows, c, next);
}
inline void product(const Linear& l, const int64_t block[], int blocks, Input<bf16> in, int rows, float* c, const Next& next = {}) {
  if (is_i8(l.kind)) product_of<int8_t>(l, block, blocks, in, rows, c, next);
  else product_of<bf16>(l, block, blocks, in, rows, c, next);
}

inline float finished(const Linear& l, int64_t n, float sum) {
  if (l.scale) sum *= l.scale[n];
  return l.bias ? sum + l.bias[n] : sum;
}

// Tiles of the products, for as many rows as there are, at most a tile's 16. A thread sets them when it comes to a stage, and
// lets go of them before it waits.
inline void set_tiles(int64_t rows) {
#if PL_AMX
  if (g_isa == AMX_BF16) configure_tiles((int)std::min<int64_t>(rows, ROWS));
#endif
  (void)rows;
}
void free_tiles() {
#if PL_AMX
  if (g_isa == AMX_BF16) _tile_release();
#endif
}

thread_local Bytes t_bytes;

// Rows of x as this layer's products want them. What another thread or stage was given is not this one's: `fresh`.
template <class A> Input<A> input_of(const Linear& l, const A* x, int64_t stride, int64_t rows, bool fresh) {
#if PL_VNNI
  if constexpr (std::is_same_v<A, bf16>)
    if (is_i8(l.kind) && !(g_isa == AMX_BF16 && l.kind == I8 && rows % ROWS == 0)) {  // whole tiles take x as it is
      if (fresh) round_rows(x, stride, rows, padded_k(l.kind, l.k), t_bytes);
      return {x, stride, &t_bytes, 0};
    }
#endif
  (void)l, (void)rows, (void)fresh;
  return {x, stride};
}

// The outputs of a claim's blocks for all rows: each(row0, rows, first output, outputs, c). It may change c. `then` is what
// this thread will read when its part is done.
template <class A, class F> void sweep(const Linear& l, const Claim& claim, Input<A> in, int64_t rows, const Next& then, F each) {
  alignas(64) float c[ROWS * BLOCKS * LANES];
  for (int64_t b = claim.begin; b < claim.end; b += BLOCKS) {
    const int blocks = (int)std::min<int64_t>(BLOCKS, claim.end - b);
    const int64_t block[BLOCKS] = {b, b + 1, b + 2, b + 3}, after = b + blocks;
    const Next next = after < claim.limit ? next_part(l, after, claim.limit) : then;
    for (int64_t r = 0; r < rows; r += ROWS) {
      const int n = (int)std::min<int64_t>(ROWS, rows - r);
      product(l, block, blocks, in.from(r), n, c, r == 0 ? next : Next{});
      each(r, n, b * LANES, std::min<int64_t>(blocks * LANES, l.n - b * LANES), c);
    }
  }
}

// -------------------------------------------------------------------------------------------------- norms

// RMS norm (Zhang and Sennrich 2019) of one row, in float32, rounded once; what lies beyond d is zeroed. Without a weight
// there is no norm, and the row is copied.
template <class A> void rms(const A* x, const float* weight, int64_t d, float eps, A* y, int64_t padded) {
  if (!weight) {
    std::memcpy((void*)y, x, d * sizeof(A));
    for (int64_t i = d; i < padded; i++) put(y + i, 0.0f);
    return;
  }
  v16 squares = {};
  int64_t i = 0;
  for (; i + 16 <= d; i += 16) { const v16 v = load_wide(x + i); squares = fma16(v, v, squares); }
  float total = sum16(squares);
  for (; i < d; i++) total += wide(x[i]) * wide(x[i]);
  const float scale = 1.0f / std::sqrt(total / (float)d + eps);
  for (i = 0; i < d; i++) put(y + i, wide(x[i]) * scale * weight[i]);
  for (; i < padded; i++) put(y + i, 0.0f);
}

// In place on one head of float32.
inline void head_norm(float* x, const float* weight, int64_t d, float eps) {
  float total = 0;
  for (int64_t i = 0; i < d; i++) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / (float)d + eps);
  for (int64_t i = 0; i < d; i++) x[i] = x[i] * scale * weight[i];
}

// Rotary embedding (Su et al. 2021) of the first `rotated` dimensions, pairs (i, i + rotated / 2).
inline void rotate(float* x, const float* cos, const float* sin, int64_t rotated) {
  const int64_t half = rotated / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

// ---------------------------------------------------------------------------------------------- attention

// Sixteen sums at once: lane i of the result is the sum over the lanes of a[i], always in the same order.
inline v16 sums16(const v16 a[16]) {
#if PL_AVX512
  __m512 t[8], u[4];
  for (int i = 0; i < 8; i++)
    t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                         _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; i++)
    u[i] = _mm512_add_ps(
        (__m512)_mm512_unpacklo_pd((__m512d)t[2 * i], (__m512d)t[2 * i + 1]),
        (__m512)_mm512_unpackhi_pd((__m512d)t[2 * i], (__m512d)t[2 * i + 1]));
  const __m512 p = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  const __m512 q = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
#else
  float s[16];
  for (int i = 0; i < 16; i++) s[i] = sum16(a[i]);
  return load(s);
#endif
}

// q . k of sixteen keys. head_dim is a multiple of 16.
inline v16 scores16(const float* q, const float* const k[16], int64_t d) {
  v16 a[16] = {};
  for (int first = 0; first < 16; first += SUMS)
    for (int64_t i = 0; i < d; i += 16) {
      const v16 x = load(q + i);
      for (int j = first; j < first + SUMS; j++) a[j] = fma16(x, load(k[j] + i), a[j]);
    }
  return sums16(a);
}
inline v16 scores16(const bf16* q, const bf16* const k[16], int64_t d) {
  v16 a[16] = {};
  int64_t start = 0;
#if PL_DOT_BF16
  for (int64_t& i = start; i + 32 <= d; i += 32) {
    const __m512bh x = (__m512bh)_mm512_loadu_si512(q + i);
    for (int j = 0; j < 16; j++) a[j] = _mm512_dpbf16_ps(a[j], x, (__m512bh)_mm512_loadu_si512(k[j] + i));
  }
#endif
  for (int first = 0; first < 16; first += SUMS)
    for (int64_t i = start; i < d; i += 16) {
      const v16 x = load_wide(q + i);
      for (int j = first; j < first + SUMS; j++) a[j] = fma16(x, load_wide(k[j] + i), a[j]);
    }
  return sums16(a);
}

// sum[m] += weight[m][j] * v[j] over n keys, one after the other; D vectors of 16 dimensions each.
template <int M, int D, class A, class P>
void accumulate(float* const out[], const float* const weight[], int64_t n, P value) {
  v16 sum[M][D];
  for (int m = 0; m < M; m++)
    for (int d = 0; d < D; d++) sum[m][d] = load(out[m] + d * 16);
  for (int64_t j = 0; j < n; j++) {
    const A* v = value(j);
    v16 x[D];
    for (int d = 0; d < D; d++) x[d] = load_wide(v + d * 16);
    for (int m = 0; m < M; m++) {
      const v16 p = splat(weight[m][j]);
      for (int d = 0; d < D; d++) sum[m][d] = fma16(p, x[d], sum[m][d]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int d = 0; d < D; d++) save(out[m] + d * 16, sum[m][d]);
}

template <int M, class A, class P>
void accumulate_dims(float* const out[], const float* const weight[], int64_t n, int64_t dims, P value) {
  float* part[M];
  for (int64_t i = 0; i < dims;) {
    for (int m = 0; m < M; m++) part[m] = out[m] + i;
    auto shifted = [&](int64_t j) { return value(j) + i; };
    const int64_t left = (dims - i) / 16;
    if (left >= 4 && M * 4 <= SUMS) accumulate<M, 4, A>(part, weight, n, shifted), i += 64;
    else if (left >= 2 && M * 2 <= SUMS) accumulate<M, 2, A>(part, weight, n, shifted), i += 32;
    else accumulate<M, 1, A>(part, weight, n, shifted), i += 16;
  }
}

template <class A, class P>
void accumulate_any(int m, float* const out[], const float* const weight[], int64_t n, int64_t dims, P value) {
  if (n == 0) return;
  if (m == 1) accumulate_dims<1, A>(out, weight, n, dims, value);
  else if (m == 2) accumulate_dims<2, A>(out, weight, n, dims, value);
  else if (m == 3) accumulate_dims<3, A>(out, weight, n, dims, value);
  else accumulate_dims<4, A>(out, weight, n, dims, value);
}

// exp(score - max) in place, the sum of it returned: lanes by the key's place, whatever the number of rows.
inline float soften(float* s, int64_t n) {
  v16 most = splat(-INFINITY);
  for (int64_t j = n; j % 16; j++) s[j] = -INFINITY;
  for (int64_t j = 0; j < n; j += 16) most = greater(load(s + j), most);
  const v16 top = splat(max16(most));
  v16 total = {};
  for (int64_t j = 0; j < n; j += 16) {
    save(s + j, exp16(load(s + j) - top));
    if (j + 16 > n) std::fill(s + n, s + j + 16, 0.0f);
    total = total + load(s + j);
  }
  return sum16(total);
}

struct Scratch {  // of one thread, grown on demand
  std::vector<float> scores, out, low, own, found;
  std::vector<char> normed;
  std::vector<int32_t> tail, several, place;
  std::vector<bf16> weights;
};
thread_local Scratch t_scratch;

// What rows r0 .. r0 + count - 1 of a segment see: `common` leading keys, then each its own `tail`.
struct View { int64_t common; int64_t tail_begin[TILE_ROWS + 1]; };

inline View look(const Segment& s, int64_t window, const int64_t* positions, int64_t r0, int count, std::vector<int32_t>& tail) {
  View v{};
  tail.clear();
  const int64_t rows = s.stop - s.start, block = s.num_keys - s.prefix;
  const bool cut = window > 0 && s.num_keys > window;
  const int64_t chain = s.num_keys - rows + 1;  // keys that row 0 of a chain sees
  v.common = cut ? 0 : s.visible ? s.prefix : chain + r0;
  for (int m = 0; m < count; m++) {
    v.tail_begin[m] = (int64_t)tail.size();
    const int64_t row = r0 + m, least = positions[s.start + row] - window;  // in sight: positions above this
    if (!s.visible) {
      const int64_t from = cut ? std::max<int64_t>(0, least + 1) : v.common;
      for (int64_t j = from; j < chain + row; j++) tail.push_back((int32_t)j);
      continue;
    }
    if (cut)
      for (int64_t j = std::max<int64_t>(0, least + 1); j < s.prefix; j++) tail.push_back((int32_t)j);
    const uint8_t* seen = s.visible + row * block;
    for (int64_t j = 0; j < block; j++) {
      uint64_t eight;
      if (j + 8 <= block && (std::memcpy(&eight, seen + j, 8), eight == 0)) { j += 7; continue; }  // most rows see few
      const int64_t at = s.block_positions ? s.block_positions[j] : s.prefix + j;
      if (seen[j] && (!cut || at > least)) tail.push_back((int32_t)(s.prefix + j));
    }
  }
  v.tail_begin[count] = (int64_t)tail.size();
  return v;
}

// Asks for the keys or values of a segment's slots begin .. end - 1.
template <class A> void fetch(const Segment& s, int64_t begin, int64_t end, const A* x, int64_t d) {
  for (int64_t j = begin; j < end; j++) {
    const char* at = (const char*)(x + (s.base >= 0 ? s.base + j : s.keys[j]) * d);
    for (int64_t i = 0; i < d * (int64_t)sizeof(A); i += 64) __builtin_prefetch(at + i, 0, 2);
  }
}
constexpr int64_t AHEAD = 32;  // keys

// Of a turn's 16 keys their values, which are needed when all scores are there, and the keys of the next turn but one.
template <class A> void fetch_turn(const Segment& s, int64_t j, int64_t keys_seen, const A* keys, const A* values, int64_t d) {
  fetch(s, j, std::min(j + 16, keys_seen), values, d);
  fetch(s, j + AHEAD, std::min(j + AHEAD + 16, keys_seen), keys, d);
}

// Where a row's weights go, for streams that choose their keys by them: those of the first `keys`, and -1 for what the
// row does not see.
struct Kept {
  float* to = nullptr;
  int64_t keys = 0;
};

template <class W> void keep_weights(const Kept& kept, const W* w, float total, const View& v, int i, const std::vector<int32_t>& tail) {
  if (!kept.to) return;
  const float scale = 1.0f / total;
  const int64_t common = std::min(v.common, kept.keys);
  for (int64_t j = 0; j < common; j++) kept.to[j] = wide(w[j]) * scale;
  std::fill(kept.to + common, kept.to + kept.keys, -1.0f);
  for (int64_t x = v.tail_begin[i]; x < v.tail_begin[i + 1]; x++)
    if (tail[x] < kept.keys) kept.to[tail[x]] = wide(w[v.common + x - v.tail_begin[i]]) * scale;
}

// Attention of up to VECTORS rows of a segment under one query head.
template <class A>
void attend(const Model& m, const Segment& s, int64_t window, const int64_t* positions, int64_t r0, int count,
            const A* query, int64_t query_stride, const A* keys, const A* values, A* out, int64_t out_stride, const Kept* kept) {
  Scratch& t = t_scratch;
  const int64_t d = m.head_dim, room = up(s.num_keys, 16);
  grow(t.scores, VECTORS * room);
  grow(t.out, VECTORS * d);
  const View view = look(s, window, positions, r0, count, t.tail);
  auto slot = [&](int64_t j) { return s.base >= 0 ? s.base + j : s.keys[j]; };
  auto key_at = [&](int64_t j) { return keys + slot(j) * d; };
  auto value_at = [&](int64_t j) { return values + slot(j) * d; };
  float* score[VECTORS];
  float* sum[VECTORS];
  for (int i = 0; i < count; i++) score[i] = t.scores.data() + i * room, sum[i] = t.out.data() + i * d;

  const A* near[16];
  alignas(64) float found[16];
  for (int64_t j = 0; j < view.common; j += 16) {
    const int64_t n = std::min<int64_t>(16, view.common - j);
    fetch_turn(s, j, view.common, keys, values, d);
    for (int64_t i = 0; i < 16; i++) near[i] = key_at(j + std::min(i, n - 1));
    for (int i = 0; i < count; i++) {
      save(found, scores16(query + i * query_stride, near, d) * splat(m.scale));
      std::memcpy(score[i] + j, found, n * sizeof(float));
    }
  }
  float total[VECTORS];
  for (int i = 0; i < count; i++) {
    const int32_t* own = t.tail.data() + view.tail_begin[i];
    const int64_t owned = view.tail_begin[i + 1] - view.tail_begin[i];
    for (int64_t j = 0; j < owned; j += 16) {
      const int64_t n = std::min<int64_t>(16, owned - j);
      for (int64_t x = 0; x < 16; x++) near[x] = key_at(own[j + std::min(x, n - 1)]);
      save(found, scores16(query + i * query_stride, near, d) * splat(m.scale));
      std::memcpy(score[i] + view.common + j, found, n * sizeof(float));
    }
    total[i] = soften(score[i], view.common + owned);
    if (kept) keep_weights(kept[i], score[i], total[i], view, i, t.tail);
    std::memset(sum[i], 0, d * sizeof(float));
  }
  accumulate_any<A>(count, sum, score, view.common, d, value_at);
  for (int i = 0; i < count; i++) {
    const int32_t* own = t.tail.data() + view.tail_begin[i];
    const int64_t owned = view.tail_begin[i + 1] - view.tail_begin[i];
    const float* rest[1] = {score[i] + view.common};
    accumulate_any<A>(1, sum + i, rest, owned, d, [&](int64_t j) { return value_at(own[j]); });
    const float scale = 1.0f / total[i];
    A* y = out + i * out_stride;
    for (int64_t x = 0; x < d; x++) put(y + x, sum[i][x] * scale);
  }
}

#if PL_DOT_BF16
// Attention on dot products of bf16 pairs, and what it shares with attention on tiles. The weights of keys are rounded to
// bf16 and summed two keys at a time: pairs are counted from a row's first key, whoever else is there. Keys and values that
// several rows see are turned into the order of the products once for all of them.

const bf16 g_zeros[MOST_DIMS] = {};

// 32 sums over interleaved values (unpacklo, unpackhi) in the order of their dimensions, times scale.
inline void ordered(const float* sum, float scale, bf16* out) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 a = _mm512_loadu_ps(sum), b = _mm512_loadu_ps(sum + 16), by = _mm512_set1_ps(scale);
  const __m512 first = _mm512_mul_ps(_mm512_permutex2var_ps(a, low, b), by);
  const __m512 second = _mm512_mul_ps(_mm512_permutex2var_ps(a, high, b), by);
  _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// 16 x 16 of 32 bits: lane j of out[i] is lane i of in[j].
inline void transpose16(const __m512i in[16], __m512i out[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]), a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
    }
  for (int i = 0; i < 4; i++) {  // b[4 g + i]: lanes i, 4 + i, 8 + i, 12 + i of keys 4 g .. 4 g + 3
    const __m512i p = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), q = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    const __m512i r = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88), t = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    out[i] = _mm512_shuffle_i32x4(p, r, 0x88), out[8 + i] = _mm512_shuffle_i32x4(p, r, 0xdd);
    out[4 + i] = _mm512_shuffle_i32x4(q, t, 0x88), out[12 + i] = _mm512_shuffle_i32x4(q, t, 0xdd);
  }
}

inline __m512 dot_pairs(__m512 sum, const void* line, const bf16* pair) {
  int32_t two;
  std::memcpy(&two, pair, 4);
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_load_si512(line), (__m512bh)_mm512_set1_epi32(two));
}

// q . k of sixteen keys for R rows: the sums of `scores16`, in its order, from keys [d / 2][16][2].
template <int R> void turned_scores(const bf16* q, int64_t stride, const bf16* turned, int64_t d, float scale, float* const score[], int64_t n) {
  __m512 parts[R][4];
#pragma GCC unroll 4
  for (int lane = 0; lane < 4; lane++) {
    __m512 sum[R][4];
    for (int r = 0; r < R; r++)
      for (int e = 0; e < 4; e++) sum[r][e] = _mm512_setzero_ps();
    for (int64_t i = lane * 8; i < d; i += 32)
#pragma GCC unroll 4
      for (int e = 0; e < 4; e++)
        for (int r = 0; r < R; r++) sum[r][e] = dot_pairs(sum[r][e], turned + (i + 2 * e) * LANES, q + r * stride + i + 2 * e);
    for (int r = 0; r < R; r++)
      parts[r][lane] = _mm512_add_ps(_mm512_add_ps(sum[r][0], sum[r][2]), _mm512_add_ps(sum[r][1], sum[r][3]));
  }
  const __mmask16 mask = n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1);
  for (int r = 0; r < R; r++) {
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(parts[r][0], parts[r][1]), _mm512_add_ps(parts[r][2], parts[r][3]));
    _mm512_mask_storeu_ps(score[r], mask, _mm512_mul_ps(sum, _mm512_set1_ps(scale)));
  }
}

template <class K> void turn_keys(K key, int64_t n, int64_t d, bf16* turned) {
  for (int64_t i = 0; i < d; i += 32) {
    __m512i in[16], out[16];
    for (int j = 0; j < 16; j++) in[j] = _mm512_loadu_si512(key(std::min<int64_t>(j, n - 1)) + i);
    transpose16(in, out);
    for (int j = 0; j < 16; j++) _mm512_store_si512(turned + (i + 2 * j) * LANES, out[j]);
  }
}

// sum[r] [D * 16] += weights of pairs x values of pairs [pairs][dims][2 keys], for R rows and 16 * D of the dimensions.
template <int R, int D>
void add_pairs(const bf16* const weight[], int64_t pairs, const bf16* values, int64_t step, float* const sum[], int64_t at) {
  __m512 s[R][D];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < D; i++) s[r][i] = _mm512_loadu_ps(sum[r] + at + i * 16);
  for (int64_t p = 0; p < pairs; p++, values += step) {
    __m512bh v[D];
    for (int i = 0; i < D; i++) v[i] = (__m512bh)_mm512_load_si512(values + at * 2 + i * 32);
    for (int r = 0; r < R; r++) {
      int32_t two;
      std::memcpy(&two, weight[r] + 2 * p, 4);
      for (int i = 0; i < D; i++) s[r][i] = _mm512_dpbf16_ps(s[r][i], v[i], (__m512bh)_mm512_set1_epi32(two));
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < D; i++) _mm512_storeu_ps(sum[r] + at + i * 16, s[r][i]);
}

template <int R> void add_pairs_dims(const bf16* const weight[], int64_t pairs, const bf16* values, int64_t d, float* const sum[]) {
  int64_t at = 0;
  for (; at + 64 <= d; at += 64) add_pairs<R, 4>(weight, pairs, values, 2 * d, sum, at);
  for (; at < d; at += 32) add_pairs<R, 2>(weight, pairs, values, 2 * d, sum, at);
}

template <class V> void interleave_values(V value, int64_t n, int64_t d, bf16* out) {  // [pairs][d / 32][2][32]
  for (int64_t j = 0; j < n; j += 2, out += 2 * d) {
    const bf16 *even = value(j), *odd = j + 1 < n ? value(j + 1) : g_zeros;
    for (int64_t i = 0; i < d; i += 32) {
      const __m512i a = _mm512_loadu_si512(even + i), b = _mm512_loadu_si512(odd + i);
      _mm512_store_si512(out + 2 * i, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(out + 2 * i + 32, _mm512_unpackhi_epi16(a, b));
    }
  }
}

// sum[r] += weights [keys] values over n keys, an even number of keys behind each row's first.
template <class V>
void pair_values(const bf16* const weight[], int count, int64_t n, int64_t d, V value, float* const sum[]) {
  alignas(64) bf16 pairs[TILE_KEYS * MOST_DIMS];
  for (int64_t j = 0; j < n; j += TILE_KEYS) {
    const int64_t keys = std::min<int64_t>(TILE_KEYS, n - j), half = (keys + 1) / 2;
    interleave_values([&](int64_t x) { return value(j + x); }, keys, d, pairs);
    const bf16* w[TILE_ROWS];
    for (int r = 0; r < count; r++) w[r] = weight[r] + j;
    int r = 0;
    for (; r + 4 <= count; r += 4) add_pairs_dims<4>(w + r, half, pairs, d, sum + r);
    if (count - r == 3) add_pairs_dims<3>(w + r, half, pairs, d, sum + r);
    else if (count - r == 2) add_pairs_dims<2>(w + r, half, pairs, d, sum + r);
    else if (count - r == 1) add_pairs_dims<1>(w + r, half, pairs, d, sum + r);
  }
}

// `soften`, into bf16: zeros behind the last weight up to a multiple of TILE_KEYS.
inline float soften(float* s, int64_t n, bf16* w) {
  const int64_t end = up(n, TILE_KEYS);
  for (int64_t j = n; j < end; j++) s[j] = -INFINITY;
  __m512 most = _mm512_set1_ps(-INFINITY);
  for (int64_t j = 0; j < end; j += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(s + j));
  const v16 top = splat(_mm512_reduce_max_ps(most));
  v16 first = {}, second = {};
  int64_t j = 0;
  for (; j + 32 <= n; j += 32) {
    const v16 a = exp16(load(s + j) - top), b = exp16(load(s + j + 16) - top);
    first = first + a, second = second + b;
    _mm512_storeu_si512(w + j, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  if (j < n) {  // what lies behind the last key has no weight, though the smallest exp is not 0
    const uint32_t there = n - j >= 32 ? ~0u : (1u << (n - j)) - 1;
    const v16 a = _mm512_maskz_mov_ps((__mmask16)there, exp16(load(s + j) - top));
    const v16 b = _mm512_maskz_mov_ps((__mmask16)(there >> 16), exp16(load(s + j + 16) - top));
    first = first + a, second = second + b;
    _mm512_storeu_si512(w + j, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  return sum16(first + second);
}

// Attention of up to TILE_ROWS rows of a segment under one query head. head_dim is a multiple of 32, at most MOST_DIMS.
void attend_pairs(const Model& m, const Segment& s, int64_t window, const int64_t* positions, int64_t r0, int count,
                  const bf16* query, int64_t query_stride, const bf16* keys, const bf16* values, bf16* out, int64_t out_stride,
                  const Kept* kept) {
  Scratch& t = t_scratch;
  const int64_t d = m.head_dim, room = up(s.num_keys, TILE_KEYS);
  grow(t.scores, count * room);
  grow(t.weights, count * room);
  grow(t.out, count * d);
  const View view = look(s, window, positions, r0, count, t.tail);
  auto slot = [&](int64_t j) { return s.base >= 0 ? s.base + j : s.keys[j]; };
  auto own = [&](int i, int64_t j) { return slot(j < view.common ? j : t.tail[view.tail_begin[i] + j - view.common]); };
  float* score[TILE_ROWS];
  for (int i = 0; i < count; i++) score[i] = t.scores.data() + i * room;

  alignas(64) bf16 turned[16 * MOST_DIMS];
  const bf16* near[16];
  alignas(64) float found[16];
  auto alone = [&](int i, int64_t j, int64_t n) {  // scores of the n keys at `near` to row i, for its keys j ..
    save(found, scores16(query + i * query_stride, near, d) * splat(m.scale));
    std::memcpy(score[i] + j, found, n * sizeof(float));
  };
  for (int64_t j = 0; j < view.common; j += 16) {
    const int64_t n = std::min<int64_t>(16, view.common - j);
    fetch_turn(s, j, view.common, keys, values, d);
    if (count < 3) {
      for (int64_t x = 0; x < 16; x++) near[x] = keys + slot(j + std::min(x, n - 1)) * d;
      for (int i = 0; i < count; i++) alone(i, j, n);
      continue;
    }
    turn_keys([&](int64_t x) { return keys + slot(j + x) * d; }, n, d, turned);
    float* to[TILE_ROWS];
    for (int i = 0; i < count; i++) to[i] = score[i] + j;
    int i = 0;
    for (; i + 4 <= count; i += 4) turned_scores<4>(query + i * query_stride, query_stride, turned, d, m.scale, to + i, n);
    if (count - i == 3) turned_scores<3>(query + i * query_stride, query_stride, turned, d, m.scale, to + i, n);
    else if (count - i == 2) turned_scores<2>(query + i * query_stride, query_stride, turned, d, m.scale, to + i, n);
    else if (count - i == 1) turned_scores<1>(query + i * query_stride, query_stride, turned, d, m.scale, to + i, n);
  }
  float total[TILE_ROWS];
  const bf16* weight[TILE_ROWS];
  float* sum[TILE_ROWS];
  for (int i = 0; i < count; i++) {
    const int64_t seen = view.common + view.tail_begin[i + 1] - view.tail_begin[i];
    for (int64_t j = view.common; j < seen; j += 16) {
      const int64_t n = std::min<int64_t>(16, seen - j);
      for (int64_t x = 0; x < 16; x++) near[x] = keys + own(i, j + std::min(x, n - 1)) * d;
      alone(i, j, n);
    }
    bf16* w = t.weights.data() + i * room;
    total[i] = soften(score[i], seen, w);
    if (kept) keep_weights(kept[i], w, total[i], view, i, t.tail);
    weight[i] = w, sum[i] = t.out.data() + i * d;
    std::memset(sum[i], 0, d * sizeof(float));
  }
  const int64_t shared = view.common / 2 * 2;
  pair_values(weight, count, shared, d, [&](int64_t j) { return values + slot(j) * d; }, sum);
  for (int i = 0; i < count; i++) {
    const int64_t rest = view.common - shared + view.tail_begin[i + 1] - view.tail_begin[i];
    const bf16* w = weight[i] + shared;
    pair_values(&w, 1, rest, d, [&](int64_t j) { return values + own(i, shared + j) * d; }, sum + i);
    for (int64_t x = 0; x < d; x += 32) ordered(sum[i] + x, 1.0f / total[i], out + i * out_stride + x);
  }
}
#endif

#if PL_AMX
// Attention on tiles. Scores come as [16 keys, R rows] from keys as they lie in the cache and queries
// interleaved once; values are interleaved in pairs of keys on the way. What all rows of a task share is
// computed for R of them at once, what is a row's own for that row alone: a row's sum is over its keys in
// tiles of TILE_KEYS, counted from its first, whoever else is there.

void configure_attention(int rows) {  // 0: scores, 1: keys, 2: queries, 3-4: sums, 5: weights, 6-7: values
  TileConfig c;
  auto shape = [&](int t, int r, int bytes) { c.rows[t] = r, c.bytes[t] = bytes; };
  shape(0, 16, rows * 4), shape(1, 16, 64), shape(2, 16, rows * 4);
  shape(3, rows, 64), shape(4, rows, 64), shape(5, rows, 64), shape(6, 16, 64), shape(7, 16, 64);
  load_tile_config(c);
}

// In place: `count` vectors of interleaved elements -> those of even place, then those of odd place; and again
// within each half. Vector v then holds row reversed(v).
inline void unzip(__m512 v[], int count) {
  if (count == 1) return;
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  __m512 half[TILE_ROWS];
  for (int i = 0; i < count / 2; i++) {
    half[i] = _mm512_permutex2var_ps(v[2 * i], even, v[2 * i + 1]);
    half[count / 2 + i] = _mm512_permutex2var_ps(v[2 * i], odd, v[2 * i + 1]);
  }
  unzip(half, count / 2);
  unzip(half + count / 2, count / 2);
  for (int i = 0; i < count; i++) v[i] = half[i];
}
inline int reversed(int v, int count) {
  int r = 0;
  for (int bit = 1; bit < count; bit *= 2) r = r * 2 + (v & bit ? 1 : 0);
  return r;
}

// [d / 32][16 pairs of dimensions][rows][2]: queries as the second factor of a tile product.
void interleave_queries(const bf16* query, int64_t stride, int count, int rows, int64_t d, bf16* out) {
  for (int64_t pair = 0; pair < d / 2; pair++)
    for (int r = 0; r < rows; r++)
      std::memcpy(out + (pair * rows + r) * 2, query + std::min(r, count - 1) * stride + pair * 2, 4);
}

// score[r][j] of sixteen keys, for `rows` (a power of two) rows of which `count` are wanted.
template <class K>
inline void tile_scores(const bf16* queries, int rows, int count, int64_t d, float scale, bool together, K key, int64_t n,
                        float* const score[], int64_t j) {
  alignas(64) bf16 near[16 * MOST_DIMS];
  const bf16* keys = key(0);
  if (!together || n < 16) {
    for (int i = 0; i < 16; i++) std::memcpy(near + i * d, i < n ? key(i) : g_zeros, d * sizeof(bf16));
    keys = near;
  }
  _tile_zero(0);
  for (int64_t i = 0; i < d; i += 32) {
    tile_load(1, keys + i, d * 2);
    tile_load(2, queries + i * rows, rows * 4);
    _tile_dpbf16ps(0, 1, 2);
  }
  alignas(64) float found[16 * TILE_ROWS];
  _tile_stored(0, found, rows * 4);
  __m512 v[TILE_ROWS];
  for (int r = 0; r < rows; r++) v[r] = _mm512_mul_ps(_mm512_load_ps(found + r * 16), _mm512_set1_ps(scale));
  unzip(v, rows);
  const __mmask16 mask = n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1);
  for (int r = 0; r < rows; r++) {
    const int to = reversed(r, rows);
    if (to < count) _mm512_mask_storeu_ps(score[to] + j, mask, v[r]);
  }
}

// sum[r] [d] += weights [rows, keys] values, TILE_KEYS keys at a time. `sum` keeps the dimensions of each 32 in
// the order that interleaving gives them; see `ordered`.
template <class V>
void tile_values(const bf16* weights, int64_t weight_stride, int64_t n, int64_t d, V value, float* sum, int64_t sum_stride) {
  alignas(64) bf16 pairs[2][16 * 32];
  for (int64_t i = 0; i < d; i += 32) {
    tile_load(3, sum + i, sum_stride * 4);
    tile_load(4, sum + i + 16, sum_stride * 4);
    for (int64_t j = 0; j < n; j += TILE_KEYS) {
      for (int64_t pair = 0; pair < 16; pair++) {
        const int64_t at = j + pair * 2;
        const __m512i a = _mm512_loadu_si512((at < n ? value(at) : g_zeros) + i);
        const __m512i b = _mm512_loadu_si512((at + 1 < n ? value(at + 1) : g_zeros) + i);
        _mm512_store_si512(pairs[0] + pair * 32, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(pairs[1] + pair * 32, _mm512_unpackhi_epi16(a, b));
      }
      tile_load(5, weights + j, weight_stride * 2);
      tile_load(6, pairs[0], 64);
      tile_load(7, pairs[1], 64);
      _tile_dpbf16ps(3, 5, 6);
      _tile_dpbf16ps(4, 5, 7);
    }
    _tile_stored(3, sum + i, sum_stride * 4);
    _tile_stored(4, sum + i + 16, sum_stride * 4);
  }
}

// Values of TILE_KEYS keys, interleaved in pairs of keys, for tile after tile of which little changes between two.
struct ValuePairs {
  alignas(64) bf16 lines[MOST_DIMS / 32][2][16 * 32];
  int64_t d, filled = 0;  // pairs from here on are zero
  explicit ValuePairs(int64_t dims) : d(dims) { std::memset(lines, 0, d / 32 * sizeof(lines[0])); }
  void put(int64_t pair, const bf16* even, const bf16* odd) {
    for (int64_t i = 0; i < d; i += 32) {
      const __m512i a = _mm512_loadu_si512(even + i), b = _mm512_loadu_si512(odd + i);
      _mm512_store_si512(lines[i / 32][0] + pair * 32, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(lines[i / 32][1] + pair * 32, _mm512_unpackhi_epi16(a, b));
    }
  }
  // Keys 2 * from .. n - 1 anew, those before as they are, none behind.
  template <class V> void fill(int64_t from, int64_t n, V value) {
    const int64_t pairs = (n + 1) / 2;
    for (int64_t p = from; p < pairs; p++) put(p, value(2 * p), 2 * p + 1 < n ? value(2 * p + 1) : g_zeros);
    for (int64_t p = pairs; p < filled; p++) put(p, g_zeros, g_zeros);
    filled = pairs;
  }
  // sum [d] += weights [TILE_KEYS] values, for one row.
  void add(const bf16* weights, float* sum) const {
    tile_load(5, weights, 64);
    for (int64_t i = 0; i < d; i += 32) {
      tile_load(3, sum + i, 64);
      tile_load(4, sum + i + 16, 64);
      tile_load(6, lines[i / 32][0], 64);
      tile_load(7, lines[i / 32][1], 64);
      _tile_dpbf16ps(3, 5, 6);
      _tile_dpbf16ps(4, 5, 7);
      _tile_stored(3, sum + i, 64);
      _tile_stored(4, sum + i + 16, 64);
    }
  }
};

// All keys from `shared` on that some row sees go to t.several, and where key common + i stands there to t.place[i].
// False where the rows' own tiles of keys are not many more than those.
bool join(const View& view, int64_t shared, int count, Scratch& t) {
  if (count == 1) return false;
  int32_t last = (int32_t)view.common - 1;
  for (int32_t j : t.tail) {
    if (j < view.common) return false;  // a sliding window
    last = std::max(last, j);
  }
  t.place.assign(last + 1 - view.common, 0);
  for (int32_t j : t.tail) t.place[j - view.common] = 1;
  t.several.clear();
  for (int64_t j = shared; j < view.common; j++) t.several.push_back((int32_t)j);
  for (int64_t i = 0; i < (int64_t)t.place.size(); i++) {
    if (!t.place[i]) continue;
    t.place[i] = (int32_t)t.several.size();
    t.several.push_back((int32_t)(view.common + i));
  }
  int64_t alone = 0;
  for (int i = 0; i < count; i++) alone += up(view.common - shared + view.tail_begin[i + 1] - view.tail_begin[i], 16) / 16;
  return up((int64_t)t.several.size(), 16) / 16 * 2 <= alone;
}

void attend_tiles(const Model& m, const Segment& s, int64_t window, const int64_t* positions, int64_t r0, int count,
                  const bf16* query, int64_t query_stride, const bf16* keys, const bf16* values, bf16* out, int64_t out_stride,
                  const Kept* kept) {
  Scratch& t = t_scratch;
  const int64_t d = m.head_dim, room = up(s.num_keys, TILE_KEYS) + TILE_KEYS;
  grow(t.scores, TILE_ROWS * room);
  grow(t.weights, TILE_ROWS * room);
  grow(t.out, TILE_ROWS * d);
  const View view = look(s, window, positions, r0, count, t.tail);
  auto slot = [&](int64_t j) { return s.base >= 0 ? s.base + j : s.keys[j]; };
  int rows = 1;
  while (rows < count) rows *= 2;
  float* score[TILE_ROWS];
  for (int i = 0; i < count; i++) score[i] = t.scores.data() + i * room;
  alignas(64) bf16 queries[TILE_ROWS * MOST_DIMS];
  interleave_queries(query, query_stride, count, rows, d, queries);

  // Keys that every row has at the same place, in whole tiles; the rest is each row's own.
  const bool lone = count == 1 && view.tail_begin[1] == 0;
  const int64_t shared = lone ? view.common : view.common / TILE_KEYS * TILE_KEYS;
  configure_attention(rows);
  for (int64_t j = 0; j < shared; j += 16)
    tile_scores(queries, rows, count, d, m.scale, s.base >= 0, [&](int64_t i) { return keys + slot(j + i) * d; },
                std::min<int64_t>(16, shared - j), score, j);
  auto own_key = [&](int i, int64_t j) {  // key j of row i, for j >= shared
    return slot(j < view.common ? j : t.tail[view.tail_begin[i] + j - view.common]);
  };
  int64_t seen[TILE_ROWS];
  bool any = false;
  for (int i = 0; i < count; i++) {
    seen[i] = view.common + view.tail_begin[i + 1] - view.tail_begin[i];
    any = any || seen[i] > shared;
  }
  const bool jointly = any && join(view, shared, count, t);
  if (jointly) {
    const int64_t all = (int64_t)t.several.size(), wide_as = up(all, 16);
    grow(t.found, TILE_ROWS * wide_as);
    float* found[TILE_ROWS];
    for (int i = 0; i < count; i++) found[i] = t.found.data() + i * wide_as;
    for (int64_t j = 0; j < all; j += 16)
      tile_scores(queries, rows, count, d, m.scale, false, [&](int64_t i) { return keys + slot(t.several[j + i]) * d; },
                  std::min<int64_t>(16, all - j), found, j);
    for (int i = 0; i < count; i++) {
      std::memcpy(score[i] + shared, found[i], (view.common - shared) * sizeof(float));
      for (int64_t j = view.tail_begin[i], to = view.common; j < view.tail_begin[i + 1]; j++, to++)
        score[i][to] = found[i][t.place[t.tail[j] - view.common]];
    }
  } else if (any) {
    if (rows > 1) configure_attention(1);
    for (int i = 0; i < count; i++) {
      if (rows > 1) interleave_queries(query + i * query_stride, 0, 1, 1, d, queries);
      for (int64_t j = shared; j < seen[i]; j += 16)
        tile_scores(queries, 1, 1, d, m.scale, false, [&](int64_t x) { return keys + own_key(i, j + x) * d; },
                    std::min<int64_t>(16, seen[i] - j), score + i, j);
    }
  }
  float total[TILE_ROWS];
  for (int i = 0; i < count; i++) {
    total[i] = soften(score[i], seen[i]);
    if (kept) keep_weights(kept[i], score[i], total[i], view, i, t.tail);
    bf16* w = t.weights.data() + i * room;
    const int64_t end = up(seen[i], TILE_KEYS);
    for (int64_t j = up(seen[i], 16); j < end; j++) score[i][j] = 0.0f;
    for (int64_t j = 0; j < end; j += 32)
      _mm512_storeu_si512(w + j, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(score[i] + j + 16), _mm512_loadu_ps(score[i] + j)));
  }
  float* sum = t.out.data();
  std::memset(sum, 0, rows * d * sizeof(float));
  if (shared) {
    if (any && !jointly && rows > 1) configure_attention(rows);
    tile_values(t.weights.data(), room, shared, d, [&](int64_t j) { return values + slot(j) * d; }, sum, d);
  }
  if (any) {
    if (rows > 1) configure_attention(1);
    ValuePairs pairs(d);
    const int64_t common = (view.common - shared) / 2;  // pairs that every row has in its first tile
    int64_t kept = 0;                                   // of those, as many as are there
    for (int i = 0; i < count; i++)
      for (int64_t j = shared; j < seen[i]; j += TILE_KEYS) {
        pairs.fill(j == shared ? kept : 0, std::min<int64_t>(TILE_KEYS, seen[i] - j), [&](int64_t x) { return values + own_key(i, j + x) * d; });
        kept = j == shared ? common : 0;
        pairs.add(t.weights.data() + i * room + j, sum + i * d);
      }
  }
  for (int i = 0; i < count; i++)
    for (int64_t x = 0; x < d; x += 32) ordered(sum + i * d + x, 1.0f / total[i], out + i * out_stride + x);
}
#endif

// Whether attention takes bf16 pairs, on tiles or not; else it multiplies single elements.
template <class A> inline bool on_pairs(const Model&) { return false; }
#if PL_DOT_BF16
template <> inline bool on_pairs<bf16>(const Model& m) { return m.head_dim % 32 == 0 && m.head_dim <= MOST_DIMS; }
#endif
template <class A> inline bool on_tiles(const Model& m) { return g_isa == AMX_BF16 && on_pairs<A>(m); }

// ----------------------------------------------------------------------------------------------- adapters

constexpr int64_t WORTH = 1 << 17;  // weights of a layer, times rows / 4, that a further thread is worth

enum Which { QKV = 0, OUT = 1, UP = 2, DOWN = 3, MLP = 4, PAIRS = 5 };  // of a layer's adapters

// The part of a range that lies in one chunk of ROWS rows.
struct Piece {
  int64_t begin, end;
  const LowRank* adapter;  // [layers][PAIRS]
  bool same;               // the piece before it has the same chunk and the same adapter
};
struct Pieces {
  std::vector<Piece> all;
  std::vector<int64_t> first;  // [chunks + 1] first piece of each chunk
};
thread_local Pieces t_pieces;

// Cuts a pass's ranges where its chunks of rows end.
inline void cut(const Pass& p, Pieces& pieces) {
  pieces.all.clear();
  pieces.first.clear();
  int64_t range = 0;
  for (int64_t r0 = 0; r0 < p.rows && p.num_adapters; r0 += ROWS) {
    const int64_t end = std::min<int64_t>(r0 + ROWS, p.rows);
    const LowRank* last = nullptr;
    pieces.first.push_back((int64_t)pieces.all.size());
    while (range < p.num_adapters && p.adapters[range].start < end) {
      const AdapterRange& a = p.adapters[range];
      pieces.all.push_back({std::max(a.start, r0), std::min(a.stop, end), a.adapter, a.adapter == last});
      last = a.adapter;
      if (a.stop > end) break;  // it goes on in the next chunk
      range++;
    }
  }
  pieces.first.push_back((int64_t)pieces.all.size());
}

// ------------------------------------------------------------------------------------- streams that see few keys

// Of weights [n] the `most` largest that are not below 0, of equal ones the first; their places, ascending, go to `chosen`.
void choose_largest(const float* weights, int64_t n, int64_t most, std::vector<int32_t>& chosen) {
  typedef int32_t __attribute__((may_alias)) bits;
  const bits* x = (const bits*)weights;  // floats from 0 on have the order of their bits
  auto above = [&](int32_t least) {
    int32_t count = 0;
    for (int64_t j = 0; j < n; j++) count += x[j] >= least;
    return (int64_t)count;
  };
  int32_t low = 0, high = INT32_MAX;  // the last one that is chosen is at least `low`, below `high`
  if (above(0) > most)
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      (above(middle) >= most ? low : high) = middle;
    }
  int64_t equal = most - above(low + 1);
  chosen.clear();
  for (int64_t j = 0; j < n; j++)
    if (x[j] > low || (x[j] == low && equal-- > 0)) chosen.push_back((int32_t)j);
}

// The streams of one main row in one layer: what they attend to is a segment of its own.
struct Few {
  const Limit* limit;
  const Segment* streams;  // where all that they may see is listed
  int64_t own;             // place of the main row's own key
  Segment segment;
  std::vector<int32_t> chosen, siblings;  // keys of `streams`
  std::vector<int64_t> keys;
  std::vector<uint8_t> visible;

  int64_t rows() const { return limit->stop - limit->start; }
  int64_t slot(int64_t j) const { return streams->base >= 0 ? streams->base + j : streams->keys[j]; }
  int64_t position(int64_t j) const {
    return j < streams->prefix || !streams->block_positions ? j : streams->block_positions[j - streams->prefix];
  }
  bool sees(int64_t row, int64_t j) const {  // a key behind those that are chosen from
    const int64_t block = streams->num_keys - streams->prefix, r = limit->start - streams->start + row;
    if (!streams->visible) return j <= streams->num_keys - (streams->stop - streams->start) + r;
    return streams->visible[r * block + j - streams->prefix];
  }

  // `weights`: of the main row, summed over heads.
  void choose(float* weights, int64_t window, const int64_t* positions) {
    weights[own] = INFINITY;
    choose_largest(weights, limit->keys, limit->most, chosen);
    siblings.clear();
    for (int64_t j = limit->keys; j < streams->num_keys; j++)
      if (sees(rows() - 1, j)) siblings.push_back((int32_t)j);
    keys.clear();
    for (int32_t j : chosen) keys.push_back(slot(j));
    for (int32_t j : siblings) keys.push_back(slot(j));
    const int64_t few = (int64_t)chosen.size(), all = (int64_t)keys.size();
    const bool cut = window > 0 && streams->num_keys > window;  // a stream's window ends before its main row's does
    segment = {limit->start, limit->stop, few, all, -1, keys.data(), nullptr, nullptr};
    bool chain = all - few == rows();
    for (int64_t r = 0; chain && r + 1 < rows(); r++) chain = sees(r, siblings[r]) && !sees(r, siblings[r + 1]);
    if (chain && !cut) return;
    visible.assign(rows() * all, 0);
    for (int64_t r = 0; r < rows(); r++) {
      const int64_t least = cut ? positions[limit->start + r] - window : -1;
      for (int64_t j = 0; j < few; j++) visible[r * all + j] = position(chosen[j]) > least;
      for (int64_t j = few; j < all; j++) visible[r * all + j] = sees(r, siblings[j - few]);
    }
    segment.prefix = 0, segment.visible = visible.data();
  }
};

struct Limited {  // of one pass
  std::vector<Few> all;
  std::vector<int32_t> of_row;     // [rows] -1: no streams see few keys of this one's
  std::vector<uint8_t> segments;   // whether its rows are such streams
  std::vector<float> weights;      // [limits, heads, room]
  int64_t room = 0;
};
thread_local Limited t_limited;

// ------------------------------------------------------------------------------------------------ the pass

struct Buffers {  // of one pass, shared by its threads; bf16 rows are padded to whole tiles
  std::vector<char> memory;
  char* at = nullptr;
  template <class A> static int64_t room(int64_t n) { return up(n * (int64_t)sizeof(A), 64) + FENCE; }  // bytes of `take`
  // So many bytes, of which parts are then taken; earlier parts are gone.
  void open(int64_t bytes) {
    unwatch(memory.data(), (int64_t)memory.size());
    if ((int64_t)memory.size() < bytes + 64) memory.resize(bytes + 64);
    at = (char*)up((int64_t)memory.data(), 64);
  }
  template <class A> A* take(int64_t n) {
    A* p = (A*)at;
    at += room<A>(n);
    watch((char*)(p + n), at - (char*)(p + n));
    return p;
  }
};
thread_local Buffers t_buffers;

// What layers compute of their rows: all; all but K and V; or K and V alone, every layer of states of its own.
enum Part { WHOLE, QUERIES, KEYS };

template <class A> struct Runner final : Job {
  enum Kind { NORM, PROJECT, ATTEND, CHOOSE, ATTEND_FEW, ADD, NORM_AGAIN, GATE, ADD_AGAIN };

  const Model& m;
  const Pass& p;
  const int start, stop;
  const Part part;
  const int64_t apart;  // elements between the states of two layers; 0: each takes the place of those before
  int64_t rows, padded_rows, d, attended_width, ff;
  A *normed, *query, *attended, *middle, *inner;
  int64_t width = 1;  // threads that take part
  bool alone;  // so few rows that every thread norms them for itself, without a stage
  int64_t tasks = 0;  // of attention, in a layer without a window
  Pieces& pieces = t_pieces;
  // A tile computes all rows of a chunk at the price of one, so pieces with the same adapter share a product; without
  // tiles each has one of its own. A row's bits are the same either way.
  const bool in_tiles = std::is_same_v<A, bf16> && g_isa == AMX_BF16;
  int64_t low_width = 0;  // of a row of down(x)
  Limited& limited = t_limited;
  Kind order[9];  // a layer's stages: of the norms only where `alone` is false, of few keys only where some streams see few
  int64_t per_layer = 0;

  Runner(const Model& model, const Pass& pass, int begin, int end, Part which, int64_t between)
      : m(model), p(pass), start(begin), stop(end), part(which), apart(between) {
    rows = p.rows, padded_rows = up(rows, ROWS);
    d = up(m.d_model, K_STEP), attended_width = up(m.heads * m.head_dim, K_STEP), ff = up(m.d_ff, K_STEP);
    alone = rows <= 4;
    width = worth(start);
    const int64_t sizes[] = {(alone ? 0 : padded_rows * d), rows * m.heads * m.head_dim, padded_rows * attended_width,
                             rows * m.d_model, padded_rows * ff};
    int64_t bytes = 0;
    for (int64_t n : sizes) bytes += Buffers::room<A>(n);
    Buffers& b = t_buffers;
    b.open(bytes);
    normed = b.take<A>(sizes[0]);
    query = b.take<A>(sizes[1]);
    attended = b.take<A>(sizes[2]);
    middle = b.take<A>(sizes[3]);
    inner = b.take<A>(sizes[4]);
    cut(p, pieces);
    for (int64_t i = 0; i < p.num_adapters; i++) low_width = std::max(low_width, up(p.adapters[i].rank, K_STEP));
    for (Kind kind : {NORM, PROJECT, ATTEND, CHOOSE, ATTEND_FEW, ADD, NORM_AGAIN, GATE, ADD_AGAIN}) {
      const bool norm = kind == NORM || kind == NORM_AGAIN, few = kind == CHOOSE || kind == ATTEND_FEW;
      if (part == KEYS && kind > PROJECT) break;
      if (!(norm && alone) && !(few && !p.num_limits)) order[per_layer++] = kind;
    }
    if (p.num_limits) limit();
  }

  void limit() {
    limited.all.resize(p.num_limits), limited.of_row.assign(rows, -1), limited.segments.assign(p.num_segments, 0);
    int64_t keys = 0;
    for (int64_t i = 0; i < p.num_limits; i++) {
      const Limit& l = p.limits[i];
      const Segment &main = segment_of(p, l.row), &s = segment_of(p, l.start);
      Few& few = limited.all[i];
      few.limit = &l, few.streams = &s, few.own = l.keys - (main.stop - l.row);
      limited.of_row[l.row] = (int32_t)i, limited.segments[&s - p.segments] = 1;
      keys = std::max(keys, l.keys);
    }
    limited.room = up(keys, 16);
    grow(limited.weights, p.num_limits * m.heads * limited.room);
  }

  // Threads that pay for meeting five times a layer: a small network is faster with few of them.
  int64_t worth(int layer) const {
    const Layer& l = m.layers[layer];
    int64_t weights = 0;
    for (const Linear* w : {&l.qkv, &l.out, &l.up, &l.down}) weights += w->n * w->k;
    if (part == KEYS) weights = num_heads() * m.head_dim * l.qkv.k;
    return std::max<int64_t>(1, std::min(p.threads, weights * std::max<int64_t>(1, rows / 4) / WORTH));
  }

  int64_t slot(int64_t row) const { return p.slots ? p.slots[row] : p.slot_base + row; }

  // Heads that are projected: of queries, then of keys, then of values.
  int64_t first_head() const { return part == KEYS ? m.heads : 0; }
  int64_t num_heads() const { return (part == KEYS ? 0 : m.heads) + (part == QUERIES ? 0 : 2 * m.kv_heads); }

  A* output(int index) const { return (A*)p.hidden_out + (index - start) * apart; }
  const A* input(int index) const {
    if (part == KEYS) return (const A*)p.hidden_in + (index - start) * apart;
    return index == start ? (const A*)p.hidden_in : output(index - 1);
  }

  // -- the job

  int64_t stages() const override { return (stop - start) * per_layer; }
  int layer_of(int64_t stage) const { return start + (int)(stage / per_layer); }
  Kind kind_of(int64_t stage) const { return order[stage % per_layer]; }

  int64_t units(int64_t stage) const override {
    switch (kind_of(stage)) {
      case NORM: case NORM_AGAIN: return rows;
      case PROJECT: return num_heads();
      case ATTEND: return attention_tasks(m.layers[layer_of(stage)]);
      case CHOOSE: return p.num_limits;
      case ATTEND_FEW: return p.num_limits * m.heads;
      case GATE: return m.d_ff / LANES;
      default: return up(m.d_model, LANES) / LANES;
    }
  }

  int64_t step(int64_t stage) const override {
    const Kind kind = kind_of(stage);
    return kind == ADD || kind == ADD_AGAIN ? BLOCKS : kind == GATE ? BLOCKS / 2 : 1;
  }

  void work(int64_t stage, const Claim& claim) override {
    const int index = layer_of(stage);
    const Layer& l = m.layers[index];
    const A* in = input(index);
    const Kind kind = kind_of(stage);
    const bool fresh = claim.fresh, multiplies = kind == PROJECT || kind == ADD || kind == GATE || kind == ADD_AGAIN;
    if (fresh && multiplies) set_tiles(rows);
    switch (kind) {
      case NORM: return norm(in, l.attention_norm, claim);
      case PROJECT: return project(l, index, normed_rows(in, l.attention_norm, fresh), claim);
      case ATTEND: return attention(l, index, claim);
      case CHOOSE: return choose_keys(l, claim.begin, claim.end);
      case ATTEND_FEW: return few_attention(index, claim.begin, claim.end);
      case ADD: return add(l.out, index, OUT, attended, attended_width, in, middle, rows, claim, after(ADD, index, claim));
      case NORM_AGAIN: return norm(middle, l.mlp_norm, claim);
      case GATE: return mlp(l.up, index, normed_rows(middle, l.mlp_norm, fresh), mlp_rows(index), claim);
      case ADD_AGAIN:
        add(l.down, index, DOWN, inner, ff, middle, output(index), mlp_rows(index), claim, after(ADD_AGAIN, index, claim));
        return replace_mlp(index, l, middle, output(index), claim.begin, claim.end, fresh);
    }
  }

  // The weights that a thread begins with when it comes to the products after those of a stage.
  Next after(Kind kind, int index, const Claim& c) const {
    if (part == KEYS) return {};
    auto share = [&](const Linear& l, int64_t units, int64_t step, int64_t blocks, int64_t pair) {  // a unit is so many blocks
      return next_part(l, part_of(units, step, c.thread, c.width) * blocks, part_of(units, step, c.thread + 1, c.width) * blocks, pair);
    };
    const int64_t outs = up(m.d_model, LANES) / LANES, inners = m.d_ff / LANES;
    const Layer& l = m.layers[index];
    if (kind == PROJECT) return share(l.out, outs, BLOCKS, 1, 0);
    if (kind == ADD && mlp_rows(index) > 0) return share(l.up, inners, BLOCKS / 2, 1, inners);
    if (kind == GATE) return share(l.down, outs, BLOCKS, 1, 0);
    if (index + 1 < stop) return share(m.layers[index + 1].qkv, num_heads(), 1, m.head_dim / LANES, 0);
    return {};
  }

  // RMS norm of rows begin .. end - 1, for all threads.
  void norm(const A* x, const float* weight, const Claim& claim) {
    for (int64_t r = claim.begin; r < claim.end; r++) rms(x + r * m.d_model, weight, m.d_model, m.eps, normed + r * d, d);
  }

  // Where this thread finds all rows normed.
  const A* normed_rows(const A* x, const float* weight, bool fresh) {
    if (!alone) return normed;
    std::vector<char>& own = t_scratch.normed;
    grow(own, (int64_t)(padded_rows * d * sizeof(A)) + 64);
    A* y = (A*)up((int64_t)own.data(), 64);
    for (int64_t r = 0; r < rows && fresh; r++) rms(x + r * m.d_model, weight, m.d_model, m.eps, y + r * d, d);
    return y;
  }

  bool replaces_mlp(int index, const LowRank* adapter) const { return adapter[index * PAIRS + MLP].down.weight; }

  // The first rows, up to where all others have an adapter in place of the MLP.
  int64_t mlp_rows(int index) const {
    int64_t end = rows;
    for (int64_t i = p.num_adapters; i-- && p.adapters[i].stop == end && replaces_mlp(index, p.adapters[i].adapter);) end = p.adapters[i].start;
    return end;
  }

  // Of all outputs of one Linear, what the adapters need: down(x). Every thread computes it for itself, in `low`: that
  // is a block or two of outputs more, which costs less than a stage.
  void lower(int index, Which which, const A* x, int64_t stride) {
    if (pieces.all.empty()) return;
    grow(scratch_of(which), padded_rows * low_width);
    for (int64_t r0 = 0; r0 < rows; r0 += ROWS)
      for (int64_t i = pieces.first[r0 / ROWS]; i < pieces.first[r0 / ROWS + 1]; i++) {
        const Piece& piece = pieces.all[i];
        const Linear& l = piece.adapter[index * PAIRS + which].down;
        if (!l.weight || (piece.same && in_tiles)) continue;
        if (in_tiles) lower_rows(l, which, Input<A>{x + r0 * stride, stride}, r0, piece.begin, std::min(r0 + ROWS, rows));
        else lower_rows(l, which, Input<A>{x + piece.begin * stride, stride}, piece.begin, piece.begin, piece.end);
      }
  }

  // Rows r0 .. end - 1 of down(x), of which those from `begin` on are kept, with zeros up to a multiple of K_STEP.
  void lower_rows(const Linear& l, Which which, Input<A> in, int64_t r0, int64_t begin, int64_t end) {
    alignas(64) float c[ROWS * BLOCKS * LANES];
    const int64_t total = up(l.n, LANES) / LANES, width = up(l.n, K_STEP);
    for (int64_t b = 0; b < total; b += BLOCKS) {
      const int blocks = (int)std::min<int64_t>(BLOCKS, total - b);
      const int64_t block[BLOCKS] = {b, b + 1, b + 2, b + 3};
      product(l, block, blocks, in, (int)(end - r0), c);
      for (int64_t r = begin; r < end; r++) {
        const float* sum = c + (r - r0) * BLOCKS * LANES;
        for (int64_t i = 0; i < blocks * LANES; i++) put(low(which, r) + b * LANES + i, sum[i]);
      }
    }
    for (int64_t r = begin; r < end; r++)
      for (int64_t i = total * LANES; i < width; i++) put(low(which, r) + i, 0.0f);
  }

  // A stage may need two of them: that in place of the MLP lies apart.
  std::vector<float>& scratch_of(Which which) { return which == MLP ? t_scratch.own : t_scratch.low; }
  A* low(Which which, int64_t row) { return (A*)scratch_of(which).data() + row * low_width; }

  // c += up(down(x)) for the rows r0 .. r0 + n - 1 that have adapters; c as `product` left it.
  void adapt(int index, Which which, const int64_t block[], int blocks, int64_t r0, int n, float* c) {
    if (pieces.all.empty()) return;
    alignas(64) float delta[ROWS * BLOCKS * LANES];
    for (int64_t i = pieces.first[r0 / ROWS]; i < pieces.first[r0 / ROWS + 1]; i++) {
      const Piece& piece = pieces.all[i];
      const Linear& l = piece.adapter[index * PAIRS + which].up;
      if (!l.weight) continue;
      const int64_t first = piece.begin - r0, size = BLOCKS * LANES;
      if (!in_tiles) product(l, block, blocks, Input<A>{low(which, piece.begin), low_width}, (int)(piece.end - piece.begin), delta + first * size);
      else if (!piece.same) product(l, block, blocks, Input<A>{low(which, r0), low_width}, n, delta);
      for (int64_t r = first; r < piece.end - r0; r++)
        for (int64_t j = 0; j < blocks * LANES; j++) c[r * size + j] += delta[r * size + j];
    }
  }

  // Queries, keys and values, a head at a time: product, head norm, rotation, and K and V to their slots.
  void project(const Layer& l, int index, const A* x, const Claim& claim) {
    const int64_t hd = m.head_dim, per_head = hd / LANES, limit = (first_head() + claim.limit) * per_head;
    std::vector<float>& buffer = t_scratch.out;
    grow(buffer, ROWS * hd);
    alignas(64) float c[ROWS * BLOCKS * LANES];
    if (claim.fresh) lower(index, QKV, x, d);
    const Input<A> in = input_of(l.qkv, x, d, rows, claim.fresh);
    const Next then = after(PROJECT, index, claim);
    for (int64_t h = first_head() + claim.begin; h < first_head() + claim.end; h++)
      for (int64_t r0 = 0; r0 < rows; r0 += ROWS) {
        const int n = (int)std::min<int64_t>(ROWS, rows - r0);
        for (int64_t b = 0; b < per_head; b += BLOCKS) {
          const int blocks = (int)std::min<int64_t>(BLOCKS, per_head - b);
          const int64_t first = h * per_head + b, block[BLOCKS] = {first, first + 1, first + 2, first + 3};
          const Next next = first + blocks < limit ? next_part(l.qkv, first + blocks, limit) : then;
          product(l.qkv, block, blocks, in.from(r0), n, c, r0 == 0 ? next : Next{});
          adapt(index, QKV, block, blocks, r0, n, c);
          for (int r = 0; r < n; r++)
            for (int i = 0; i < blocks * LANES; i++)
              buffer[r * hd + b * LANES + i] = finished(l.qkv, first * LANES + i, c[r * BLOCKS * LANES + i]);
        }
        for (int r = 0; r < n; r++) place(l, index, h, r0 + r, buffer.data() + r * hd);
      }
  }

  void place(const Layer& l, int index, int64_t h, int64_t row, float* x) {
    const int64_t hd = m.head_dim;
    const bool is_query = h < m.heads, is_value = h >= m.heads + m.kv_heads;
    if (!is_value) {
      const float* weight = is_query ? l.q_norm : l.k_norm;
      if (weight) head_norm(x, weight, m.own_head_dim, m.eps);
      const int64_t half = m.rotated / 2, at = p.positions[row];
      if (half) rotate(x, p.cos + at * half, p.sin + at * half, m.rotated);
    }
    A* y;
    if (is_query) {
      y = query + (row * m.heads + h) * hd;
    } else {
      const int64_t where = slot(row);
      if (where < 0) return;
      void* const* caches = is_value ? p.v_cache : p.k_cache;
      const int64_t head = h - m.heads - (is_value ? m.kv_heads : 0);
      y = (A*)caches[index] + head * p.head_stride + where * hd;
    }
    for (int64_t i = 0; i < hd; i++) put(y + i, x[i]);
  }

  // Rows of a segment that one task has: those that share most of their keys.
  int64_t task_rows(const Layer& l, const Segment& s) const {
    return l.window > 0 && s.num_keys > l.window ? 1 : on_pairs<A>(m) ? TILE_ROWS : VECTORS;
  }
  int64_t segment_tasks(const Layer& l, int64_t s) const {
    if (p.num_limits && limited.segments[s]) return 0;
    const int64_t wide_as = task_rows(l, p.segments[s]);
    return (p.segments[s].stop - p.segments[s].start + wide_as - 1) / wide_as * m.heads;
  }
  int64_t attention_tasks(const Layer& l) const {
    int64_t all = 0;
    for (int64_t s = 0; s < p.num_segments; s++) all += segment_tasks(l, s);
    return all;
  }

  void attention(const Layer& l, int index, const Claim& claim) {
    int64_t task = claim.begin, first = 0;
    for (int64_t s = 0; s < p.num_segments && task < claim.end; s++) {
      const Segment& seg = p.segments[s];
      const int64_t wide_as = task_rows(l, seg), last = first + segment_tasks(l, s);
      for (; task < std::min(last, claim.end); task++) {
        const int64_t h = (task - first) % m.heads, r0 = (task - first) / m.heads * wide_as;
        if (task + 1 < claim.limit) fetch_first(task + 1 < last || s + 1 == p.num_segments ? seg : p.segments[s + 1],
                                                task + 1 < last ? (task + 1 - first) % m.heads : 0, index);
        attend_rows(seg, l.window, index, h, r0, (int)std::min<int64_t>(wide_as, seg.stop - seg.start - r0), p.num_limits > 0);
      }
      first = last;
    }
  }

  // Asks for what a head's attention reads first.
  void fetch_first(const Segment& s, int64_t h, int index) const {
    const A* keys = (const A*)p.k_cache[index] + h / (m.heads / m.kv_heads) * p.head_stride;
    fetch(s, 0, std::min(AHEAD, s.prefix), keys, m.head_dim);
  }

  // Which keys the streams of some main rows see, by these rows' weights: the mean over heads (appendix H.1).
  void choose_keys(const Layer& l, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      float* sum = kept_of(i, 0).to;
      for (int64_t h = 1; h < m.heads; h++) {
        const float* more = kept_of(i, h).to;
        for (int64_t j = 0; j < limited.all[i].limit->keys; j++) sum[j] += more[j];
      }
      limited.all[i].choose(sum, l.window, p.positions);
    }
  }

  void few_attention(int index, int64_t begin, int64_t end) {
    const int64_t wide_as = on_pairs<A>(m) ? TILE_ROWS : VECTORS;
    for (int64_t task = begin; task < end; task++) {
      const Few& few = limited.all[task / m.heads];
      for (int64_t r0 = 0; r0 < few.rows(); r0 += wide_as)
        attend_rows(few.segment, 0, index, task % m.heads, r0, (int)std::min(wide_as, few.rows() - r0), false);
    }
  }

  Kept kept_of(int64_t limit, int64_t h) const {
    return {limited.weights.data() + (limit * m.heads + h) * limited.room, limited.all[limit].limit->keys};
  }

  // Rows r0 .. r0 + count - 1 of a segment under query head h; `keep`: the weights of main rows whose streams see few keys.
  void attend_rows(const Segment& s, int64_t window, int index, int64_t h, int64_t r0, int count, bool keep) {
    const int64_t hd = m.head_dim, groups = m.heads / m.kv_heads, row = s.start + r0, cache = h / groups * p.head_stride;
    Kept kept[TILE_ROWS];
    for (int i = 0; keep && i < count; i++)
      if (limited.of_row[row + i] >= 0) kept[i] = kept_of(limited.of_row[row + i], h);
    attend_one(s, window, r0, count, query + (row * m.heads + h) * hd, (const A*)p.k_cache[index] + cache, (const A*)p.v_cache[index] + cache,
               attended + row * attended_width + h * hd, keep ? kept : nullptr);
  }

  void attend_one(const Segment& s, int64_t window, int64_t r0, int count, const A* q, const A* k, const A* v, A* out, const Kept* kept) {
    if constexpr (std::is_same_v<A, bf16>) {
#if PL_AMX
      if (on_tiles<A>(m))
        return attend_tiles(m, s, window, p.positions, r0, count, q, m.heads * m.head_dim, k, v, out, attended_width, kept);
#endif
#if PL_DOT_BF16
      if (on_pairs<A>(m)) return attend_pairs(m, s, window, p.positions, r0, count, q, m.heads * m.head_dim, k, v, out, attended_width, kept);
#endif
    }
    attend<A>(m, s, window, p.positions, r0, count, q, m.heads * m.head_dim, k, v, out, attended_width, kept);
  }

  // out = residual + up(down(x)) for the rows that have an adapter in place of the MLP (Speculative Streaming, appendix H.2).
  void replace_mlp(int index, const Layer& layer, const A* residual, A* out, int64_t begin, int64_t end, bool fresh) {
    const int64_t outs = m.d_model;
    bool any = false;
    for (int64_t i = 0; i < p.num_adapters; i++) any = any || replaces_mlp(index, p.adapters[i].adapter);
    if (!any) return;
    const A* x = normed_rows(residual, layer.mlp_norm, fresh);
    if (fresh) lower(index, MLP, x, d);
    alignas(64) float c[ROWS * BLOCKS * LANES];
    for (int64_t b = begin; b < end; b += BLOCKS) {
      const int blocks = (int)std::min<int64_t>(BLOCKS, end - b);
      const int64_t first = b * LANES, outputs = std::min<int64_t>(blocks * LANES, outs - first), block[BLOCKS] = {b, b + 1, b + 2, b + 3};
      for (const Piece& piece : pieces.all) {
        if (!replaces_mlp(index, piece.adapter)) continue;
        const int64_t chunk = piece.begin / ROWS * ROWS;  // a tile takes rows of a whole one
        const int64_t r0 = in_tiles ? chunk : piece.begin, stop = in_tiles ? std::min(chunk + ROWS, rows) : piece.end;
        product(piece.adapter[index * PAIRS + MLP].up, block, blocks, Input<A>{low(MLP, r0), low_width}, (int)(stop - r0), c);
        for (int64_t r = piece.begin; r < piece.end; r++)
          for (int64_t i = 0; i < outputs; i++)
            put(out + r * outs + first + i, wide(residual[r * outs + first + i]) + c[(r - r0) * BLOCKS * LANES + i]);
      }
    }
  }

  // out = residual + x W^T for the first `count` rows, rounded once.
  void add(const Linear& l, int index, Which which, const A* x, int64_t stride, const A* residual, A* out, int64_t count, const Claim& claim,
           const Next& then) {
    const int64_t outs = m.d_model;
    if (count == 0) return;
    if (claim.fresh) lower(index, which, x, stride);
    sweep(l, claim, input_of(l, x, stride, count, claim.fresh), count, then, [&](int64_t r0, int n, int64_t first, int64_t outputs, float* c) {
      const int64_t b = first / LANES, block[BLOCKS] = {b, b + 1, b + 2, b + 3};
      adapt(index, which, block, (int)(up(outputs, LANES) / LANES), r0, n, c);
      for (int r = 0; r < n; r++)
        for (int64_t i = 0; i < outputs; i++) {
          const int64_t at = (r0 + r) * outs + first + i;
          put(out + at, wide(residual[at]) + finished(l, first + i, c[r * BLOCKS * LANES + i]));
        }
    });
  }

  // silu(gate) * up of the first `count` rows, two blocks of each at a time.
  void mlp(const Linear& l, int index, const A* x, int64_t count, const Claim& claim) {
    const int64_t total = m.d_ff / LANES, half = BLOCKS / 2;
    if (count == 0) return;
    if (claim.fresh) lower(index, UP, x, d);
    const Input<A> in = input_of(l, x, d, count, claim.fresh);
    const Next then = after(GATE, index, claim);
    alignas(64) float c[ROWS * BLOCKS * LANES];
    if (claim.begin == 0 && ff != m.d_ff)
      for (int64_t r = 0; r < count; r++)
        for (int64_t i = m.d_ff; i < ff; i++) put(inner + r * ff + i, 0.0f);
    for (int64_t b = claim.begin; b < claim.end; b += half) {
      const int n = (int)std::min<int64_t>(half, claim.end - b);
      const Next next = b + n < claim.limit ? next_part(l, b + n, claim.limit, total) : then;
      int64_t block[BLOCKS] = {};
      for (int i = 0; i < n; i++) block[i] = b + i, block[n + i] = total + b + i;
      for (int64_t r0 = 0; r0 < count; r0 += ROWS) {
        const int chunk = (int)std::min<int64_t>(ROWS, count - r0);
        product(l, block, 2 * n, in.from(r0), chunk, c, r0 == 0 ? next : Next{});
        adapt(index, UP, block, 2 * n, r0, chunk, c);
        for (int r = 0; r < chunk; r++) silu(l, b, n, c + r * BLOCKS * LANES, inner + (r0 + r) * ff + b * LANES);
      }
    }
  }

  void silu(const Linear& l, int64_t b, int n, float* c, A* y) {
    for (int i = 0; i < 2 * n * LANES; i++) {
      const int64_t at = i < n * LANES ? b * LANES + i : m.d_ff + b * LANES + i - n * LANES;
      c[i] = finished(l, at, c[i]);
    }
    for (int i = 0; i < n; i++) {
      const v16 gate = load(c + i * LANES), value = load(c + (n + i) * LANES);
      alignas(64) float z[16];
      save(z, gate / (splat(1.0f) + exp16(splat(0.0f) - gate)) * value);
      for (int j = 0; j < LANES; j++) put(y + i * LANES + j, z[j]);
    }
  }
};

template <class A> void run(const Model& m, const Pass& p, int start, int stop, Part part, int64_t apart) {
  Runner<A> runner(m, p, start, stop, part, apart);
  // The last row of attended beyond heads * head_dim, if any, must read as zero.
  if (runner.attended_width != m.heads * m.head_dim)
    std::memset((void*)runner.attended, 0, runner.padded_rows * runner.attended_width * sizeof(A));
  team().run(runner.width, runner);
}

// Layers start .. stop - 1 in the model's type of activations.
void run_layers(const Model& m, const Pass& p, int start, int stop, Part part = WHOLE, int64_t apart = 0) {
  if (m.wide_activations) run<float>(m, p, start, stop, part, apart);
  else run<bf16>(m, p, start, stop, part, apart);
}

// One product for all rows.
template <class A> struct Product final : Job {
  const Linear& l;
  const A* x;
  const int64_t stride, rows;
  float* y;
  Product(const Linear& linear, const A* in, int64_t step, int64_t count, float* out) : l(linear), x(in), stride(step), rows(count), y(out) {}
  int64_t stages() const override { return 1; }
  int64_t units(int64_t) const override { return up(l.n, LANES) / LANES; }
  int64_t step(int64_t) const override { return BLOCKS; }
  void work(int64_t, const Claim& claim) override {
    if (claim.fresh) set_tiles(rows);
    sweep(l, claim, input_of(l, x, stride, rows, claim.fresh), rows, {}, [&](int64_t r0, int n, int64_t first, int64_t outputs, const float* c) {
      for (int r = 0; r < n; r++)
        for (int64_t i = 0; i < outputs; i++) y[(r0 + r) * l.n + first + i] = finished(l, first + i, c[r * BLOCKS * LANES + i]);
    });
  }
};

template <class A> void linear(const Linear& l, const A* x, int64_t stride, int64_t rows, float* y, int threads) {
  if (rows == 0) return;  // nor is there a tile of no rows
  Product<A> product(l, x, stride, rows, y);
  team().run(std::clamp<int64_t>(l.n * l.k * std::max<int64_t>(1, rows / 4) / WORTH, 1, threads), product);
}

// Rows of x, normed where a weight is given, in a buffer whose rows are padded as `product` wants them.
template <class A>
const A* prepared(const A* x, int64_t rows, int64_t k, const float* weight, float eps) {
  Buffers& b = t_buffers;
  const int64_t stride = up(k, K_STEP);
  b.open(Buffers::room<A>(up(rows, ROWS) * stride));
  A* y = b.take<A>(up(rows, ROWS) * stride);
  for (int64_t r = 0; r < rows; r++) rms(x + r * k, weight, k, eps, y + r * stride, stride);
  return y;
}

void head(const Model& m, const void* hidden, int64_t rows, float* logits, int threads) {
  const int64_t k = m.d_model, stride = up(k, K_STEP);
  if (m.wide_activations) linear(m.head, prepared((const float*)hidden, rows, k, m.norm, m.eps), stride, rows, logits, threads);
  else linear(m.head, prepared((const bf16*)hidden, rows, k, m.norm, m.eps), stride, rows, logits, threads);
}

thread_local std::vector<float> t_logits;

// The largest of n logits, the first one where several are equal, and its log-softmax.
void best(const float* logits, int64_t n, int64_t* token, float* log_q) {
  v16 most = splat(-INFINITY);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) most = greater(load(logits + i), most);
  float top = max16(most);
  for (; i < n; i++) top = std::max(top, logits[i]);
  int64_t at = 0;
  while (at < n - 1 && logits[at] != top) at++;
  v16 sums = {};
  for (i = 0; i + 16 <= n; i += 16) sums = sums + exp16(load(logits + i) - splat(top));
  float total = sum16(sums);
  for (; i < n; i++) total += std::exp(logits[i] - top);
  *token = at;
  *log_q = -std::log(total);
}

// The first of the largest of n logits; the first that is no number, where one is none.
int64_t likeliest(const float* logits, int64_t n) {
  v16 most = splat(-INFINITY), odd = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const v16 x = load(logits + i);
    most = greater(x, most), odd = odd + (x - x);  // not 0 where x is infinite or no number
  }
  if (sum16(odd) == 0.0f) {
    float top = max16(most);
    bool sound = true;
    for (int64_t j = i; j < n; j++) sound = sound && std::isfinite(logits[j]), top = std::max(top, logits[j]);
    if (sound)
      for (i = 0;; i++)
        if (logits[i] == top) return i;
  }
  int64_t at = 0;
  for (i = 0; i < n; i++) {
    if (std::isnan(logits[i])) return i;
    if (logits[i] > logits[at]) at = i;
  }
  return at;
}

// The k largest of numbers that are offered one after the other, best first, of equals the first.
struct Ranks {
  const int64_t k;
  int64_t* places;  // [k]
  float* values;    // [k]
  int64_t found = 0;
  float least = -INFINITY;  // of those found, once there are k

  bool open() const { return found < k; }
  void offer(int64_t place, float x) {
    if (!open() && !(x > least)) return;
    int64_t at = open() ? found++ : k - 1;
    for (; at > 0 && values[at - 1] < x; at--) values[at] = values[at - 1], places[at] = places[at - 1];
    values[at] = x, places[at] = place;
    if (!open()) least = values[k - 1];
  }
};

// Makes of the largest of n logits their log-softmax.
void log_softmax(const float* logits, int64_t n, const Ranks& best) {
  const float most = best.values[0];
  v16 sums = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) sums = sums + exp16(load(logits + i) - splat(most));
  float total = sum16(sums);
  for (; i < n; i++) total += std::exp(logits[i] - most);
  const float floor = most + std::log(total);
  for (int64_t j = 0; j < best.k; j++) best.values[j] -= floor;
}

// The k largest of n logits, best first (of equals the first), and their log-softmax. k is at most n.
void top(const float* logits, int64_t n, int64_t k, int64_t* tokens, float* log_q) {
  Ranks best{k, tokens, log_q};
  int64_t i = 0;
  for (; i < k; i++) best.offer(i, logits[i]);
  for (; i + 16 <= n; i += 16)
    if (max16(load(logits + i)) > best.least)
      for (int64_t j = i; j < i + 16; j++) best.offer(j, logits[j]);
  for (; i < n; i++) best.offer(i, logits[i]);
  log_softmax(logits, n, best);
}

// ---------------------------------------------------------------------------------------------- drawing a token
//
// What core/sampling.py chooses. Its logarithms and exponentials come from torch and may differ from ours in the last bits, so a
// choice is made here only where that cannot matter: CLOSE is a hundred times what they differ by. Elsewhere the caller makes it.

constexpr int64_t UNDECIDED = -1;
constexpr int64_t DRAWS = 1 << 15;  // logits that a further thread is worth
constexpr float CLOSE = 1e-4f, CLOSE_OF = 4e-6f;  // of two scores: absolute, and of their size
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15u, MIX[2] = {0xBF58476D1CE4E5B9u, 0x94D049BB133111EBu};

// ln of positive normal numbers, to about two units in the last place (Cephes).
inline v16 log16(v16 x) {
  v16 f, e;
  for (int i = 0; i < PIECES; i++) {
    const ints bits = (ints)x.p[i], power = (bits - 0x3f3504f3) >> 23;  // the fraction is between the roots of 1/2 and 2
    f.p[i] = (floats)(bits - (power << 23)), e.p[i] = __builtin_convertvector(power, floats);
  }
  f = f - splat(1.0f);
  const v16 z = f * f;
  v16 y = splat(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                  -2.4999993993e-1f, 3.3333331174e-1f})
    y = fma16(y, f, splat(c));
  y = y * f * z;
  y = fma16(e, splat(-2.12194440e-4f), y);
  y = fma16(z, splat(-0.5f), y);
  return fma16(e, splat(0.693359375f), f + y);
}

typedef double doubles __attribute__((vector_size(64)));
typedef int64_t longs __attribute__((vector_size(64)));
typedef float eighth __attribute__((vector_size(32)));

// e^x for x <= 0, to about 1e-14; arguments below -80 are clamped.
inline doubles exp_of(doubles x) {
  const doubles shift = doubles{} + 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  x = x > -80.0 ? x : doubles{} - 80.0;
  doubles n = x * 1.4426950408889634 + shift;
  const longs power = (longs)n << 52;  // only the low bits of n count
  n -= shift;
  const doubles r = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
  doubles y = doubles{} + 1.0 / 479001600;
  for (double c : {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    y = y * r + c;
  return y * (doubles)(power + 0x3ff0000000000000);
}
inline double sum_of(doubles v) {
  double total = 0;
  for (int i = 0; i < 8; i++) total += v[i];
  return total;
}

inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * MIX[0];
  x = (x ^ (x >> 27)) * MIX[1];
  return x ^ (x >> 31);
}

// Gumbel noise of tokens first .. first + 15: core/noise.py, `gumbel`.
inline v16 gumbel16(uint64_t key, int64_t first) {
  float u[16];
  for (int j = 0; j < 16; j++) {
    uint64_t bits = key + (uint64_t)(first + j + 1) * GAMMA;
    bits = (bits ^ (bits >> 30)) * MIX[0];
    bits = (bits ^ (bits >> 27)) * MIX[1];
    u[j] = (float)(int64_t)((bits & 0x7fffffffffffffffu) | 1);
  }
  const v16 x = lesser(load(u) * splat(0x1p-63f), splat(1.0f - 0x1p-24f)), one = splat(1.0f);
  const v16 rest = one - x, lost = one - rest;  // ln(1 - x) of the rounded 1 - x, corrected for what rounding did to x
  const v16 far = (v16() - log16(rest)) * (x / lost);
  v16 e;
  for (int i = 0; i < PIECES; i++) e.p[i] = lost.p[i] == 0.0f ? x.p[i] : far.p[i];
  return v16() - log16(e);
}

inline float largest(const float* y, int64_t padded) {
  v16 most = splat(-INFINITY);
  for (int64_t i = 0; i < padded; i += 16) most = greater(load(y + i), most);
  return max16(most);
}

inline void mask_below(float* y, int64_t padded, float least) {
  const v16 floor = splat(least);
  for (int64_t i = 0; i < padded; i += 16) {
    v16 v = load(y + i);
    for (int j = 0; j < PIECES; j++) v.p[j] = v.p[j] < floor.p[j] ? floats{} - INFINITY : v.p[j];
    save(y + i, v);
  }
}

// The k-th largest of n numbers, which are padded to a multiple of 16.
float kth_largest(const float* y, int64_t n, int64_t padded, int64_t k) {
  static thread_local std::vector<float> best;
  if (k > 128) {
    best.assign(y, y + n);
    std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<float>());
    return best[k - 1];
  }
  best.assign(k, -INFINITY);  // descending
  for (int64_t i = 0; i < padded; i += 16) {
    if (!(max16(load(y + i)) > best[k - 1])) continue;
    for (int64_t j = i; j < i + 16; j++) {
      if (!(y[j] > best[k - 1])) continue;
      int64_t at = k - 1;
      for (; at > 0 && best[at - 1] < y[j]; at--) best[at] = best[at - 1];
      best[at] = y[j];
    }
  }
  return best[k - 1];
}

// Masks what is outside of the smallest set of likeliest tokens whose probability reaches p, of equals the first; false: a
// rounding decides which they are.
bool keep_nucleus(float* y, int64_t n, int64_t padded, double p) {
  constexpr int LEVELS = 88;  // eighths below the largest logit; further down the oracle's weights are coarse
  static thread_local std::vector<doubles> depths, weights;
  static thread_local std::vector<int32_t> there;
  const int64_t eights = padded / 8;
  grow(depths, eights), grow(weights, eights), there.clear();
  const float most = largest(y, padded);
  const eighth top = eighth{} + most;
  doubles all = {};
  for (int64_t i = 0; i < eights; i++) {
    eighth x;
    std::memcpy(&x, y + 8 * i, sizeof x);
    depths[i] = __builtin_convertvector(top - x, doubles), weights[i] = exp_of(-depths[i]), all += weights[i];
  }
  const double limit = sum_of(all) * p, slack = 1e-12 * n;  // weights are rounded to 2^-40 there
  auto mass = [&](int level) {  // of the tokens above this level
    doubles sums = {};
    for (int64_t i = 0; i < eights; i++) sums += depths[i] < level / 8.0 ? weights[i] : doubles{};
    return sum_of(sums);
  };
  int low = 0, high = LEVELS;  // the last token that is needed is between them
  if (mass(high) < limit) return false;
  while (high - low > 1) (mass((low + high) / 2) < limit ? low : high) = (low + high) / 2;
  const float from = low / 8.0f, to = high / 8.0f;
  for (int64_t i = 0; i < padded; i += 16)
    if (most - max16(load(y + i)) < to)
      for (int64_t j = i; j < i + 16; j++)
        if (const float below = most - y[j]; below >= from && below < to) there.push_back((int32_t)j);
  std::sort(there.begin(), there.end(), [&](int32_t a, int32_t b) { return most - y[a] != most - y[b] ? y[a] > y[b] : a < b; });
  double before = mass(low);
  for (size_t at = 0; at < there.size(); at++) {
    if (limit - before <= slack) return false;
    before += weights[there[at] / 8][there[at] % 8];
    if (before < limit) continue;
    if (before - limit <= slack) return false;
    const float least = most - y[there[at]];
    for (size_t next = at + 1; next < there.size() && most - y[there[next]] == least; next++) y[there[next]] = -INFINITY;
    for (int64_t i = 0; i < padded; i++) y[i] = most - y[i] > least ? -INFINITY : y[i];
    return true;
  }
  return false;
}

// What these rules, which draw, make of a row of n logits, with the noise of a position where it is wanted; valid until the
// next call. Null where what is kept hangs on a rounding, and for what is no number.
float* scored(const float* logits, int64_t n, const Rules& r, int64_t position, bool noisy = true) {
  static thread_local std::vector<float> room;
  const int64_t padded = up(n, 16);
  grow(room, padded);
  float* y = room.data();
  std::copy(logits, logits + n, y);
  const v16 divisor = splat((float)r.temperature);
  v16 odd = {};
  std::fill(y + n, y + padded, 0.0f);
  for (int64_t i = 0; i < padded; i += 16) {
    const v16 v = load(y + i) / divisor;
    odd = odd + (v - v);  // not 0 where something is infinite or no number
    save(y + i, v);
  }
  if (!(sum16(odd) == 0.0f)) return nullptr;
  std::fill(y + n, y + padded, -INFINITY);
  if (0 < r.top_k && r.top_k < n) mask_below(y, padded, kth_largest(y, n, padded, r.top_k));
  if (r.top_p < 1 && !keep_nucleus(y, n, padded, r.top_p)) return nullptr;
  if (r.min_p <= 0) mask_below(y, padded, largest(y, padded) + (float)r.min_p);
  if (!noisy) return y;
  const uint64_t key = mixed(mixed((r.key ^ (uint64_t)position) + GAMMA) + GAMMA);
  for (int64_t i = 0; i < padded; i += 16) save(y + i, load(y + i) + gumbel16(key, i));
  return y;
}

// The token that these rules draw from a row of n logits; UNDECIDED where that hangs on a rounding or on what is no number.
int64_t drawn(const float* logits, int64_t n, const Rules& r, int64_t position) {
  if (r.temperature < 0) return UNDECIDED;
  if (r.temperature == 0) return likeliest(logits, n);
  const float* y = scored(logits, n, r, position, true);
  if (!y) return UNDECIDED;
  v16 most = splat(-INFINITY), next = most;
  for (int64_t i = 0, padded = up(n, 16); i < padded; i += 16) {
    const v16 v = load(y + i);
    next = greater(next, lesser(most, v)), most = greater(most, v);
  }
  const float best = max16(most);
  float lanes[16], second = max16(next);
  save(lanes, most);
  bool first = true;
  for (float x : lanes)
    if (first && x == best) first = false;
    else second = std::max(second, x);
  if (!(best - second > CLOSE + CLOSE_OF * std::fabs(best))) return UNDECIDED;
  int64_t at = 0;
  while (y[at] != best) at++;
  return at;
}

// A draft's token and its chance of being the one that is drawn: its log-softmax among the scores, or among the logits where
// no rules are given or can be applied.
void guess(const float* logits, int64_t n, const Rules* rules, int64_t position, int64_t* token, float* log_q) {
  const float* y = rules && rules->temperature > 0 ? scored(logits, n, *rules, position, true) : nullptr;
  best(y ? y : logits, n, token, log_q);
}

// The same for several rows, a row a unit.
struct Guess final : Job {
  struct Row { const Rules* rules; int64_t position; int64_t* token; float* log_q; };
  const float* logits;
  int64_t n, limit;  // of a row; that may be chosen
  std::vector<Row> rows;
  int64_t stages() const override { return 1; }
  int64_t units(int64_t) const override { return rows.size(); }
  int64_t step(int64_t) const override { return 1; }
  void work(int64_t, const Claim& claim) override {
    for (int64_t i = claim.begin; i < claim.end; i++) guess(logits + i * n, limit, rows[i].rules, rows[i].position, rows[i].token, rows[i].log_q);
  }
  void run(int64_t threads) { team().run(std::clamp<int64_t>(rows.size() * n / DRAWS, 1, threads), *this); }
};

// Logits of several rows and the k best tokens of each with their log-softmax, in one job: a thread that has made a group of a
// row's logits notes the largest of them, so that few groups are looked through for the best.
struct Ranked { const float* more; const Rules* rules; int64_t position; };  // more [n]: added to the product; null: nothing

template <class A> struct Ranking final : Job {
  static constexpr int64_t GROUP = BLOCKS * LANES;

  const Linear& l;
  const A* x;
  const int64_t stride, limit, k;  // limit: tokens at and above it are not chosen
  const bool noisy;
  const std::vector<Ranked>& rows;
  int64_t* const tokens;  // [rows, k]
  float* const log_q;     // [rows, k]
  const int64_t groups;   // of a row
  float *logits, *most;   // [rows, n], [rows, groups]

  Ranking(const Linear& head, const A* in, int64_t step, int64_t end, int64_t best, bool noise, const std::vector<Ranked>& of, int64_t* to, float* chances)
      : l(head), x(in), stride(step), limit(end), k(best), noisy(noise), rows(of), tokens(to), log_q(chances), groups((l.n + GROUP - 1) / GROUP) {
    static thread_local std::vector<float> largest;
    grow(t_logits, (int64_t)rows.size() * l.n), grow(largest, (int64_t)rows.size() * groups);
    logits = t_logits.data(), most = largest.data();
  }
  void run(int64_t threads) {
    if (!rows.empty()) team().run(std::clamp<int64_t>(l.n * l.k * std::max<int64_t>(1, rows.size() / 4) / WORTH, 1, threads), *this);
  }

  int64_t stages() const override { return 2; }
  int64_t units(int64_t stage) const override { return stage ? rows.size() : up(l.n, LANES) / LANES; }
  int64_t step(int64_t stage) const override { return stage ? 1 : BLOCKS; }
  void work(int64_t stage, const Claim& claim) override {
    if (stage) {
      for (int64_t r = claim.begin; r < claim.end; r++) rank(r);
      return;
    }
    const int64_t count = rows.size();
    if (claim.fresh) set_tiles(count);
    sweep(l, claim, input_of(l, x, stride, count, claim.fresh), count, {}, [&](int64_t r0, int n, int64_t first, int64_t outputs, const float* c) {
      for (int r = 0; r < n; r++) {
        float* y = logits + (r0 + r) * l.n + first;
        const float* more = rows[r0 + r].more;
        for (int64_t i = 0; i < outputs; i++) y[i] = finished(l, first + i, c[r * GROUP + i]) + (more ? more[first + i] : 0.0f);
        most[(r0 + r) * groups + first / GROUP] = largest_of(y, std::min(limit - first, outputs));
      }
    });
  }

  // Of a group's first logits; nothing is larger than that of none.
  static float largest_of(const float* y, int64_t n) {
    v16 top = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) top = greater(load(y + i), top);
    float found = max16(top);
    for (; i < n; i++) found = std::max(found, y[i]);
    return found;
  }

  void rank(int64_t r) {
    const Ranked& row = rows[r];
    const float *y = logits + r * l.n, *of_group = most + r * groups;
    if (row.rules && row.rules->temperature > 0)
      if (const float* drawn = scored(y, limit, *row.rules, row.position, noisy)) return top(drawn, limit, k, tokens + r * k, log_q + r * k);
    Ranks best{k, tokens + r * k, log_q + r * k};
    for (int64_t first = 0; first < limit; first += GROUP)
      if (best.open() || of_group[first / GROUP] > best.least)
        for (int64_t i = first; i < std::min(first + GROUP, limit); i++) best.offer(i, y[i]);
    log_softmax(y, limit, best);
  }
};

// The same of rows [rows, l.k] of activations, which are normed where a weight is given.
void rank(const Model& m, const Linear& l, const float* norm, const void* x, int64_t limit, int64_t k, bool noisy, const std::vector<Ranked>& rows, int64_t* tokens,
          float* log_q, int64_t threads) {
  const int64_t stride = up(l.k, K_STEP), count = rows.size();
  if (m.wide_activations) Ranking<float>(l, prepared((const float*)x, count, l.k, norm, m.eps), stride, limit, k, noisy, rows, tokens, log_q).run(threads);
  else Ranking<bf16>(l, prepared((const bf16*)x, count, l.k, norm, m.eps), stride, limit, k, noisy, rows, tokens, log_q).run(threads);
}

// The k best tokens of rows of logits, a row a unit, by the rules of their sequences. Row i is of sequence i % sequences, and
// its token will have position i / sequences behind that sequence's first.
struct Pick final : Job {
  const float* logits;
  int64_t rows, n, k, sequences;
  const Rules* rules;        // [sequences] or null: by the logits
  const int64_t* positions;  // [sequences]
  bool noisy;
  int64_t* tokens;           // [rows, k]
  float* log_q;              // [rows, k]
  int64_t stages() const override { return 1; }
  int64_t units(int64_t) const override { return rows; }
  int64_t step(int64_t) const override { return 1; }
  void work(int64_t, const Claim& claim) override {
    for (int64_t i = claim.begin; i < claim.end; i++) {
      const int64_t s = i % sequences;
      const float* x = logits + i * n;
      const float* y = rules && rules[s].temperature > 0 ? scored(x, n, rules[s], positions[s] + i / sequences, noisy) : nullptr;
      top(y ? y : x, n, k, tokens + i * k, log_q + i * k);
    }
  }
};

// x + SiLU(z), as `Heads` says, of d numbers; what lies beyond is zeroed.
template <class A> void residual_silu(const A* x, const float* z, int64_t d, A* y, int64_t padded) {
  for (int64_t i = 0; i < d; i += LANES) {
    alignas(64) float in[LANES] = {}, out[LANES];
    const int64_t n = std::min<int64_t>(LANES, d - i);
    std::copy(z + i, z + i + n, in);
    const v16 v = load(in);
    save(out, v / (splat(1.0f) + exp16(splat(0.0f) - v)));
    for (int64_t j = 0; j < n; j++) put(y + i + j, wide(x[i + j]) + out[j]);
  }
  for (int64_t i = d; i < padded; i++) put(y + i, 0.0f);
}

// Logits [heads, rows, vocab] of all heads, from raw states [rows, d_model], in `t_logits`.
template <class A> void run_heads(const Model& m, const Heads& h, const A* states, int64_t rows, int threads) {
  static thread_local std::vector<float> inner;
  const int64_t d = m.d_model, stride = up(d, K_STEP), all = h.count * rows, first = up(rows, ROWS), second = up(all, ROWS) + ROWS;
  grow(inner, rows * h.count * d), grow(t_logits, all * m.vocab);
  Buffers& b = t_buffers;
  b.open(Buffers::room<A>(first * stride) + Buffers::room<A>(second * stride));
  A *normed = b.take<A>(first * stride), *guess = b.take<A>(second * stride);
  for (int64_t r = 0; r < rows; r++) rms(states + r * d, m.norm, d, m.eps, normed + r * stride, stride);
  linear(h.blocks, (const A*)normed, stride, rows, inner.data(), threads);
  for (int64_t j = 0; j < h.count; j++)
    for (int64_t r = 0; r < rows; r++)
      residual_silu(normed + r * stride, inner.data() + (r * h.count + j) * d, d, guess + (j * rows + r) * stride, stride);
  if (!h.own) return linear(m.head, (const A*)guess, stride, all, t_logits.data(), threads);
  for (int64_t j = 0; j < h.count; j++)
    linear(h.own[j], (const A*)(guess + j * rows * stride), stride, rows, t_logits.data() + j * rows * m.vocab, threads);
}

// The best `budget` nodes of a tree, of equals the first ones, in their order (EAGLE-2, section 4.2). No node may have a better
// score than its parent; node 0 is the root, node n is entry n - 1.
void keep_best(int64_t budget, std::vector<int64_t>& tokens, std::vector<int64_t>& parents, std::vector<double>& scores) {
  const int64_t nodes = tokens.size();
  if (nodes <= budget) return;
  std::vector<int64_t> order(nodes), to(nodes + 1);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
  order.resize(budget);
  std::sort(order.begin(), order.end());
  for (int64_t i = 0; i < budget; i++) {
    const int64_t n = order[i];
    tokens[i] = tokens[n], parents[i] = to[parents[n]], scores[i] = scores[n], to[n + 1] = i + 1;
  }
  tokens.resize(budget), parents.resize(budget), scores.resize(budget);
}

// A draft tree while it grows: what `DraftModel` does level by level. Node 0 is the root, node n is entry n - 1.
struct Growing {
  const int64_t* pending;
  int64_t num_pending, position, room, base;
  const int64_t* keys;
  int64_t budget, max_depth;
  const Rules* rules;
  int64_t shift = 0;  // of a token's position in its text, beyond that of its row among the keys
  const char* given = nullptr;  // [pending, d_model] states in front of the pending tokens
  std::vector<char> states;  // [1 + forwarded, d_model] what the root's row and the nodes' gave, where they are fed on
  std::vector<int64_t> tokens, parents, depths, frontier{0};  // frontier: nodes to expand next, ascending
  std::vector<double> scores;                                 // cumulative log q
  int64_t forwarded = 0, passes = 0;                          // the first so many nodes have K and V

  int64_t committed() const { return position + num_pending; }
  int64_t depth(int64_t node) const { return node ? depths[node - 1] : 0; }
  int64_t slot(int64_t place) const { return base >= 0 ? base + place : keys[place]; }

  // The position of the tokens behind a node.
  int64_t place(int64_t node) const { return committed() + shift + depth(node); }

  // The children of every frontier node, of which the k best [frontier, k] are given, at most `most` of each.
  std::vector<int64_t> expand(const int64_t* best, const float* log_q, int64_t k, int64_t most) {
    std::vector<int64_t> fresh;
    passes += !frontier.empty();
    for (int64_t node : frontier) {
      for (int64_t i = 0; i < std::min(k, most); i++) {
        if (!(log_q[i] > -INFINITY)) continue;
        tokens.push_back(best[i]), parents.push_back(node), depths.push_back(depth(node) + 1);
        scores.push_back((node ? scores[node - 1] : 0.0) + (double)log_q[i]);
        fresh.push_back(tokens.size());
      }
      best += k, log_q += k;
    }
    return fresh;
  }

  // Moves the frontier behind the nodes that have K and V, since a node's slot is its place.
  void compact() {
    std::vector<int64_t> order, to(tokens.size() + 1);
    for (int64_t n = 1; n <= forwarded; n++) order.push_back(n);
    order.insert(order.end(), frontier.begin(), frontier.end());
    for (int64_t n = forwarded + 1; n <= (int64_t)tokens.size(); n++)
      if (!std::binary_search(frontier.begin(), frontier.end(), n)) order.push_back(n);
    for (size_t i = 0; i < order.size(); i++) to[order[i]] = i + 1;
    const Growing old = *this;
    for (size_t i = 0; i < order.size(); i++) {
      const int64_t n = order[i] - 1;
      tokens[i] = old.tokens[n], parents[i] = to[old.parents[n]], depths[i] = old.depths[n], scores[i] = old.scores[n];
    }
    for (int64_t& node : frontier) node = to[node];
    forwarded += frontier.size();
  }
};

// How trees grow: `DraftModelConfig`.
struct Shape {
  int64_t topk, beam;      // of a dynamic tree; topk 1: a static one
  int64_t levels;
  const int64_t* factors;  // [levels] children a level of a static tree
  double floor;            // no node below this score is expanded

  int64_t children(int64_t level) const { return topk > 1 ? topk : factors[level]; }

  std::vector<int64_t> next(const Growing& tree, std::vector<int64_t> fresh, int64_t level) const {
    if (level >= std::min(tree.max_depth, levels)) return {};
    auto better = [&](int64_t a, int64_t b) { return tree.scores[a - 1] > tree.scores[b - 1]; };
    if (topk > 1) {
      std::stable_sort(fresh.begin(), fresh.end(), better);
      if ((int64_t)fresh.size() > beam) fresh.resize(beam);
    } else if ((int64_t)(tree.tokens.size() + fresh.size() * factors[level]) > tree.budget) {
      return {};
    }
    fresh.erase(std::remove_if(fresh.begin(), fresh.end(), [&](int64_t n) { return tree.scores[n - 1] < floor; }), fresh.end());
    std::sort(fresh.begin(), fresh.end());
    if (tree.forwarded + (int64_t)fresh.size() > tree.room) return {};
    return fresh;
  }
};

// y [rows, n] of x [rows, k], as `pl_linear` has them.
void times(const Linear& l, const float* x, int64_t rows, float* y, int threads) { linear(l, x, l.k, rows, y, threads); }
void times(const Linear& l, const bf16* x, int64_t rows, float* y, int threads) {
  linear(l, prepared(x, rows, l.k, nullptr, 0), up(l.k, K_STEP), rows, y, threads);
}

// What goes into a state drafter's layer: states [rows, d_model] and the embeddings of `tokens`, or no tokens where that is null.
template <class A>
void fuse(const Model& m, const Fuse& f, const A* states, const int64_t* tokens, const A* embedding, int64_t rows, A* out, int threads) {
  static thread_local std::vector<A> both;
  static thread_local std::vector<float> made;
  const int64_t d = m.d_model;
  grow(made, rows * d);
  if (!tokens) {
    const A* constant = (const A*)f.constant;
    times(f.state, states, rows, made.data(), threads);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < d; i++) {
        A rounded;
        put(&rounded, made[r * d + i]);
        put(out + r * d + i, wide(rounded) + wide(constant[i]));
      }
    return;
  }
  const int64_t k = f.both.k;
  grow(both, rows * k);
  for (int64_t r = 0; r < rows; r++) {
    const A *token = embedding + tokens[r] * d, *state = states + r * d;
    A* x = both.data() + r * k;
    if (f.sum) for (int64_t i = 0; i < d; i++) put(x + i, wide(token[i]) + wide(state[i]));
    else std::copy(token, token + d, x), std::copy(state, state + d, x + d);
  }
  times(f.both, both.data(), rows, made.data(), threads);
  for (int64_t i = 0; i < rows * d; i++) put(out + i, made[i]);
}

void fuse(const Model& m, const Fuse& f, const void* states, const int64_t* tokens, const void* embedding, int64_t rows, void* out, int threads) {
  if (m.wide_activations) fuse(m, f, (const float*)states, tokens, (const float*)embedding, rows, (float*)out, threads);
  else fuse(m, f, (const bf16*)states, tokens, (const bf16*)embedding, rows, (bf16*)out, threads);
}

// One of the target's states, normed.
void take_state(const Model& m, const Fuse& f, const void* raw, void* out) {
  if (m.wide_activations) rms((const float*)raw, f.norm, m.d_model, (float)f.eps, (float*)out, m.d_model);
  else rms((const bf16*)raw, f.norm, m.d_model, (float)f.eps, (bf16*)out, m.d_model);
}

Refusal check_fuse(const Model& m, const Fuse& f) {
  const int64_t d = m.d_model;
  const bool fits = f.both.n == d && f.both.k == (f.sum ? d : 2 * d) && (f.state.n == 0 || (f.state.n == d && f.state.k == d && f.constant));
  return fits ? DONE : BAD_COUNT;
}

// A tree of Algorithm 1: the logits of its levels, and its nodes; node 0 is the root, node n is entry n - 1.
struct Sampled {
  int64_t root, levels, position;  // position: of the root's children
  const float* logits;             // [levels, vocab] raw
  const Rules* rules;
  int64_t room;
  std::vector<int64_t> tokens, parents, queue{0};
  std::vector<double> scores;
};

// The k best of rows of logits, a row a unit, as `Ranking` chooses them.
struct Children final : Job {
  const std::vector<Ranked>& rows;  // more: the logits
  const int64_t limit, k;
  const bool noisy;
  int64_t* const tokens;  // [rows, k]
  float* const log_q;
  Children(int64_t end, int64_t best, bool noise, const std::vector<Ranked>& of, int64_t* to, float* chances)
      : rows(of), limit(end), k(best), noisy(noise), tokens(to), log_q(chances) {}
  int64_t stages() const override { return 1; }
  int64_t units(int64_t) const override { return rows.size(); }
  int64_t step(int64_t) const override { return 1; }
  void work(int64_t, const Claim& claim) override {
    for (int64_t i = claim.begin; i < claim.end; i++) {
      const Ranked& row = rows[i];
      const float* y = row.rules && row.rules->temperature > 0 ? scored(row.more, limit, *row.rules, row.position, noisy) : nullptr;
      top(y ? y : row.more, limit, k, tokens + i * k, log_q + i * k);
    }
  }
};

// Algorithm 1 for several trees at once, a level a turn (Lyanna, section 5.2).
void sample_trees(const Model& m, const TokenInfo* info, int64_t limit, int64_t branches, bool noisy, std::vector<Sampled>& trees, int64_t threads) {
  std::vector<Ranked> nodes;
  std::vector<int64_t> tokens;
  std::vector<float> log_q;
  std::vector<char> factors;
  const int64_t k = std::min(branches, limit), bytes = info ? info->table.k * (m.wide_activations ? 4 : 2) : 0;
  for (int64_t level = 0;; level++) {
    nodes.clear(), factors.clear();
    for (const Sampled& t : trees) {
      if (level >= t.levels) continue;
      for (int64_t node : t.queue) {
        nodes.push_back({t.logits + level * m.vocab, t.rules, t.position + level});
        const char* own = info ? (const char*)info->factors + (node ? t.tokens[node - 1] : t.root) * bytes : nullptr;
        factors.insert(factors.end(), own, own + bytes);
      }
    }
    const int64_t rows = nodes.size();
    if (rows == 0) return;
    tokens.resize(rows * k), log_q.resize(rows * k);
    if (info) rank(m, info->table, nullptr, factors.data(), limit, k, noisy, nodes, tokens.data(), log_q.data(), threads);
    else {
      Children job(limit, k, noisy, nodes, tokens.data(), log_q.data());
      team().run(std::clamp<int64_t>(rows * m.vocab / DRAWS, 1, threads), job);
    }
    int64_t at = 0;
    for (Sampled& t : trees) {
      if (level >= t.levels) continue;
      std::vector<int64_t> fresh;
      for (int64_t node : t.queue)
        for (int64_t end = at + k; at < end; at++) {
          if (!(log_q[at] > -INFINITY)) continue;
          t.tokens.push_back(tokens[at]), t.parents.push_back(node);
          t.scores.push_back((node ? t.scores[node - 1] : 0.0) + (double)log_q[at]);
          fresh.push_back(t.tokens.size());
        }
      std::stable_sort(fresh.begin(), fresh.end(), [&](int64_t a, int64_t b) { return t.scores[a - 1] > t.scores[b - 1]; });
      if ((int64_t)fresh.size() > branches) fresh.resize(branches);
      std::sort(fresh.begin(), fresh.end());
      t.queue = std::move(fresh);
    }
  }
}

// Draws from rows of logits, a row a unit.
struct Draw final : Job {
  const float* logits;
  int64_t rows, n;
  const Rules* rules;         // by sequence
  const int64_t* sequence;    // [rows]
  const int64_t* positions;   // [rows] that the drawn tokens will have
  int64_t* chosen;
  Draw(const float* x, int64_t count, int64_t vocab, const Rules* r, const int64_t* s, const int64_t* p, int64_t* out)
      : logits(x), rows(count), n(vocab), rules(r), sequence(s), positions(p), chosen(out) {}
  int64_t stages() const override { return 1; }
  int64_t units(int64_t) const override { return rows; }
  int64_t step(int64_t) const override { return 1; }
  void work(int64_t, const Claim& claim) override {
    for (int64_t i = claim.begin; i < claim.end; i++) chosen[i] = drawn(logits + i * n, n, rules[sequence[i]], positions[i]);
  }
};

// A pass from token ids on, as the caller asks for it. All numbers come in one list, so that he makes one:
//     rows, segments, wanted, slot_base (-1: slots are listed)
//     for each segment: start, stop, prefix, base (-1: keys are listed), address of the keys, drafted nodes in a tree (-1: a chain)
//     tokens [rows], positions [rows], slots [rows] where they are listed, rows that are wanted (ascending)
//     for each segment with a tree: the parents of its drafted nodes, which are its last rows; the row before them is the root, 0
struct Asked {
  Pass pass;
  int64_t num_wanted = 0;
  const int64_t *of_segment = nullptr, *tokens = nullptr, *wanted = nullptr;
  const int64_t* end = nullptr;  // behind the list
  std::vector<Segment> segments;
  std::vector<const int64_t*> parents;  // of each segment's drafted nodes; null: a chain
  std::vector<uint8_t> masks;
  std::vector<char> states;  // [rows, d_model]
  std::vector<int64_t> sequence, places;  // of each wanted row: its segment, and the position of the token behind it

  // What is asked, checked; nothing is computed yet.
  Refusal read(const Model& m, const Pass& p, const int64_t* list) {
    const int64_t rows = list[0], count = list[1], slot_base = list[3];
    num_wanted = list[2], of_segment = list + 4, tokens = of_segment + 6 * count;
    const int64_t *positions = tokens + rows, *slots = positions + rows;
    wanted = slots + (slot_base < 0 ? rows : 0), end = wanted + num_wanted;
    segments.clear(), parents.clear();
    int64_t bytes_of_masks = 0;
    for (const int64_t* s = of_segment; s < tokens; s += 6) {
      const int64_t start = s[0], stop = s[1], prefix = s[2], drafted = s[5];
      segments.push_back({start, stop, prefix, prefix + stop - start, s[3], (const int64_t*)s[4], nullptr, nullptr});
      parents.push_back(drafted < 0 ? nullptr : end);
      if (drafted < 0) continue;
      if (start < 0 || stop > rows || drafted >= stop - start) return BAD_SEGMENT;
      for (int64_t n = 0; n < drafted; n++)
        if (end[n] < 0 || end[n] > n) return BAD_SEGMENT;
      end += drafted, bytes_of_masks += (stop - start) * (stop - start);
    }
    pass = p;
    pass.rows = rows, pass.positions = positions, pass.slots = slot_base < 0 ? slots : nullptr, pass.slot_base = slot_base;
    pass.segments = segments.data(), pass.num_segments = count;
    if (rows < 1 || !all_within(wanted, num_wanted, 0, rows)) return BAD_COUNT;
    for (int64_t i = 1; i < num_wanted; i++)
      if (wanted[i] <= wanted[i - 1]) return BAD_COUNT;  // ascending, so that states can move up in place
    if (!all_within(tokens, rows, 0, m.vocab)) return BAD_TOKEN;
    masks.assign(bytes_of_masks, 0);
    return check_pass(m, pass, 0, (int)p.layers);
  }

  static int64_t row_bytes(const Model& m) { return m.d_model * (m.wide_activations ? 4 : 2); }

  // Layers start .. stop - 1 of a pass over `states`; states that are wanted of some are copied when they are there.
  void run(const Model& m, const Pass& p, int start, int stop, Taps* taps) const {
    for (int64_t t = 0; taps && t < taps->layers; t++) {
      const int after = (int)taps->after[t];
      if (after <= start || after > stop) continue;
      run_layers(m, p, start, after);
      start = after;
      tap(m, *taps, t);
    }
    if (start < stop) run_layers(m, p, start, stop);
  }

  void tap(const Model& m, Taps& taps, int64_t t) const {
    if (!taps.rows) return;
    const Clock::time_point began = Clock::now();
    const int64_t bytes = row_bytes(m);
    char* out = (char*)taps.out + t * taps.rows * bytes;
    if (!taps.which) std::memcpy(out, states.data(), taps.rows * bytes);
    for (int64_t r = 0; taps.which && r < taps.rows; r++) std::memcpy(out + r * bytes, states.data() + taps.which[r] * bytes, bytes);
    taps.ms += std::chrono::duration<double, std::milli>(Clock::now() - began).count();
  }

  Refusal check(const Taps& taps) const {
    if (taps.layers < 0 || taps.rows < 0 || !all_within(taps.after, taps.layers, 1, pass.layers + 1)) return BAD_COUNT;
    for (int64_t t = 1; t < taps.layers; t++)
      if (taps.after[t] <= taps.after[t - 1]) return BAD_COUNT;
    if (!taps.which) return taps.rows <= pass.rows ? DONE : BAD_COUNT;
    return all_within(taps.which, taps.rows, 0, pass.rows) ? DONE : BAD_COUNT;
  }

  // What each node sees, and the states that go into the first layer.
  void begin(const Model& m, const void* embedding) {
    uint8_t* mask = masks.data();
    for (size_t i = 0; i < segments.size(); i++) {
      if (!parents[i]) continue;
      Segment& s = segments[i];
      const int64_t width = s.stop - s.start, root = width - 1 - of_segment[6 * i + 5];
      for (int64_t r = 0; r < width; r++) {
        if (r <= root) std::memset(mask + r * width, 1, r);
        else std::memcpy(mask + r * width, mask + (root + parents[i][r - root - 1]) * width, width);
        mask[r * width + r] = 1;
      }
      s.visible = mask, s.block_positions = pass.positions + s.start;
      mask += width * width;
    }
    const int64_t bytes = row_bytes(m);
    grow(states, pass.rows * bytes);
    for (int64_t r = 0; r < pass.rows; r++)
      std::memcpy(states.data() + r * bytes, (const char*)embedding + tokens[r] * bytes, bytes);
    pass.hidden_in = pass.hidden_out = states.data();
  }

  // Logits of the wanted rows and of `more` behind all others, where they are to go or in `t_logits`.
  float* head(const Model& m, int64_t more, float* logits) {
    const int64_t bytes = row_bytes(m);
    for (int64_t i = 0; i < num_wanted; i++)
      if (wanted[i] != i) std::memmove(states.data() + i * bytes, states.data() + wanted[i] * bytes, bytes);
    if (more && num_wanted != pass.rows)
      std::memmove(states.data() + num_wanted * bytes, states.data() + pass.rows * bytes, more * bytes);
    if (!logits) grow(t_logits, (num_wanted + more) * m.vocab), logits = t_logits.data();
    if (num_wanted + more) ::head(m, states.data(), num_wanted + more, logits, (int)pass.threads);
    return logits;
  }

  // The token after each wanted row, by the rules of its segment; the likeliest where there are none.
  void choose(const Model& m, const float* logits, const Rules* rules, int64_t* chosen) {
    if (!rules)
      for (int64_t i = 0; i < num_wanted; i++) chosen[i] = likeliest(logits + i * m.vocab, m.vocab);
    if (!rules || num_wanted == 0) return;
    sequence.clear(), places.clear();
    for (int64_t i = 0, s = 0; i < num_wanted; i++) {
      while (wanted[i] >= segments[s].stop) s++;
      sequence.push_back(s), places.push_back(pass.positions[wanted[i]] + 1);
    }
    Draw draw(logits, num_wanted, m.vocab, rules, sequence.data(), places.data(), chosen);
    team().run(std::clamp<int64_t>(num_wanted * m.vocab / DRAWS, 1, pass.threads), draw);
  }
};
thread_local Asked t_asked;

// ----------------------------------------------------------------------------------------------- streams

// Speculative streams beside the main rows of `Asked` (Speculative Streaming, section 2.1), or after them.
struct Fused {
  struct Rider { int64_t node, row; };  // a node whose streams go with the main rows; row of the first of them
  struct Carrier {                // a sequence whose next draft is read from streams
    int64_t segment, root;        // root: its row
    int64_t streams;              // that are wanted, the first ones
    int64_t most;                 // accepted nodes behind which a draft is of use
    int64_t riders, num_riders;   // the first of them
    const int64_t* ends;          // tokens that end the answer
    int64_t num_ends;
    int64_t path, length;         // its accepted nodes, once they are known
    int64_t frontier(const std::vector<int64_t>& paths) const { return length ? paths[path + length - 1] : 0; }
  };

  int64_t k = 0, scratch = 0, room = 0;  // slots of the streams' K and V: the first one, and how many
  bool noisy = false;  // whether drafts are drawn with the noise of the target's own choices
  int64_t most = 0;    // keys of its main row that a stream attends to; 0: all
  const Rules* rules = nullptr;  // by segment
  std::vector<Carrier> carriers;
  std::vector<Rider> riders;
  std::vector<int64_t> paths, positions, slots, keys, places, late;
  std::vector<uint8_t> masks;
  std::vector<Segment> segments;
  std::vector<AdapterRange> adapters;
  std::vector<Limit> limits;
  std::vector<char> tap, begun;  // main rows before the streams' first layer; streams that run afterwards

  // Behind `Asked`'s numbers:
  //     carriers, k, first scratch slot, scratch slots, 1 where drafts are drawn with the target's noise, keys of its main row
  //         that a stream attends to (0: all; else every node carries streams)
  //     for each carrier: segment, root row, streams, most, ends, riders; the tokens of the ends; the riders, ascending
  Refusal read(const Model& m, const Asked& a, const StreamSet& set) {
    const int64_t* at = a.end;
    const int64_t count = at[0];
    k = at[1], scratch = at[2], room = at[3], noisy = at[4] != 0, most = at[5], at += 6;
    carriers.clear(), riders.clear();
    if (count < 0 || k < 1 || k > m.vocab || most < 0 || set.gamma < 1 || set.insertion < 1 || set.insertion >= a.pass.layers) return BAD_COUNT;
    int64_t rows = 0, later = 0, last = -1;
    for (int64_t i = 0; i < count; i++) {
      const int64_t streams = at[2], num_ends = at[4], num_riders = at[5];
      Carrier c{at[0], at[1], streams, at[3], (int64_t)riders.size(), num_riders, at + 6, num_ends, 0, 0};
      if (c.segment <= last || c.segment >= (int64_t)a.segments.size() || num_ends < 0 || num_riders < 0) return BAD_COUNT;
      if (streams < 1 || streams > set.gamma) return BAD_COUNT;
      const Segment& s = a.segments[last = c.segment];
      const int64_t drafted = a.of_segment[6 * c.segment + 5];
      if (c.root < s.start || c.root >= s.stop || (drafted >= 0 && c.root != s.stop - 1 - drafted)) return BAD_COUNT;
      if (!std::binary_search(a.wanted, a.wanted + a.num_wanted, c.root)) return BAD_COUNT;
      if (place_of(a, c.root) + s.stop - c.root > a.num_wanted || a.wanted[place_of(a, c.root) + s.stop - c.root - 1] != s.stop - 1) return BAD_COUNT;
      if (most && num_riders != s.stop - c.root) return BAD_COUNT;  // weights that choose are those of the pass
      at += 6 + num_ends;
      for (int64_t r = 0, before = -1; r < num_riders; r++, at++, rows += streams) {
        if (*at <= before || *at >= s.stop - c.root) return BAD_COUNT;
        riders.push_back({before = *at, a.pass.rows + rows});
      }
      later += streams;
      carriers.push_back(c);
    }
    if (std::max(rows, later) > room || !within(scratch, room, cache_slots(m, a.pass))) return BAD_SLOT;
    if (m.rotated && !all_within(a.pass.positions, a.pass.rows, 0, a.pass.num_positions - set.gamma)) return BAD_POSITION;
    return DONE;
  }

  static int64_t place_of(const Asked& a, int64_t row) { return std::lower_bound(a.wanted, a.wanted + a.num_wanted, row) - a.wanted; }

  template <class A> void run(const Model& m, Asked& a, const StreamSet& set, float* logits, int64_t* out, float* log_q, Taps* taps) {
    const int layers = (int)a.pass.layers, insertion = (int)set.insertion;
    a.run(m, a.pass, 0, insertion, taps);
    tap.assign(a.states.begin(), a.states.begin() + a.pass.rows * Asked::row_bytes(m));
    int64_t rode = 0;
    for (const Carrier& c : carriers) rode += c.streams * c.num_riders;
    if (rode) ride<A>(m, a, set, rode, taps);
    else a.run(m, a.pass, insertion, layers, taps);
    logits = a.head(m, rode, logits);
    a.choose(m, logits, rules, out);
    late.clear(), paths.clear();
    int64_t* told = out + a.num_wanted;
    for (size_t i = 0; i < carriers.size(); i++, told += 2 + set.gamma * k) {
      told[0] = told[1] = 0;
      if (!walk(a, carriers[i], out)) continue;
      const Rider* rider = rider_of(carriers[i]);
      told[1] = rider != nullptr;
      if (!rider) late.push_back((int64_t)i);
      else told[0] = tell(m, a, carriers[i], logits + (a.num_wanted + rider->row - a.pass.rows) * m.vocab, told + 2, log_q + i * set.gamma * k);
    }
    told[0] = 0;
    if (late.empty()) return;
    const Clock::time_point began = Clock::now();
    run_late<A>(m, a, set);
    const float* said = t_logits.data();
    for (int64_t i : late) {
      int64_t* own = out + a.num_wanted + i * (2 + set.gamma * k);
      own[0] = tell(m, a, carriers[i], said, own + 2, log_q + i * set.gamma * k);
      said += carriers[i].streams * m.vocab;
    }
    told[0] = microseconds(Clock::now() - began);
  }

  // The k best tokens of each stream of a sequence's last accepted node; returns of how many streams they could be found.
  int64_t tell(const Model& m, const Asked& a, const Carrier& c, const float* logits, int64_t* tokens, float* log_q) const {
    const int64_t after = a.pass.positions[c.root + c.frontier(paths)] + 1;  // stream j has the position of the last token before its own
    const Rules* r = rules && rules[c.segment].temperature > 0 ? rules + c.segment : nullptr;
    for (int64_t j = 0; j < c.streams; j++, logits += m.vocab, tokens += k, log_q += k) {
      const float* scores = r ? scored(logits, m.vocab, *r, after + j + 1, noisy) : logits;
      if (!scores) return j;
      top(scores, m.vocab, k, tokens, log_q);
    }
    return c.streams;
  }

  // f(M) + P_j with f the identity (eq. 4), for streams 1 .. count of one row.
  template <class A> static void start(const Model& m, const StreamSet& set, const A* state, int64_t count, A* out) {
    const A* embeddings = (const A*)set.embeddings;
    for (int64_t j = 0; j < count; j++)
      for (int64_t i = 0; i < m.d_model; i++) put(out + j * m.d_model + i, wide(state[i]) + wide(embeddings[j * m.d_model + i]));
  }

  // The walk through a sequence's tree along the choices; whether a draft behind it is of use.
  bool walk(const Asked& a, Carrier& c, const int64_t* chosen) {
    const Segment& s = a.segments[c.segment];
    const int64_t *own = chosen + place_of(a, c.root), *parents = a.parents[c.segment];
    auto ends = [&](int64_t token) { return std::find(c.ends, c.ends + c.num_ends, token) != c.ends + c.num_ends; };
    c.path = (int64_t)paths.size(), c.length = 0;
    int64_t want = own[0], at = 0;
    bool wanted = want != UNDECIDED && !ends(want);
    for (int64_t node = 1; node < s.stop - c.root; node++) {
      if ((parents ? parents[node - 1] : node - 1) != at || a.tokens[c.root + node] != want) continue;
      paths.push_back(at = node), want = own[node], c.length++;
      wanted = wanted && want != UNDECIDED && !ends(want);
    }
    return wanted && c.length <= c.most;
  }

  const Rider* rider_of(const Carrier& c) const {
    for (int64_t r = c.riders; r < c.riders + c.num_riders; r++)
      if (riders[r].node == c.frontier(paths)) return &riders[r];
    return nullptr;
  }

  static int64_t key(const Segment& s, int64_t j) { return s.base >= 0 ? s.base + j : s.keys[j]; }

  // The upper layers for main rows and riders, which come behind them; each sequence's riders are a segment.
  template <class A> void ride(const Model& m, Asked& a, const StreamSet& set, int64_t rode, Taps* taps) {
    const int64_t main = a.pass.rows, d = m.d_model;
    Pass p = a.pass;
    if ((int64_t)a.states.size() < (main + rode) * Asked::row_bytes(m)) a.states.resize((main + rode) * Asked::row_bytes(m));
    positions.assign(p.positions, p.positions + main), slots.clear();
    for (int64_t r = 0; r < main; r++) slots.push_back(p.slots ? p.slots[r] : p.slot_base + r);
    int64_t num_keys = 0, num_places = 0, bytes = 0;
    for (const Carrier& c : carriers) {
      const Segment& s = a.segments[c.segment];
      const int64_t streams = c.streams * c.num_riders;
      num_keys += s.num_keys + streams, num_places += s.stop - s.start + streams, bytes += streams * (s.stop - s.start + streams);
    }
    keys.resize(num_keys), places.resize(num_places), masks.assign(bytes, 0);  // so that addresses in them stay
    segments = a.segments, limits.clear();
    int64_t *next_key = keys.data(), *next_place = places.data();
    uint8_t* mask = masks.data();
    for (const Carrier& c : carriers) {
      const Segment& s = a.segments[c.segment];
      const int64_t streams = c.streams * c.num_riders, width = s.stop - s.start, row = (int64_t)positions.size(), block = width + streams;
      if (!streams) continue;
      segments.push_back({row, row + streams, s.prefix, s.num_keys + streams, -1, next_key, mask, next_place});
      for (int64_t j = 0; j < s.num_keys; j++) *next_key++ = key(s, j);
      next_place = std::copy(p.positions + s.start, p.positions + s.stop, next_place);
      int64_t own = 0;  // streams of this sequence so far
      for (int64_t r = c.riders; r < c.riders + c.num_riders; r++) {
        const Rider& rider = riders[r];
        const int64_t carried = c.root + rider.node, seen = carried - s.start;  // its row, and in the segment
        if (most) limits.push_back({carried, rider.row, rider.row + c.streams, s.num_keys, most});
        start(m, set, (const A*)tap.data() + carried * d, c.streams, (A*)a.states.data() + rider.row * d);
        for (int64_t j = 0; j < c.streams; j++, mask += block) {
          if (s.visible) std::memcpy(mask, s.visible + seen * width, width);
          else std::memset(mask, 1, seen + 1);
          std::memset(mask + width + own, 1, j + 1);
          positions.push_back(p.positions[carried] + j + 1), slots.push_back(scratch + rider.row - main + j);
          *next_key++ = slots.back(), *next_place++ = positions.back();
        }
        own += c.streams;
      }
    }
    adapters.assign(p.adapters, p.adapters + p.num_adapters);
    if (set.adapter) adapters.push_back({main, main + rode, set.rank, set.adapter});
    p.rows = main + rode, p.positions = positions.data(), p.slots = slots.data(), p.hidden_in = p.hidden_out = a.states.data();
    p.segments = segments.data(), p.num_segments = (int64_t)segments.size();
    p.adapters = adapters.data(), p.num_adapters = (int64_t)adapters.size();
    p.limits = limits.data(), p.num_limits = (int64_t)limits.size();
    a.run(m, p, (int)set.insertion, (int)p.layers, taps);
  }

  // The streams of the last accepted nodes of those in `late`: each a chain behind its sequence's accepted keys. Their
  // logits go to `t_logits`.
  template <class A> void run_late(const Model& m, const Asked& a, const StreamSet& set) {
    const int64_t d = m.d_model;
    Pass p = a.pass;
    int64_t num_keys = 0, rows = 0;
    for (int64_t i : late) rows += carriers[i].streams, num_keys += a.segments[carriers[i].segment].num_keys + carriers[i].streams;
    grow(begun, rows * Asked::row_bytes(m));
    keys.resize(num_keys), positions.clear(), segments.clear();
    int64_t *next_key = keys.data(), row = 0;
    for (int64_t i : late) {
      const Carrier& c = carriers[i];
      const Segment& s = a.segments[c.segment];
      const int64_t *first = next_key, carried = c.root + c.frontier(paths), root = s.prefix + c.root - s.start;
      for (int64_t j = 0; j <= root; j++) *next_key++ = key(s, j);
      for (int64_t n = c.path; n < c.path + c.length; n++) *next_key++ = key(s, root + paths[n]);
      const int64_t prefix = next_key - first;
      for (int64_t j = 0; j < c.streams; j++) *next_key++ = scratch + row + j, positions.push_back(p.positions[carried] + j + 1);
      segments.push_back({row, row + c.streams, prefix, prefix + c.streams, -1, first, nullptr, nullptr});
      start(m, set, (const A*)tap.data() + carried * d, c.streams, (A*)begun.data() + row * d);
      row += c.streams;
    }
    adapters.clear();
    if (set.adapter) adapters.push_back({0, rows, set.rank, set.adapter});
    p.rows = rows, p.positions = positions.data(), p.slots = nullptr, p.slot_base = scratch;
    p.hidden_in = p.hidden_out = begun.data(), p.segments = segments.data(), p.num_segments = (int64_t)segments.size();
    p.adapters = adapters.data(), p.num_adapters = (int64_t)adapters.size();
    run_layers(m, p, (int)set.insertion, (int)p.layers);
    grow(t_logits, rows * m.vocab);
    head(m, begun.data(), rows, t_logits.data(), (int)p.threads);
  }
};
thread_local Fused t_fused;

template <class W> void pack_lines(const W* w, int64_t n, int64_t k, int64_t padded_k, int step, W* out) {
  const int64_t blocks = up(n, LANES) / LANES;
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t i = 0; i < padded_k; i++)
      for (int lane = 0; lane < LANES; lane++) {
        const int64_t row = b * LANES + lane;
        out[b * LANES * padded_k + i / step * LANES * step + lane * step + i % step] =
            row < n && i < k ? w[row * k + i] : W(0);
      }
}

}  // namespace

extern "C" {

// The instructions in use; to be called once, before all else.
int pl_init(int most) {
  int isa = GENERIC;
#if PL_DOT_BF16
  isa = AVX512_BF16;
#endif
#if PL_AMX
  // A process asks for the tile registers once (ARCH_REQ_XCOMP_PERM, XTILE_DATA).
  if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) isa = AMX_BF16;
#endif
  g_isa = std::min(isa, most);
  return g_isa;
}

// Elements of a packed weight.
int64_t pl_packed_size(int64_t n, int64_t k, int kind) { return up(n, LANES) * padded_k(kind, k); }

void pl_pack(const void* w, int64_t n, int64_t k, int kind, void* out) {
  if (kind == F32) pack_lines((const float*)w, n, k, k, 1, (float*)out);
  else if (!is_i8(kind)) pack_lines((const bf16*)w, n, k, padded_k(kind, k), 2, (bf16*)out);
  else {
    pack_lines((const int8_t*)w, n, k, padded_k(kind, k), I8_STEP, (int8_t*)out);
    if (I8_STEP > 1)  // dot products of bytes want one factor without a sign: 128 is added
      for (int64_t i = 0, size = pl_packed_size(n, k, kind); i < size; i++) ((uint8_t*)out)[i] ^= 0x80;
  }
}

// y [rows, n] float32 = x [rows, k] W^T; x is float32 for a float32 weight, bf16 for the others.
int pl_linear(const Linear* l, const void* x, int64_t rows, float* y, int threads) {
  if (rows < 0 || threads < 1) return BAD_COUNT;
  if (l->kind == F32) linear(*l, (const float*)x, l->k, rows, y, threads);
  else linear(*l, prepared((const bf16*)x, rows, l->k, nullptr, 0), up(l->k, K_STEP), rows, y, threads);
  return DONE;
}

// Layers start .. stop - 1. Returns a `Refusal`.
int pl_run_layers(const Model* m, const Pass* p, int start, int stop) {
  if (p->rows == 0 || start >= stop) return DONE;
  const Refusal found = check_pass(*m, *p, start, stop);
  if (found != DONE) return found;
  run_layers(*m, *p, start, stop);
  return DONE;
}

}  // extern "C"

namespace {

// Copies a chain's sinks into its scratch slots, their keys turned on by a gap.
template <class A> void turn_sinks(const Model& m, const Pass& p, const Chain& c, int64_t gap) {
  const SparseView& v = *c.view;
  const int64_t d = m.head_dim, half = m.rotated / 2;
  std::vector<float> x(d);
  for (int64_t at = 0; at < p.layers * m.kv_heads; at++) {
    const int64_t layer = at / m.kv_heads, head = at % m.kv_heads * p.head_stride;
    A *keys = (A*)p.k_cache[layer] + head, *values = (A*)p.v_cache[layer] + head;
    for (int64_t j = 0; j < v.sinks; j++) {
      const int64_t from = c.base >= 0 ? c.base + j : c.keys[j], to = c.scratch + j;
      for (int64_t i = 0; i < d; i++) x[i] = wide(keys[from * d + i]);
      if (half) rotate(x.data(), v.cos + gap * half, v.sin + gap * half, m.rotated);
      for (int64_t i = 0; i < d; i++) put(keys + to * d + i, x[i]);
      std::memcpy(values + to * d, values + from * d, d * sizeof(A));
    }
  }
}

// What the row at a position of a chain sees through its view, which leaves some out; `slots` is room for it.
Segment viewed(const Model& m, const Pass& p, const Chain& c, int64_t position, int64_t row, int64_t* slots) {
  const SparseView& v = *c.view;
  const int64_t keys = v.sinks + v.window, gap = position + 1 - keys, first = v.sinks + gap;
  if (m.wide_activations) turn_sinks<float>(m, p, c, gap);
  else turn_sinks<bf16>(m, p, c, gap);
  for (int64_t j = 0; j < v.sinks; j++) slots[j] = c.scratch + j;
  for (int64_t j = 0; j < v.window; j++) slots[v.sinks + j] = c.base >= 0 ? c.base + first + j : c.keys[first + j];
  return Segment{row, row + 1, keys - 1, keys, -1, slots, nullptr, nullptr};
}

}  // namespace

extern "C" {

// Drafts chains of several sequences at once. `p` carries the rotation table, caches and threads; the embedding has
// `vocab` rows, as the head does. Returns a `Refusal`.
int pl_roll(const Model* m, Pass* p, const void* embedding, int64_t limit, Chain* chains, int64_t count) {
  const Refusal refusal = check_chains(*m, *p, limit, chains, count);
  if (refusal != DONE) return refusal;
  int64_t most = count;
  for (int64_t i = 0; i < count; i++) chains[i].made = 0, most += chains[i].num_pending;
  const int64_t bytes = m->d_model * (m->wide_activations ? 4 : 2);
  std::vector<char> hidden(most * bytes);
  std::vector<int64_t> positions(most), slots(most), live(count);
  std::vector<float> score(count, 0.0f);
  std::vector<Segment> segments(count);
  int64_t seen = 0;  // keys of the largest view that leaves any out
  for (int64_t i = 0; i < count; i++)
    if (chains[i].view) seen = std::max(seen, std::min(chains[i].view->sinks + chains[i].view->window, cache_slots(*m, *p)));
  std::vector<int64_t> view_slots(count * seen);
  while (true) {
    int64_t rows = 0, active = 0;
    for (int64_t i = 0; i < count; i++) {
      const Chain& c = chains[i];
      if (c.made >= c.steps || (c.made && score[i] < c.floor)) continue;
      const int64_t n = c.made ? 1 : c.num_pending;
      const int64_t at = c.made ? c.position + c.num_pending + c.made - 1 : c.position;
      segments[active] = Segment{rows, rows + n, at, at + n, c.base, c.keys, nullptr, nullptr};
      if (c.view && at + 1 > c.view->sinks + c.view->window)
        segments[active] = viewed(*m, *p, c, at, rows, view_slots.data() + i * seen);
      live[active++] = i;
      for (int64_t j = 0; j < n; j++, rows++) {
        const int64_t token = c.made ? c.tokens[c.made - 1] : c.pending[j];
        positions[rows] = at + j, slots[rows] = c.base >= 0 ? c.base + at + j : c.keys[at + j];
        std::memcpy(hidden.data() + rows * bytes, (const char*)embedding + token * bytes, bytes);
      }
    }
    if (active == 0) return DONE;
    p->rows = rows, p->hidden_in = p->hidden_out = hidden.data(), p->positions = positions.data(), p->slots = slots.data();
    p->segments = segments.data(), p->num_segments = active;
    run_layers(*m, *p, 0, (int)p->layers);
    for (int64_t a = 0; a < active; a++)  // the last row of each
      std::memmove(hidden.data() + a * bytes, hidden.data() + (segments[a].stop - 1) * bytes, bytes);
    grow(t_logits, active * m->vocab);
    head(*m, hidden.data(), active, t_logits.data(), (int)p->threads);
    Guess guess{};
    guess.logits = t_logits.data(), guess.n = m->vocab, guess.limit = limit;
    for (int64_t a = 0; a < active; a++) {
      Chain& c = chains[live[a]];
      guess.rows.push_back({c.rules, c.position + c.num_pending + c.made, c.tokens + c.made, c.log_q + c.made});
    }
    guess.run(p->threads);
    for (int64_t a = 0; a < active; a++) score[live[a]] += chains[live[a]].log_q[chains[live[a]].made++];
  }
}

// Row which[i] of a table [rows, bytes] goes to place i of `out`. Returns a `Refusal`.
int pl_pick_rows(const char* table, int64_t rows, int64_t bytes, const int64_t* which, int64_t count, char* out) {
  if (count < 0 || !all_within(which, count, 0, rows)) return BAD_COUNT;
  for (int64_t i = 0; i < count; i++) std::memcpy(out + i * bytes, table + which[i] * bytes, bytes);
  return DONE;
}

// K and V of states as each layer would compute them of its rows: row r's lies in row which[r] of states[layer] [most, d_model].
// `p` carries rows, positions, slots, rotation table, caches and threads. Returns a `Refusal`.
int pl_keys(const Model* m, const Pass* p, const char* const* states, int64_t most, const int64_t* which) {
  const Refusal found = check_rows(*m, *p);
  if (found != DONE || p->rows == 0) return found;
  const int64_t bytes = m->d_model * (m->wide_activations ? 4 : 2), each = p->rows * bytes;
  static thread_local std::vector<char> picked;
  grow(picked, p->layers * each);
  for (int64_t l = 0; l < p->layers; l++)
    if (const int refused = pl_pick_rows(states[l], most, bytes, which, p->rows, picked.data() + l * each)) return refused;
  Pass pass = *p;
  pass.hidden_in = picked.data();
  run_layers(*m, pass, 0, (int)p->layers, KEYS, p->rows * m->d_model);
  return DONE;
}

}  // extern "C"

namespace {

// Where K and V of a text's positions lie in a ring of sinks + span slots, and which of them a row sees: kv/ring.py.
struct Ring {
  int64_t sinks, window, span;
  int64_t slot(int64_t ring, int64_t position) const {
    return ring * (sinks + span) + (position < sinks ? position : sinks + (position - sinks) % span);
  }
  // The slots of the sinks and the window in front of position `stop`, those from position `start` on; their number.
  int64_t seen(int64_t ring, int64_t start, int64_t stop, int64_t* slots) const {
    const int64_t first = std::min(sinks, stop);
    int64_t n = 0;
    for (int64_t j = 0; j < first; j++) slots[n++] = slot(ring, j);
    for (int64_t j = std::max({first, start, stop - window}); j < stop; j++) slots[n++] = slot(ring, j);
    return n;
  }
};

// A chain whose rows see memory of earlier tokens.
struct Recalling {
  int64_t token, position, steps, ring, start;  // the root and its position; memory is there from position `start` on
  const Rules* rules;
  int64_t* out;  // tokens made, then the tokens [steps]
  float* log_q;  // [steps]
  double score;
  int64_t& made() const { return out[0]; }
  int64_t here() const { return position + made(); }  // position of the next row
};

Refusal check_recalling(const Model& m, const Pass& p, const Ring& r, const Recalling& c, bool feedback) {
  const int64_t slots = cache_slots(m, p);
  if (c.steps < 1 || c.steps > r.span - r.window + 1) return BAD_COUNT;  // what is drafted takes no slot that a row sees
  if (c.position < 0 || c.position > INT32_MAX || (m.rotated && c.position + c.steps > p.num_positions)) return BAD_POSITION;
  if (c.start < 0 || c.start > c.position) return BAD_POSITION;
  if (feedback && (c.position == 0 || (r.sinks == 0 && c.start == c.position))) return BAD_POSITION;  // nothing is seen
  if (c.token < 0 || c.token >= m.vocab) return BAD_TOKEN;
  return c.ring >= 0 && c.ring < slots / (r.sinks + r.span) ? DONE : BAD_SLOT;
}

// m^i = sum over l of mix[i][l] x^l, of one row: states [layers + 1] and memory [layers], `apart` and `between` elements apart.
template <class A> void mix_states(const float* mix, int64_t layers, int64_t d, const A* states, int64_t apart, A* memory, int64_t between) {
  static thread_local std::vector<float> sum;
  grow(sum, d);
  for (int64_t i = 0; i < layers; i++, mix += layers + 1) {
    for (int64_t j = 0; j < d; j++) sum[j] = mix[0] * wide(states[j]);
    for (int64_t l = 1; l <= layers; l++)
      for (int64_t j = 0; j < d; j++) sum[j] += mix[l] * wide(states[l * apart + j]);
    for (int64_t j = 0; j < d; j++) put(memory + i * between + j, sum[j]);
  }
}

}  // namespace

extern "C" {

// SPIRe's drafts: chains of several sequences at once whose rows see K and V in rings, a token a pass. With `mix` [layers, layers
// + 1] they see memory of strictly earlier tokens, and a row's own is made of what its layers gave and kept for the rows
// behind it; without it they see the layers' own K and V, theirs among them. All numbers come in one list:
//     sequences, sinks, window, slots of a ring beside the sinks
//     for each: root, its position, steps, ring, first position beside the sinks that has K and V, address of the rules (0: none)
// A chain ends once its cumulative log-probability is below `floor`. What comes out, for each: tokens made, then the tokens, as
// many as there are steps; `log_q` likewise without the number. `p` as for `pl_roll`. Returns a `Refusal`. Source: SPIRe, 3.3.
int pl_recall(const Model* m, const Pass* p, const void* embedding, int64_t limit, const int64_t* list, const float* mix, double floor,
              int64_t* out, float* log_q) {
  constexpr int64_t NUMBERS = 6;
  const int64_t count = list[0], layers = p->layers, d = m->d_model;
  const Ring ring{list[1], list[2], list[3]};
  if (count < 0 || p->threads < 1 || limit < 1 || limit > m->vocab) return BAD_COUNT;
  if (ring.sinks < 0 || ring.sinks > INT32_MAX || ring.window < 1 || ring.window > ring.span || ring.span > INT32_MAX) return BAD_COUNT;
  std::vector<Recalling> chains;
  int64_t last = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t* c = list + 4 + NUMBERS * i;
    chains.push_back({c[0], c[1], c[2], c[3], c[4], (const Rules*)c[5], out, log_q, 0});
    const Refusal refusal = check_recalling(*m, *p, ring, chains.back(), mix != nullptr);
    if (refusal != DONE) return refusal;
    out += 1 + c[2], log_q += c[2], last = std::max(last, c[1] + c[2]);
  }
  for (const Recalling& c : chains) c.made() = 0;
  const int64_t bytes = d * (m->wide_activations ? 4 : 2), most = std::min(ring.sinks + ring.window, last);
  std::vector<char> states((layers + 1) * count * bytes), memory(mix ? layers * count * bytes : 0);
  std::vector<int64_t> positions(count), slots(count), keys(count * most);
  std::vector<Segment> segments(count);
  std::vector<Recalling*> live;
  for (Recalling& c : chains) live.push_back(&c);
  while (!live.empty()) {
    const int64_t rows = live.size(), apart = rows * d;
    for (int64_t r = 0; r < rows; r++) {
      const Recalling& c = *live[r];
      int64_t* seen = keys.data() + r * most;
      const int64_t n = ring.seen(c.ring, c.start, c.here() + (mix ? 0 : 1), seen);
      positions[r] = c.here(), slots[r] = mix ? -1 : seen[n - 1];
      segments[r] = Segment{r, r + 1, mix ? n : n - 1, n, -1, seen, nullptr, nullptr};
      std::memcpy(states.data() + r * bytes, (const char*)embedding + (c.made() ? c.out[c.made()] : c.token) * bytes, bytes);
    }
    Pass pass = *p;
    pass.rows = rows, pass.hidden_in = states.data(), pass.hidden_out = states.data() + rows * bytes;
    pass.positions = positions.data(), pass.slots = slots.data(), pass.segments = segments.data(), pass.num_segments = rows;
    run_layers(*m, pass, 0, (int)layers, mix ? QUERIES : WHOLE, apart);
    grow(t_logits, rows * m->vocab);
    head(*m, states.data() + layers * rows * bytes, rows, t_logits.data(), (int)p->threads);
    Guess guess{};
    guess.logits = t_logits.data(), guess.n = m->vocab, guess.limit = limit;
    for (const Recalling* c : live) guess.rows.push_back({c->rules, c->here() + 1, c->out + 1 + c->made(), c->log_q + c->made()});
    guess.run(p->threads);
    std::vector<Recalling*> next;
    std::vector<int64_t> from;
    for (int64_t r = 0; r < rows; r++) {
      Recalling& c = *live[r];
      c.score += (double)c.log_q[c.made()++];
      if (c.made() < c.steps && c.score >= floor) next.push_back(&c), from.push_back(r);
    }
    live = std::move(next);
    if (!mix || live.empty()) continue;
    const int64_t kept = live.size();
    for (int64_t k = 0; k < kept; k++) {
      positions[k] = live[k]->here() - 1, slots[k] = ring.slot(live[k]->ring, positions[k]);
      const char* state = states.data() + from[k] * bytes;
      char* own = memory.data() + k * bytes;
      if (m->wide_activations) mix_states(mix, layers, d, (const float*)state, apart, (float*)own, kept * d);
      else mix_states(mix, layers, d, (const bf16*)state, apart, (bf16*)own, kept * d);
    }
    pass.rows = kept, pass.hidden_in = memory.data();
    run_layers(*m, pass, 0, (int)layers, KEYS, kept * d);
  }
  return DONE;
}

// Drafts trees of several sequences at once, a level a pass. All numbers come in one list:
//     trees, topk, beam, levels, children of each level
//     for each tree: address of the pending tokens, their number, position of the first, slots behind them, base (-1: keys are
//     listed), address of the keys, budget, greatest depth, address of the rules (0: none), what a token's position in its text
//     is beyond that of its row, nodes that fit into `out`, address of the states in front of the pending tokens (0: none)
// Rows are embeddings; or, where `f` is given, made of a state and an embedding each: of the target's states and the pending
// tokens, and of what a node's parent's row gave and the node's own token. Of such trees the best nodes come out, `budget` at most.
// What comes out, for each tree: nodes, how many of the first ones have K and V, passes, then tokens and parents, as many as fit
// each; `scores` has those of all trees likewise. `p` as for `pl_roll`. Returns a `Refusal`.
int pl_grow(const Model* m, const Pass* p, const void* embedding, int64_t limit, const int64_t* list, double floor, int64_t* out,
            double* scores, const Fuse* f) {
  constexpr int64_t NUMBERS = 12, ROOM = 10;
  const int64_t count = list[0];
  const Shape shape{list[1], list[2], list[3], list + 4, floor};
  const int64_t* of_tree = list + 4 + shape.levels;
  if (shape.levels < 1 || shape.topk < 1 || shape.beam < 0) return BAD_COUNT;
  for (int64_t i = 0; i < shape.levels; i++)
    if (shape.factors[i] < 1) return BAD_COUNT;
  std::vector<Growing> trees(count);
  int64_t most = 0;
  for (int64_t i = 0; i < count; i++, of_tree += NUMBERS) {
    const int64_t* t = of_tree;
    Growing& g = trees[i];
    g.pending = (const int64_t*)t[0], g.num_pending = t[1], g.position = t[2], g.room = t[3], g.base = t[4];
    g.keys = (const int64_t*)t[5], g.budget = t[6], g.max_depth = t[7], g.rules = (const Rules*)t[8], g.shift = t[9];
    g.given = (const char*)t[11];
    if (f && !g.given) return BAD_COUNT;
    if (g.room < 0 || g.budget < 1 || g.max_depth < 1 || g.max_depth > shape.levels) return BAD_COUNT;
    Chain chain{g.pending, g.num_pending, g.position, g.room + 1, g.base, g.keys, 0, nullptr, nullptr, 0, nullptr};
    const Refusal refusal = check_chains(*m, *p, limit, &chain, 1);
    if (refusal != DONE) return refusal;
    most += std::max(g.num_pending, g.room);
  }
  if (f && check_fuse(*m, *f) != DONE) return BAD_COUNT;
  const int64_t bytes = m->d_model * (m->wide_activations ? 4 : 2);
  std::vector<char> hidden(most * bytes), fed(f ? most * bytes : 0);
  std::vector<int64_t> positions(most), slots(most), places, named(most), best;
  std::vector<float> log_q;
  std::vector<Ranked> asked;
  std::vector<Segment> segments;
  std::vector<uint8_t> masks;
  for (int64_t level = 0;; level++) {
    int64_t rows = 0, wanted = 0, bits = 0, block = 0;
    for (Growing& g : trees) {
      if (level && !g.frontier.empty()) g.compact();
      bits += g.frontier.size() * g.forwarded, block += g.forwarded;
    }
    masks.assign(bits, 0), places.resize(block), segments.clear();
    bits = block = 0;
    auto add = [&](const Growing& g, int64_t token, int64_t position, int64_t place, const char* state) {
      positions[rows] = position, slots[rows] = g.slot(place), named[rows] = token;
      if (!f) std::memcpy(hidden.data() + rows * bytes, (const char*)embedding + token * bytes, bytes);
      else if (level) std::memcpy(fed.data() + rows * bytes, state, bytes);
      else take_state(*m, *f, state, fed.data() + rows * bytes);
      rows++;
    };
    for (Growing& g : trees) {
      if (g.frontier.empty()) continue;
      const int64_t start = rows, size = g.frontier.size(), behind = g.committed() + g.forwarded;
      if (level == 0) {
        for (int64_t j = 0; j < g.num_pending; j++) add(g, g.pending[j], g.position + j, g.position + j, g.given + (f ? j * bytes : 0));
        segments.push_back({start, rows, g.position, g.committed(), g.base, g.keys, nullptr, nullptr});
        continue;
      }
      for (int64_t node : g.frontier)
        add(g, g.tokens[node - 1], g.committed() - 1 + g.depth(node), g.committed() + node - 1, g.states.data() + g.parents[node - 1] * bytes);
      if (size == 1 && g.depth(g.frontier[0]) == g.forwarded) {  // a chain so far
        segments.push_back({start, rows, behind - 1, behind, g.base, g.keys, nullptr, nullptr});
        continue;
      }
      segments.push_back({start, rows, g.committed(), behind, g.base, g.keys, masks.data() + bits, places.data() + block});
      for (int64_t f = 0; f < size; f++)
        for (int64_t node = g.frontier[f]; node; node = g.parents[node - 1]) masks[bits + f * g.forwarded + node - 1] = 1;
      for (int64_t node = 1; node <= g.forwarded; node++) places[block + node - 1] = g.committed() - 1 + g.depth(node);
      bits += size * g.forwarded, block += g.forwarded;
    }
    if (rows == 0) break;
    if (f) fuse(*m, *f, fed.data(), named.data(), embedding, rows, hidden.data(), (int)p->threads);
    Pass pass = *p;
    pass.rows = rows, pass.hidden_in = pass.hidden_out = hidden.data(), pass.positions = positions.data(), pass.slots = slots.data();
    pass.segments = segments.data(), pass.num_segments = segments.size();
    run_layers(*m, pass, 0, (int)p->layers);
    if (level == 0)  // the last row of each
      for (const Segment& s : segments) std::memmove(hidden.data() + wanted++ * bytes, hidden.data() + (s.stop - 1) * bytes, bytes);
    else wanted = rows;
    asked.clear();
    for (const Growing& g : trees)
      for (int64_t node : g.frontier) asked.push_back({nullptr, g.rules, g.place(node)});
    const int64_t children = shape.children(level), k = std::min(children, limit);
    best.resize(wanted * k), log_q.resize(wanted * k);
    rank(*m, m->head, m->norm, hidden.data(), limit, k, true, asked, best.data(), log_q.data(), p->threads);
    const char* given = hidden.data();
    int64_t at = 0;
    for (Growing& g : trees) {
      const int64_t size = g.frontier.size();
      if (f) g.states.insert(g.states.end(), given, given + size * bytes), given += size * bytes;
      const int64_t most = level == 0 && shape.topk == 1 ? g.budget : children;  // of later levels only what fits is grown
      g.frontier = shape.next(g, g.expand(best.data() + at, log_q.data() + at, k, most), level + 1);
      at += size * k;
    }
  }
  of_tree = list + 4 + shape.levels;
  for (Growing& g : trees) {
    if (f) keep_best(g.budget, g.tokens, g.parents, g.scores);
    const int64_t nodes = g.tokens.size(), room = of_tree[ROOM];
    if (nodes > room) return BAD_COUNT;
    out[0] = nodes, out[1] = g.forwarded, out[2] = g.passes;
    std::copy(g.tokens.begin(), g.tokens.end(), out + 3), std::copy(g.parents.begin(), g.parents.end(), out + 3 + room);
    std::copy(g.scores.begin(), g.scores.end(), scores);
    out += 3 + 2 * room, scores += room, of_tree += NUMBERS;
  }
  return DONE;
}

// Lyanna's draft, and what is re-sampled of the one before: k passes of its layer for all sequences, one product of all states
// with the head, and Algorithm 1 on their logits and on those that are left over. All numbers come in one list:
//     sequences, branches, 1 where the rows of a text see the token behind them, 1 where drafts are drawn with the target's noise
//     for each: address of the pending tokens, their number, position of the first, base (-1: keys are listed), address of the
//         keys, steps (0: nothing new is drafted), root, position that the root's children will have in the text, address of the rules (0:
//         none), nodes of the new tree that come out at most, the best; address of the logits left over [levels, vocab], levels (0:
//         none), nodes of the second tree; address of the target's states in front of the pending tokens [their number, d_model]
// raw [steps of all, vocab] is filled.
// What comes out, for each tree, the second ones of a sequence behind its first: nodes, then tokens and parents, as many as fit each;
// `scores` has those of all trees likewise. `p` as for `pl_roll`. Returns a `Refusal`. Source: Lyanna, sections 4 and 5.
int pl_sample(const Model* m, const Pass* p, const void* embedding, int64_t limit, const Fuse* f, const TokenInfo* info,
              const int64_t* list, float* raw, int64_t* out, double* scores) {
  constexpr int64_t NUMBERS = 14;
  const int64_t count = list[0], branches = list[1], threads = p->threads;
  const bool reads_tokens = list[2] != 0, noisy = list[3] != 0;
  const int64_t* of_sequence = list + 4;
  if (count < 0 || branches < 1 || check_fuse(*m, *f) != DONE || f->state.n == 0) return BAD_COUNT;
  if (info && ((info->table.kind == F32) != (m->wide_activations != 0) || info->table.n != m->vocab || info->table.k < 1)) return BAD_COUNT;
  std::vector<Chain> chains;
  std::vector<const char*> given;  // states of each chain
  std::vector<Sampled> trees;
  int64_t most = 0, total = 0, deepest = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t* s = of_sequence + NUMBERS * i;
    const int64_t steps = s[5], root = s[6], position = s[7], levels = s[11];
    const Rules* rules = (const Rules*)s[8];
    if (steps < 0 || levels < 0 || root < 0 || root >= m->vocab || (steps && (s[9] < 1 || !s[13])) || (levels && s[12] < 1)) return BAD_COUNT;
    if (steps) {
      given.push_back((const char*)s[13]);
      chains.push_back({(const int64_t*)s[0], s[1], s[2], steps, s[3], (const int64_t*)s[4], 0, nullptr, nullptr, 0, rules});
      trees.push_back({root, steps, position, raw + total * m->vocab, rules, s[9], {}, {}, {0}, {}});
      most += s[1], total += steps, deepest = std::max(deepest, steps);
    }
    if (levels) trees.push_back({root, levels, position, (const float*)s[10], rules, s[12], {}, {}, {0}, {}});
  }
  const Refusal refusal = check_chains(*m, *p, limit, chains.data(), chains.size());
  if (refusal != DONE) return refusal;
  const int64_t bytes = m->d_model * (m->wide_activations ? 4 : 2);
  std::vector<char> hidden(std::max<int64_t>(most, chains.size()) * bytes), drafted(total * bytes), fed(hidden.size());
  std::vector<int64_t> positions(most), slots(most), tokens(most);
  std::vector<Segment> segments;
  for (int64_t step = 0; step < deepest; step++) {
    int64_t rows = 0, first = 0, live = 0;
    segments.clear();
    for (size_t i = 0; i < chains.size(); first += chains[i++].steps) {
      const Chain& c = chains[i];
      if (step >= c.steps) continue;
      const int64_t n = step ? 1 : c.num_pending, at = step ? c.position + c.num_pending + step - 1 : c.position;
      segments.push_back({rows, rows + n, at, at + n, c.base, c.keys, nullptr, nullptr});
      for (int64_t j = 0; j < n; j++, rows++) {
        positions[rows] = at + j, slots[rows] = c.base >= 0 ? c.base + at + j : c.keys[at + j];
        if (step) std::memcpy(fed.data() + rows * bytes, drafted.data() + (first + step - 1) * bytes, bytes);
        else tokens[rows] = c.pending[j], take_state(*m, *f, given[i] + j * bytes, fed.data() + rows * bytes);
      }
    }
    fuse(*m, *f, fed.data(), step || !reads_tokens ? nullptr : tokens.data(), embedding, rows, hidden.data(), (int)threads);
    Pass pass = *p;
    pass.rows = rows, pass.hidden_in = pass.hidden_out = hidden.data(), pass.positions = positions.data(), pass.slots = slots.data();
    pass.segments = segments.data(), pass.num_segments = segments.size();
    run_layers(*m, pass, 0, (int)p->layers);
    first = 0, live = 0;
    for (const Chain& c : chains) {
      if (step < c.steps) std::memcpy(drafted.data() + (first + step) * bytes, hidden.data() + (segments[live++].stop - 1) * bytes, bytes);
      first += c.steps;
    }
  }
  if (total) head(*m, drafted.data(), total, raw, (int)threads);
  sample_trees(*m, info, limit, branches, noisy, trees, threads);
  for (Sampled& t : trees) {
    keep_best(t.room, t.tokens, t.parents, t.scores);
    out[0] = t.tokens.size();
    std::copy(t.tokens.begin(), t.tokens.end(), out + 1), std::copy(t.parents.begin(), t.parents.end(), out + 1 + t.room);
    std::copy(t.scores.begin(), t.scores.end(), scores);
    out += 1 + 2 * t.room, scores += t.room;
  }
  return DONE;
}

// One whole pass: tokens become states, go through all layers, and after each row that is wanted a token is chosen: by
// `rules`, which has an entry a segment, with -1 where a choice cannot be made here; else the likeliest. `list` is as `Asked`
// says; `p` carries the rotation table, caches, threads and adapters; logits [wanted, vocab] is filled unless it is null;
// `taps` may be null. Returns a `Refusal`.
int pl_choose(const Model* m, const Pass* p, const void* embedding, const int64_t* list, const Rules* rules, float* logits,
              int64_t* chosen, Taps* taps) {
  Asked& a = t_asked;
  Refusal found = a.read(*m, *p, list);
  if (found == DONE && taps) found = a.check(*taps);
  if (found != DONE) return found;
  a.begin(*m, embedding);
  a.run(*m, a.pass, 0, (int)p->layers, taps);
  a.choose(*m, a.head(*m, 0, logits), rules, chosen);
  return DONE;
}

// The same with speculative streams, where main rows never see them: riders go through the upper layers beside the main
// rows; where a sequence's last accepted node carried none, its streams go through these layers afterwards. `set` is the
// trained set, and `list` goes on as `Fused::read` says; `rules` and `logits` may be null. Of every stream of a sequence's
// last accepted node come the k best tokens by its rules, and the log-probabilities that these give them:
//     out: chosen [wanted]; for each carrier: its streams, 1 where they rode in the pass, tokens [gamma, k]; microseconds that
//         the streams took afterwards
//     log_q: for each carrier [gamma, k]
//     logits: [wanted and rows of riders, vocab]
//     taps: of main rows, or null
// A carrier without streams is one whose next draft nobody wants, or one with a choice that cannot be made here. Returns a
// `Refusal`.
int pl_choose_streams(const Model* m, const Pass* p, const void* embedding, const StreamSet* set, const int64_t* list,
                      const Rules* rules, float* logits, int64_t* out, float* log_q, Taps* taps) {
  Asked& a = t_asked;
  Fused& f = t_fused;
  Refusal found = a.read(*m, *p, list);
  if (found == DONE) found = f.read(*m, a, *set);
  if (found == DONE && taps) found = a.check(*taps);
  if (found != DONE) return found;
  a.begin(*m, embedding);
  f.rules = rules;
  if (m->wide_activations) f.run<float>(*m, a, *set, logits, out, log_q, taps);
  else f.run<bf16>(*m, a, *set, logits, out, log_q, taps);
  return DONE;
}

// Of each row of logits [rows, n] the token that one sequence's rules draw, as `pl_choose` does it. Returns a `Refusal`.
int pl_draw(const float* logits, int64_t rows, int64_t n, const Rules* rules, const int64_t* positions, int64_t* chosen) {
  if (rows < 0 || n < 1) return BAD_COUNT;
  for (int64_t i = 0; i < rows; i++) chosen[i] = drawn(logits + i * n, n, *rules, positions[i]);
  return DONE;
}

// Of each row of logits [rows, n] the k best tokens and their log-probabilities, [rows, k] each. Returns a `Refusal`.
int pl_top(const float* logits, int64_t rows, int64_t n, int64_t k, int64_t* tokens, float* log_q) {
  if (rows < 0 || k < 1 || k > n) return BAD_COUNT;
  for (int64_t r = 0; r < rows; r++) top(logits + r * n, n, k, tokens + r * k, log_q + r * k);
  return DONE;
}

// Of each of Medusa's heads the k best tokens behind each of the states [rows, d_model], which are raw: by `rules`, which has an
// entry a row, with the noise of the target's own choices where `noisy`; else by the logits alone. positions [rows]: of the
// first head's tokens. tokens and log_q: [heads, rows, k]. Returns a `Refusal`.
int pl_heads(const Model* m, const Heads* h, const void* states, int64_t rows, int64_t k, const Rules* rules, const int64_t* positions,
             int noisy, int64_t* tokens, float* log_q, int threads) {
  if (rows < 1 || threads < 1 || h->count < 1 || k < 1 || k > m->vocab) return BAD_COUNT;
  if (h->blocks.n != h->count * m->d_model || h->blocks.k != m->d_model) return BAD_COUNT;
  if (m->wide_activations) run_heads(*m, *h, (const float*)states, rows, threads);
  else run_heads(*m, *h, (const bf16*)states, rows, threads);
  Pick pick;
  pick.logits = t_logits.data(), pick.rows = h->count * rows, pick.n = m->vocab, pick.k = k, pick.sequences = rows;
  pick.rules = rules, pick.positions = positions, pick.noisy = noisy != 0, pick.tokens = tokens, pick.log_q = log_q;
  team().run(std::clamp<int64_t>(pick.rows * m->vocab / DRAWS, 1, threads), pick);
  return DONE;
}

// The final norm of hidden [rows, d_model]. Returns a `Refusal`.
int pl_norm(const Model* m, const void* hidden, int64_t rows, void* out) {
  if (rows < 0) return BAD_COUNT;
  const int64_t d = m->d_model;
  for (int64_t r = 0; r < rows; r++)
    if (m->wide_activations) rms((const float*)hidden + r * d, m->norm, d, m->eps, (float*)out + r * d, d);
    else rms((const bf16*)hidden + r * d, m->norm, d, m->eps, (bf16*)out + r * d, d);
  return DONE;
}

// logits [rows, vocab] float32 of hidden [rows, d_model]. Returns a `Refusal`.
int pl_logits(const Model* m, const void* hidden, int64_t rows, float* logits, int threads) {
  if (rows < 0 || threads < 1) return BAD_COUNT;
  head(*m, hidden, rows, logits, threads);
  return DONE;
}

// Rows of every plane of a cache [planes, slots, bytes] are copied to other places; all of a plane are read before one is written.
// moves [2, count]: slots that are read, slots that are written. Returns a `Refusal`.
int pl_copy_rows(char* cache, int64_t planes, int64_t slots, int64_t bytes, const int64_t* moves, int64_t count) {
  if (count < 0) return BAD_COUNT;
  for (int64_t i = 0; i < 2 * count; i++)
    if (moves[i] < 0 || moves[i] >= slots) return BAD_SLOT;
  static thread_local std::vector<char> held;
  grow(held, count * bytes);
  for (int64_t p = 0; p < planes; p++, cache += slots * bytes) {
    for (int64_t i = 0; i < count; i++) std::memcpy(held.data() + i * bytes, cache + moves[i] * bytes, bytes);
    for (int64_t i = 0; i < count; i++) std::memcpy(cache + moves[count + i] * bytes, held.data() + i * bytes, bytes);
  }
  return DONE;
}

// An empty text whose n-grams of `shortest` .. `longest` tokens are looked up; null where these are no lengths.
void* pl_ngrams_new(int64_t shortest, int64_t longest) {
  return shortest < 1 || longest < shortest ? nullptr : new NgramText(shortest, longest);
}

void pl_ngrams_free(void* text) { delete (NgramText*)text; }

// Prompt lookup for several texts. All numbers come in one list:
//     texts, tokens beyond which a match is not told apart
//     for each text: its address, tokens that are new, tokens to draft
//     the new tokens of all
// out: for each text how long its match is (0: there is none), and the tokens drafted. Returns a `Refusal`.
int pl_ngrams(const int64_t* list, int64_t* out) {
  const int64_t count = list[0], most = list[1];
  const int64_t *of_text = list + 2, *fresh = of_text + 3 * count;
  for (int64_t i = 0; i < count; i++, of_text += 3) {
    const int64_t depth = of_text[2];
    if (!of_text[0] || of_text[1] < 0 || depth < 1) return BAD_COUNT;
    NgramText& text = *(NgramText*)of_text[0];
    text.extend(fresh, of_text[1]);
    fresh += of_text[1];
    const int64_t end = text.tokens.size();
    int64_t from = 0;
    *out = text.find(most, from);
    if (*out++)
      for (int64_t d = 0; d < depth; d++) out[d] = from + d < end ? text.tokens[from + d] : out[d - (end - from)];  // it repeats
    out += depth;
  }
  return DONE;
}

// The runs of texts, `most` + 1 tokens and less; null where that is no length. See `Suffixes`.
void* pl_suffixes_new(int64_t most) { return most < 1 ? nullptr : new Suffixes(most); }

void pl_suffixes_free(void* runs) { delete (Suffixes*)runs; }

// Take in one more text.
int pl_suffixes_add(void* runs, const int64_t* tokens, int64_t count) {
  if (!runs || count < 0) return BAD_COUNT;
  Suffixes& all = *(Suffixes*)runs;
  all.last = 0;
  for (int64_t i = 0; i < count; i++) all.append(tokens[i]);
  return DONE;
}

// An empty running text; null where `most` is no length.
void* pl_suffix_text_new(int64_t most) { return most < 1 ? nullptr : new SuffixText(most); }

void pl_suffix_text_free(void* text) { delete (SuffixText*)text; }

// Continue several texts as their longest suffixes were continued most often. All numbers come in one list:
//     texts, tokens of a match at least, automata of earlier texts
//     for each of these: its number, its address
//     for each text: its address, tokens that are new, tokens to draft at most, depth at most
//     the new tokens of all
// limits: tokens drafted at most for each matched one, and the chance of a path below which it ends.
// out: for each text the tokens drafted, the matched ones, and as many drafted ones as it may have; scores [as many]: logs of their chances, with
// the trust in so long a match. Returns a `Refusal`.
int pl_suffixes(const int64_t* list, const double* limits, int64_t* out, double* scores) {
  const int64_t texts = list[0], least = list[1], shared = list[2];
  const int64_t *of_shared = list + 3, *of_text = of_shared + 2 * shared, *fresh = of_text + 4 * texts;
  static thread_local std::vector<int64_t> drafted, best;
  static thread_local std::vector<double> chances, logs;
  if (least < 1 || shared < 0) return BAD_COUNT;
  for (int64_t t = 0; t < texts; t++, of_text += 4) {
    const int64_t nodes = of_text[2], deepest = of_text[3], room = std::min(nodes, deepest);
    if (!of_text[0] || of_text[1] < 0 || room < 1) return BAD_COUNT;
    SuffixText& text = *(SuffixText*)of_text[0];
    text.extend(fresh, of_text[1]);
    fresh += of_text[1];
    std::vector<SuffixText::Match> now;
    for (int64_t s = 0; s < shared; s++) {
      SuffixText::Match match{(const Suffixes*)of_shared[2 * s + 1], of_shared[2 * s]};
      for (const auto& known : text.shared)
        if (known.number == match.number) match = known;
      text.catch_up(match);
      now.push_back(match);
    }
    text.shared.swap(now);
    double best_score = 0;
    int64_t best_matched = 0;
    best.clear(), logs.clear();
    for (int64_t s = -1; s < shared; s++) {
      const Suffixes& runs = s < 0 ? text.own : *text.shared[s].runs;
      int32_t state = s < 0 ? text.state : text.shared[s].state;
      int64_t matched = s < 0 ? text.matched : text.shared[s].matched;
      const int64_t from = matched;
      const int64_t limit = std::min(nodes, std::max<int64_t>(1, (int64_t)(limits[0] * (double)matched)));
      if (matched < least || (double)limit <= best_score) continue;  // a node counts 1 at most
      drafted.clear(), chances.clear();
      double chance = 1, score = 0;
      while ((int64_t)drafted.size() < std::min(limit, deepest)) {
        runs.continued(state, matched);
        if (matched < least) break;
        double share;
        const int32_t edge = runs.likeliest(state, share);
        chance *= share;
        if (chance < limits[1]) break;
        const double said = std::log(chance);
        drafted.push_back(runs.edges[edge].token), chances.push_back(said), score += std::exp(said);
        state = runs.edges[edge].target, matched = std::min(matched + 1, runs.most);
        runs.settle(state, matched);
      }
      if (score > best_score) best_score = score, best_matched = from, best.swap(drafted), logs.swap(chances);
    }
    out[0] = best.size(), out[1] = best_matched;
    for (size_t i = 0; i < best.size(); i++) {
      const double n = best_matched, d = i + 1;
      out[2 + i] = best[i], scores[i] = logs[i] + std::log(n * (n + 1) / ((n + d) * (n + d + 1)));
    }
    out += 2 + room, scores += room;
  }
  return DONE;
}

// The honest chances of the nodes of several trees, and these in falling order. All numbers come in one list:
//     trees, kinds of nodes, classes of depths, edges of odds, nodes that are ranked
//     for each tree: nodes, address of what its sequence leans by [kinds], addresses of its odds by class [kinds]
//     parents of all nodes, the roots' first of each tree and without meaning; then their kinds
// scores [nodes]: logs of the drafter's estimates, or null. cells [nodes]; chances [2, nodes]: given the parent, and of the path;
// places [2, ranked]: tree and node; best [ranked]: chances. Returns the depth of the deepest node, or -1.
int64_t pl_weigh(const int64_t* list, const double* numbers, const double* scores, int64_t* cells, double* chances, int64_t* places, double* best) {
  const int64_t trees = list[0], kinds = list[1], most = list[4];
  const Correction rule(list + 2, numbers);
  const int64_t* of_tree = list + 5;
  int64_t total = 0, deepest = 0, at = 0;
  for (int64_t t = 0; t < trees; t++) total += of_tree[t * (2 + kinds)];
  const int64_t *parents = of_tree + trees * (2 + kinds), *marks = parents + total;
  double *given = chances, *path = chances + total;
  static thread_local std::vector<int64_t> depths;
  static thread_local std::vector<double> factors;
  static thread_local std::vector<std::pair<int64_t, int64_t>> order;
  order.clear(), factors.resize(kinds);
  for (int64_t t = 0; t < trees; t++, of_tree += 2 + kinds) {
    const int64_t nodes = of_tree[0];
    if (nodes < 1) return -1;
    const double* lean = (const double*)of_tree[1];
    for (int64_t k = 0; k < kinds; k++) factors[k] = lean[k] != 0 ? std::exp(lean[k]) : 1.0;
    depths.assign(nodes, 0), cells[at] = 0, given[at] = path[at] = 1;
    for (int64_t i = 1; i < nodes; i++) {
      const int64_t parent = parents[at + i], kind = marks[at + i], node = at + i;
      if (parent < 0 || parent >= i || kind < 0 || kind >= kinds) return -1;
      const int64_t depth = depths[i] = depths[parent] + 1;
      const double own = scores ? rule.odds(scores[node] - scores[at + parent]) : numbers[0];
      cells[node] = rule.cell(own, depth);
      const double odds = ((const double*)of_tree[2 + kind])[cells[node]] * factors[kind];
      given[node] = odds / (1 + odds), path[node] = path[at + parent] * given[node];
      deepest = std::max(deepest, depth), order.push_back({t, node});
    }
    at += nodes;
  }
  std::stable_sort(order.begin(), order.end(), [&](const auto& a, const auto& b) { return path[a.second] > path[b.second]; });
  of_tree = list + 5;
  static thread_local std::vector<int64_t> starts;
  starts.assign(1, 0);
  for (int64_t t = 0; t < trees; t++) starts.push_back(starts[t] + of_tree[t * (2 + kinds)]);
  for (int64_t i = 0; i < std::min<int64_t>(most, order.size()); i++)
    places[i] = order[i].first, places[most + i] = order[i].second - starts[order[i].first], best[i] = path[order[i].second];
  return deepest;
}

// Proposals are compared with the texts that followed, in their order. All numbers come in one list:
//     proposals, kinds of nodes, classes of depths, edges of odds
//     for each: addresses of its nodes' tokens, parents, kinds and classes, and of their chances given the parent; nodes, tokens that
//         followed the root, address of what its sequence leans by, for each kind addresses of hits, tries and odds by class
//     the tokens that followed, of all
// Returns a `Refusal`.
int pl_judge(const int64_t* list, const double* numbers) {
  const int64_t count = list[0], kinds = list[1];
  const Correction rule(list + 2, numbers);
  const int64_t *of_one = list + 4, *text = of_one + count * (8 + 3 * kinds);
  static thread_local std::vector<int64_t> right_up_to;  // of each node that was right: tokens of the text behind the root
  for (int64_t i = 0; i < count; i++, of_one += 8 + 3 * kinds) {
    const int64_t *tokens = (const int64_t*)of_one[0], *parents = (const int64_t*)of_one[1], *marks = (const int64_t*)of_one[2];
    const int64_t* cells = (const int64_t*)of_one[3];
    const double* given = (const double*)of_one[4];
    const int64_t nodes = of_one[5], known = of_one[6];
    double* lean = (double*)of_one[7];
    right_up_to.assign(nodes, -1), right_up_to[0] = 0;
    for (int64_t n = 1; n < nodes; n++) {
      const int64_t place = right_up_to[parents[n]];
      if (place < 0 || place >= known) continue;
      const bool right = text[place] == tokens[n];
      double* const* counts = (double* const*)(of_one + 8 + 3 * marks[n]);
      rule.learn(counts[0], counts[1], counts[2], cells[n], right);
      lean[marks[n]] = rule.leaning(lean[marks[n]], right, given[n]);
      if (right) right_up_to[n] = place + 1;
    }
    text += known;
  }
  return DONE;
}

}  // extern "C"
