// Weights in the order in which products read them.

#pragma once

namespace {

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

// Lines of 16 rows that lie anywhere, in blocks.
template <class F> struct PackRows final : Job {
  const uint8_t* const* rows;
  const int64_t n, blocks;
  uint8_t* out;
  std::atomic<bool> finite{true};
  PackRows(const uint8_t* const* from, int64_t count, int64_t k, uint8_t* to)
      : rows(from), n(count), blocks(k / F::VALUES), out(to) {}
  int64_t stages() const override { return 1; }
  int64_t units(int64_t) const override { return up(n, LANES) / LANES; }
  int64_t step(int64_t) const override { return 1; }
  void work(int64_t, const Claim& claim) override {
    static const uint8_t zeros[F::FILE] = {};
    for (int64_t line = claim.begin; line < claim.end; line++) {
      const uint8_t* from[LANES];
      int64_t next[LANES];
      for (int i = 0; i < LANES; i++) {
        const uint8_t* row = line * LANES + i < n ? rows[line * LANES + i] : nullptr;
        from[i] = row ? row : zeros, next[i] = row ? F::FILE : 0;
      }
      for (int64_t b = 0; b < blocks; b++) {
        if (!pack_block<F>(from, out + (line * blocks + b) * Packed<F>::BYTES)) finite = false;
        for (int i = 0; i < LANES; i++) from[i] += next[i];
      }
    }
  }
};

}  // namespace

extern "C" {

// Elements of a packed weight; bytes of one in blocks.
int64_t pl_packed_size(int64_t n, int64_t k, int kind) {
  return in_blocks(kind) ? up(n, LANES) / LANES * line_bytes(kind, k) : up(n, LANES) * padded_k(kind, k);
}

void pl_pack(const void* w, int64_t n, int64_t k, int kind, void* out) {
  if (kind == F32) pack_lines((const float*)w, n, k, k, 1, (float*)out);
  else if (kind != I8) pack_lines((const bf16*)w, n, k, padded_k(kind, k), 2, (bf16*)out);
  else {
    pack_lines((const int8_t*)w, n, k, padded_k(kind, k), I8_STEP, (int8_t*)out);
    if (I8_STEP > 1)  // dot products of bytes want one factor without a sign: 128 is added
      for (int64_t i = 0, size = pl_packed_size(n, k, kind); i < size; i++) ((uint8_t*)out)[i] ^= 0x80;
  }
}

// Of a weight in blocks, from the addresses of its n rows; where one is null, zeros. Returns whether all scales are
// finite numbers.
int pl_pack_rows(const uint8_t* const* rows, int64_t n, int64_t k, int kind, void* out, int threads) {
  if (n == 0) return 1;
  return of_format<int>(kind, [&](auto format) {
    PackRows<decltype(format)> job(rows, n, padded_k(kind, k), (uint8_t*)out);
    team().run(std::clamp<int64_t>(n * k / WORTH, 1, threads), job);
    return (int)job.finite.load();
  });
}

}  // extern "C"
