// Rows that go into products, and the weights that come next.

#pragma once

namespace {

int64_t block_bytes(int64_t kind);   // see blocks.h
int64_t block_values(int64_t kind);

// Of eight rows or fewer as many as a product takes at once; those that nobody gave are zero.
inline int panel_width(int64_t rows) { return rows > 6 ? 8 : rows > 4 ? 6 : rows > 2 ? 4 : (int)rows; }
inline int tiled_width(int64_t rows) { return rows > 12 ? ROWS : rows > 8 ? 12 : 8; }  // the same on tiles

// Rows of x rounded to bytes, for products with int8 weights and with those in blocks: eight rows together in a panel,
// so that a product of R rows reads its x side by side; up to sixteen, row after row, where tiles read them.
struct Bytes {
  // What stored codes are too large by, 128 >> (0, 3, 4, 7), times the block's sum, negative; for codes that are 32
  // too large, the sums of the block's two halves.
  enum Start { BY_128, BY_16, BY_8, BY_1, FIRST_BY_32, SECOND_BY_32, STARTS };
  std::vector<int32_t> x;              // [panel][k / 4][width] four bytes each; tiled: [panel][k / I8_BLOCK][width][8]
  std::vector<int32_t> start[STARTS];  // [panel][k / I8_BLOCK][width]
  std::vector<float> scale, sum;       // likewise; the scale, and the scale times the block's sum
  int64_t rows = 0, blocks = 0;        // blocks: k / I8_BLOCK
  bool tiled = false;
  int panel() const { return tiled ? ROWS : 8; }
  int width(int64_t from) const { return tiled ? tiled_width(rows) : panel_width(std::min<int64_t>(8, rows - from)); }
};
// One panel of them.
struct Panel {
  const int32_t *x, *start[Bytes::STARTS];
  const float *scale, *sum;
  int width;
};
inline Panel panel_of(const Bytes& y, int64_t row) {
  const int64_t first = row / y.panel() * y.panel(), at = first * y.blocks;
  Panel p{y.x.data() + at * (I8_BLOCK / 4), {}, y.scale.data() + at, y.sum.data() + at, y.width(first)};
  for (int i = 0; i < Bytes::STARTS; i++) p.start[i] = y.start[i].data() + at;
  return p;
}

template <class A> struct Input {  // rows of x; bf16 rows are padded to K_STEP
  const A* x;
  int64_t stride;
  const Bytes* bytes = nullptr;  // the same rows where the weights ask for them; `row`, a multiple of 8, is the first
  int64_t row = 0;
  const float* wide = nullptr;  // the same rows in float32, where products with bf16 and int8 weights read those
  Input from(int64_t r) const { return {x + r * stride, stride, bytes, row + r, wide ? wide + r * stride : wide}; }
};

// bf16 numbers as float32; n is a multiple of 16.
inline void widen(const bf16* x, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += 16) save(y + i, load_wide(x + i));
}

inline bool in_blocks(int64_t kind) { return kind >= MIXED; }
inline int64_t padded_k(int64_t kind, int64_t k) {
  if (kind == BF16_SHORT) return SHORT_K;
  if (kind == MIXED) return k;
  if (in_blocks(kind)) return up(k, block_values(kind));
  return kind == BF16 || (kind == I8 && I8_STEP > 1) ? up(k, K_STEP) : k;
}
// Bytes of 16 outputs.
inline int64_t line_bytes(int64_t kind, int64_t k) {
  if (in_blocks(kind)) return padded_k(kind, k) / block_values(kind) * block_bytes(kind);
  return LANES * padded_k(kind, k) * (kind == I8 ? 1 : kind == F32 ? 4 : 2);
}


// 16 outputs of a weight, and their kind. A weight whose rows are of several types is a table of these.
struct Line {
  const char* at;
  int64_t kind;
};
inline Line line_of(const Linear& l, int64_t block) {
  if (l.kind == MIXED) return ((const Line*)l.weight)[block];
  return {(const char*)l.weight + block * line_bytes(l.kind, l.k), l.kind};
}

// Weights that a thread will read after those that it reads now: the lines of 64 bytes of some blocks. A product asks
// the memory for them while it computes; else the memory waits while many rows go through a block, and then they for
// it.
struct Next {
  const char* at[BLOCKS];
  int blocks = 0;
  int64_t lines = 0;  // of a block
  // Line `line` of blocks first, first + step, .. Never a call, which would put all sums of a product aside.
  [[gnu::always_inline]] void ask(int64_t line, int first = 0, int step = 1) const {
    if (line < lines)
      for (int b = first; b < blocks; b += step) __builtin_prefetch(at[b] + line * 64, 0, 2);
  }
  // The first line of block `b`; where there is none, one that was asked for before.
  const char* stream(int b, const void* otherwise) const { return b < blocks ? at[b] : (const char*)otherwise; }
};

inline Next next_of(const Linear& l, const int64_t block[], int blocks) {
  Next next;
  next.blocks = blocks;
  for (int b = 0; b < blocks; b++) {
    const Line line = line_of(l, block[b]);
    next.at[b] = line.at, next.lines = std::max(next.lines, line_bytes(line.kind, l.k) / 64);
  }
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

// The same, of the part that this thread is at; nothing, where asking would be in the way of the processor's own:
// measured with AVX-512 (with AVX2 asking pays at any number of rows).
inline Next next_here(const Linear& l, int64_t begin, int64_t end, int64_t rows, int64_t pair = 0) {
  if (LANES == PIECE && g_runs_ahead && l.kind == BF16 && rows <= 4) return {};
  return next_part(l, begin, end, pair);
}

// Of a row of activations [d_model].
inline int64_t state_bytes(const Model& m) { return m.d_model * (m.wide_activations ? 4 : 2); }

struct Buffers {  // of one pass, shared by its threads; bf16 rows are padded to whole tiles
  std::vector<char> memory;
  char* at = nullptr;
  // Bytes of `take`.
  template <class A> static int64_t room(int64_t n) { return up(n * (int64_t)sizeof(A), 64) + FENCE; }
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

}  // namespace
