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

}  // namespace

extern "C" {

// Elements of a packed weight; bytes of one in blocks.
int64_t pl_packed_size(int64_t n, int64_t k, int kind) {
  return in_blocks(kind) ? up(n, LANES) / LANES * line_bytes(kind, k) : up(n, LANES) * padded_k(kind, k);
}

void pl_pack(const void* w, int64_t n, int64_t k, int kind, void* out) {
  if (in_blocks(kind))
    of_format<int>(kind, [&](auto format) { return pack_blocks<decltype(format)>((const uint8_t*)w, n, padded_k(kind, k), (uint8_t*)out), 0; });
  else if (kind == F32) pack_lines((const float*)w, n, k, k, 1, (float*)out);
  else if (!is_i8(kind)) pack_lines((const bf16*)w, n, k, padded_k(kind, k), 2, (bf16*)out);
  else {
    pack_lines((const int8_t*)w, n, k, padded_k(kind, k), I8_STEP, (int8_t*)out);
    if (I8_STEP > 1)  // dot products of bytes want one factor without a sign: 128 is added
      for (int64_t i = 0, size = pl_packed_size(n, k, kind); i < size; i++) ((uint8_t*)out)[i] ^= 0x80;
  }
}

}  // extern "C"
