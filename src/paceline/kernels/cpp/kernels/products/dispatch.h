// Which product a weight takes, and one product for all rows.

#pragma once

namespace {

// One product: up to ROWS rows of x against up to BLOCKS weight blocks (any of the matrix), into c [ROWS][64].
inline void product(const Linear& l, const int64_t block[], int blocks, Input<float> in, int rows, float* c,
                    const Next& next = {}) {
  const float* w[BLOCKS];
  for (int b = 0; b < blocks; b++) w[b] = (const float*)l.weight + block[b] * LANES * l.k;
  product_w(w, blocks, l.k, in, rows, c, next);
}
template <class W> void product_of(const Linear& l, const int64_t block[], int blocks, Input<bf16> in, int rows,
                                   float* c, const Next& next) {
  const int64_t k = padded_k(l.kind, l.k);
  const W* w[BLOCKS];
  for (int b = 0; b < blocks; b++) w[b] = (const W*)l.weight + block[b] * LANES * k;
#if PL_AMX
  if constexpr (std::is_same_v<W, bf16>)
    if (g_isa == AMX_BF16 && l.kind == BF16_SHORT) {
      if (blocks == 1) amx_short<1>(w, in, c);
      else if (blocks == 2) amx_short<2>(w, in, c);
      else if (blocks == 3) amx_short<3>(w, in, c);
      else amx_short<4>(w, in, c);
      return;
    }
  if constexpr (std::is_same_v<W, bf16>)
    if (g_isa == AMX_BF16) {
      if (blocks == 1) amx_product<1>(w, k, in, c);
      else if (blocks == 2) amx_product<2>(w, k, in, c);
      else if (blocks == 3) amx_product<3>(w, k, in, c);
      else amx_product<4>(w, k, in, c);
      return;
    }
  if constexpr (std::is_same_v<W, int8_t>)
    if (in.bytes->tiled) return block_tiles<Int8>((const uint8_t* const*)w, blocks, k, *in.bytes, in.row, c);
#endif
#if PL_VNNI
  if constexpr (std::is_same_v<W, int8_t>) return byte_products(w, blocks, k, *in.bytes, in.row, rows, c, next);
#elif PL_NEON_DOTS
  if constexpr (std::is_same_v<W, int8_t>) {
    for (int b = 0; b < blocks; b++)
      block_products<Int8>((const uint8_t*)w[b], k, *in.bytes, in.row, rows, c + b * LANES);
    return;
  }
#endif
#if PL_DOT_BF16 || PL_NEON_BF16
  if constexpr (std::is_same_v<W, bf16>) return product_w(w, blocks, k, in, rows, c, next);
#endif
  static thread_local std::vector<float> wide;  // rows that no stage has widened: those of adapters
  if (!in.wide) {
    grow(wide, rows * in.stride);
    for (int r = 0; r < rows; r++) widen(in.x + r * in.stride, k, wide.data() + r * in.stride);
  }
  product_w(w, blocks, k, Input<float>{in.wide ? in.wide : wide.data(), in.stride}, rows, c, next);
}
inline void product(const Linear& l, const int64_t block[], int blocks, Input<bf16> in, int rows, float* c,
                    const Next& next = {}) {
  if (in_blocks(l.kind)) {
    const uint8_t* w[BLOCKS];
    int64_t kind[BLOCKS];
    for (int b = 0; b < blocks; b++) {
      const Line line = line_of(l, block[b]);
      w[b] = (const uint8_t*)line.at, kind[b] = line.kind;
    }
    for (int b = 0, same = 1; b < blocks; b += same, same = 1) {
      while (b + same < blocks && kind[b + same] == kind[b]) same++;
      of_format<int>(kind[b], [&](auto format) {
        using F = decltype(format);
        const int64_t k = padded_k(kind[b], l.k);
#if PL_AMX
        if (in.bytes->tiled) return block_tiles<F>(w + b, same, k, *in.bytes, in.row, c + b * LANES), 0;
#endif
        for (int i = b; i < b + same; i++) block_products<F>(w[i], k, *in.bytes, in.row, rows, c + i * LANES);
        return 0;
      });
    }
  } else if (l.kind == I8) product_of<int8_t>(l, block, blocks, in, rows, c, next);
  else product_of<bf16>(l, block, blocks, in, rows, c, next);
}

// Outputs of a row from `first` on, whose sums are in y, with their scales and biases.
inline void finish(const Linear& l, int64_t first, int64_t outputs, float* y) {
  for (int64_t i = 0; l.scale && i < outputs; i++) y[i] *= l.scale[first + i];
  for (int64_t i = 0; l.bias && i < outputs; i++) y[i] += l.bias[first + i];
}

// A thread says for how many rows tiles of pairs are, at most 16, when it comes to a stage; products set them, and it
// lets go of them before it waits.
inline void set_tiles(int64_t rows) {
#if PL_AMX
  t_tiles.now = NO_TILES, t_tiles.rows = (int)std::min<int64_t>(rows, ROWS);
#endif
  (void)rows;
}
void free_tiles() {
#if PL_AMX
  if (g_isa == AMX_BF16) _tile_release(), t_tiles.now = NO_TILES;
#endif
}

thread_local Bytes t_bytes;
thread_local std::vector<float> t_wide;
constexpr int64_t TILED_FROM = 5;  // rows for which bytes are multiplied on tiles: measured

// Rows of x as this layer's products want them. What another thread or stage was given is not this one's: `fresh`.
template <class A> Input<A> input_of(const Linear& l, const A* x, int64_t stride, int64_t rows, bool fresh) {
  if constexpr (std::is_same_v<A, bf16>) {
    if (in_blocks(l.kind) || (l.kind == I8 && I8_STEP > 1)) {
      const bool tiled = g_isa == AMX_BF16 && rows >= TILED_FROM;
      if (fresh) round_rows(x, stride, rows, padded_k(l.kind, l.k), l.order, tiled, t_bytes);
      return {x, stride, &t_bytes, 0};
    }
#if !PL_DOT_BF16 && !PL_NEON_BF16
    if (fresh) {
      grow(t_wide, rows * stride);
      widen(x, rows * stride, t_wide.data());
    }
    return {x, stride, nullptr, 0, t_wide.data()};
#endif
  }
  return {x, stride};
}

// The outputs of a claim's blocks for all rows: each(row0, rows, first output, outputs, c). It may change c. `then` is
// what this thread will read when its part is done.
template <class A, class F>
void sweep(const Linear& l, const Claim& claim, Input<A> in, int64_t rows, const Next& then, F each) {
  alignas(64) float c[ROWS * BLOCKS * LANES];
  for (int64_t b = claim.begin; b < claim.end; b += BLOCKS) {
    const int blocks = (int)std::min<int64_t>(BLOCKS, claim.end - b);
    const int64_t block[BLOCKS] = {b, b + 1, b + 2, b + 3}, after = b + blocks;
    const Next next = after < claim.limit ? next_here(l, after, claim.limit, rows) : then;
    for (int64_t r = 0; r < rows; r += ROWS) {
      const int n = (int)std::min<int64_t>(ROWS, rows - r);
      product(l, block, blocks, in.from(r), n, c, r == 0 ? next : Next{});
      each(r, n, b * LANES, std::min<int64_t>(blocks * LANES, l.n - b * LANES), c);
    }
  }
}

constexpr int64_t WORTH = 1 << 17;  // weights of a layer, times rows / 4, that a further thread is worth

template <class A> struct Product final : Job {
  const Linear& l;
  const A* x;
  const int64_t stride, rows;
  float* y;
  Product(const Linear& linear, const A* in, int64_t step, int64_t count, float* out)
      : l(linear), x(in), stride(step), rows(count), y(out) {}
  int64_t stages() const override { return 1; }
  int64_t units(int64_t) const override { return up(l.n, LANES) / LANES; }
  int64_t step(int64_t) const override { return BLOCKS; }
  void work(int64_t, const Claim& claim) override {
    if (claim.fresh) set_tiles(rows);
    sweep(l, claim, input_of(l, x, stride, rows, claim.fresh), rows, {},
          [&](int64_t r0, int n, int64_t first, int64_t outputs, float* c) {
            for (int r = 0; r < n; r++, c += BLOCKS * LANES) {
              finish(l, first, outputs, c);
              std::memcpy(y + (r0 + r) * l.n + first, c, outputs * sizeof(float));
            }
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

// The embedding of a token, a state of the model. Unlike a product's weight a table that is not in blocks lies row
// after row, in the activations' type, with the factor of embeddings in it; here that is `scale`.
inline void embed(const Model& m, const Linear& words, int64_t token, void* out) {
  static thread_local std::vector<float> row;
  const int64_t d = m.d_model;
  if (!in_blocks(words.kind)) {
    std::memcpy(out, (const char*)words.weight + token * state_bytes(m), state_bytes(m));
    return;
  }
  grow(row, d + 256);
  const Line line = line_of(words, token / LANES);
  of_format<int>(line.kind, [&](auto format) {
    unpack_lane<decltype(format)>((const uint8_t*)line.at, (int)(token % LANES), padded_k(line.kind, d), row.data());
    return 0;
  });
  const float by = words.scale ? *words.scale : 1;
  for (int64_t i = 0; i < d; i++)
    if (m.wide_activations) ((float*)out)[i] = row[i] * by;
    else put((bf16*)out + i, wide(narrow(row[i])) * by);
}

}  // namespace

extern "C" {

// Embeddings of `count` tokens, which are all there, in the model's activations.
void pl_embed(const Model* m, const Linear* words, const int64_t* tokens, int64_t count, void* out) {
  for (int64_t i = 0; i < count; i++) embed(*m, *words, tokens[i], (char*)out + i * state_bytes(*m));
}

// y [rows, n] float32 = x [rows, k] W^T; x is float32 for a float32 weight, bf16 for the others.
int pl_linear(const Linear* l, const void* x, int64_t rows, float* y, int threads) {
  if (rows < 0 || threads < 1) return BAD_COUNT;
  if (l->kind == F32) linear(*l, (const float*)x, l->k, rows, y, threads);
  else linear(*l, prepared((const bf16*)x, rows, l->k, nullptr, 0), up(l->k, K_STEP), rows, y, threads);
  return DONE;
}

}  // extern "C"
