// Runs a library of kernels without Python, as under an emulator of another processor:
//
//     drive_kernels LIBRARY INPUT OUTPUT
//
// INPUT holds products, one after the other: int64 kind, n, k, rows, bytes of a weight's row; then the weight and the
// rows of x. OUTPUT receives the level of instructions as int64, float32 [rows, n] for each product, and then what two
// layers make of 40 rows, for each kind of weights. Every result is computed at several widths. The exit status is 1,
// with a line that names the first difference, where their bits differ.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <dlfcn.h>

#include "../../src/paceline/kernels/cpp/kernels/abi.h"

using Bytes = std::vector<char>;

enum { F32, BF16, I8, Q4_0 = 16 + 2 };  // kinds of weights

void* g_library;
template <class R, class... Args> R call(const char* name, Args... args) {
  static std::map<std::string, void*> found;
  void*& function = found[name];
  if (!function && !(function = dlsym(g_library, name))) std::printf("%s\n", dlerror()), std::exit(2);
  return ((R(*)(Args...))function)(args...);
}

void require(bool well, const char* what, int64_t kind, int64_t width) {
  if (well) return;
  std::printf("%s, weights of kind %d, width %d\n", what, (int)kind, (int)width);
  std::exit(1);
}

Bytes packed(int64_t kind, int64_t n, int64_t k, const Bytes& raw, int64_t row_bytes) {
  const int64_t size = kind == F32 ? 4 : kind == BF16 ? 2 : 1;
  Bytes out(call<int64_t>("pl_packed_size", n, k, (int)kind) * size);
  if (kind < 16) {
    call<void>("pl_pack", (const void*)raw.data(), n, k, (int)kind, (void*)out.data());
    return out;
  }
  std::vector<const char*> rows(n);
  for (int64_t i = 0; i < n; i++) rows[i] = raw.data() + i * row_bytes;
  require(call<int>("pl_pack_rows", (const void*)rows.data(), n, k, (int)kind, (void*)out.data(), 1) == 1,
          "a scale is no number", kind, 0);
  return out;
}

std::vector<float> product(const Linear& l, const char* x, int64_t row, int64_t rows, int64_t bytes) {
  std::vector<float> y(rows * l.n);
  require(call<int>("pl_linear", &l, (const void*)(x + row * bytes), rows, y.data(), 1) == 0, "refused", l.kind, rows);
  return y;
}

void products(FILE* in, FILE* out) {
  int64_t head[5];
  while (std::fread(head, sizeof head, 1, in) == 1) {
    const int64_t kind = head[0], n = head[1], k = head[2], rows = head[3], bytes = k * (kind == F32 ? 4 : 2);
    Bytes raw(n * head[4]), x(rows * bytes);
    require(std::fread(raw.data(), raw.size(), 1, in) && std::fread(x.data(), x.size(), 1, in), "no file", kind, 0);
    const Bytes weight = packed(kind, n, k, raw, head[4]);
    Linear l;
    l.weight = weight.data(), l.n = n, l.k = k, l.kind = kind;
    const std::vector<float> y = product(l, x.data(), 0, rows, bytes);
    for (int64_t width = 1; width < rows; width += width < 17 ? 1 : 16)
      for (int64_t row : {(int64_t)0, rows - width}) {
        const std::vector<float> few = product(l, x.data(), row, width, bytes);
        require(!std::memcmp(few.data(), y.data() + row * n, few.size() * 4), "other bits in a product", kind, width);
      }
    std::fwrite(y.data(), 4, y.size(), out);
  }
}

uint64_t g_seed = 1;
float uniform() {  // in -1 .. 1
  g_seed = g_seed * 6364136223846793005 + 1442695040888963407;
  return (float)(int32_t)(g_seed >> 32) * 0x1p-31f;
}
void put(char* at, float x, int64_t bytes) {  // float32, or bf16 that is cut
  std::memcpy(at, (const char*)&x + 4 - bytes, bytes);
}
Bytes numbers(int64_t n, float size, int64_t bytes) {
  Bytes all(n * bytes);
  for (int64_t i = 0; i < n; i++) put(all.data() + i * bytes, uniform() * size, bytes);
  return all;
}

struct Weights {
  std::vector<Bytes> kept;
  Linear linear(int64_t kind, int64_t n, int64_t k) {
    const int64_t row = kind == I8 ? k : (k + 31) / 32 * 18;
    const float size = 1.5f / std::sqrt((float)k);
    Bytes raw(n * row);
    for (char& c : raw) c = (char)(int8_t)(uniform() * 127);
    if (kind < I8) raw = numbers(n * k, size, kind == F32 ? 4 : 2);
    Linear l;
    for (int64_t i = 0; kind == Q4_0 && i < n * row; i += 18) raw[i] = 0, raw[i + 1] = 0x24;  // the half 2^-6
    kept.push_back(packed(kind, n, k, raw, row));
    l.weight = kept.back().data(), l.n = n, l.k = k, l.kind = kind;
    if (kind == I8) {
      kept.push_back(Bytes(n * 4));
      for (int64_t i = 0; i < n; i++) put(kept.back().data() + 4 * i, size / 127, 4);
      l.scale = (const float*)kept.back().data();
    }
    return l;
  }
  const float* vector(int64_t n) {
    kept.push_back(numbers(n, 1, 4));
    return (const float*)kept.back().data();
  }
};

// Two layers, one of which slides, over a text whose keys and values grow pass by pass.
void network(int64_t kind, FILE* out) {
  constexpr int64_t ROWS = 40, D = 72, FF = 112, HEADS = 4, KV = 2, HEAD = 32, LAYERS = 2;
  const int64_t bytes = kind == F32 ? 4 : 2;
  Weights weights;
  weights.kept.reserve(99);
  Layer layers[LAYERS];
  for (Layer& l : layers) {
    l.qkv = weights.linear(kind, (HEADS + 2 * KV) * HEAD, D), l.out = weights.linear(kind, D, HEADS * HEAD);
    l.up = weights.linear(kind, 2 * FF, D), l.down = weights.linear(kind, D, FF);
    l.attention_norm = weights.vector(D), l.mlp_norm = weights.vector(D);
    l.q_norm = weights.vector(HEAD), l.k_norm = weights.vector(HEAD);
  }
  layers[1].window = 9;
  Model m;
  m.d_model = D, m.heads = HEADS, m.kv_heads = KV, m.head_dim = m.own_head_dim = m.rotated = HEAD, m.d_ff = FF;
  m.wide_activations = kind == F32, m.eps = 1e-5f, m.scale = 0.18f, m.layers = layers;
  std::vector<float> cos(ROWS * HEAD / 2), sin(cos.size());
  for (int64_t i = 0; i < (int64_t)cos.size(); i++) {
    const float t = (float)(i / (HEAD / 2)) * 0.1f / (float)(1 + i % (HEAD / 2));
    cos[i] = (1 - t * t) / (1 + t * t), sin[i] = 2 * t / (1 + t * t);
  }
  Bytes x = numbers(ROWS * D, 2, bytes);
  put(x.data() + (ROWS * D - 1) * bytes, NAN, bytes);  // the last row is seen by no other
  Bytes whole;
  for (int64_t width : {ROWS, (int64_t)1, (int64_t)2, (int64_t)3, (int64_t)4, (int64_t)5, (int64_t)8, (int64_t)17}) {
    Bytes y(x.size()), cache[2 * LAYERS];
    for (Bytes& c : cache) {
      c.resize(KV * ROWS * HEAD * bytes);
      for (int64_t i = 0; i < KV * ROWS * HEAD; i++) put(c.data() + i * bytes, NAN, bytes);
    }
    void *keys[] = {cache[0].data(), cache[1].data()}, *values[] = {cache[2].data(), cache[3].data()};
    for (int64_t first = 0; first < ROWS; first += width) {
      Segment s;
      Pass p;
      p.rows = s.stop = std::min(width, ROWS - first), s.prefix = first, s.num_keys = first + p.rows;
      std::vector<int64_t> positions(p.rows);
      for (int64_t r = 0; r < p.rows; r++) positions[r] = first + r;
      p.hidden_in = x.data() + first * D * bytes, p.hidden_out = y.data() + first * D * bytes;
      p.positions = positions.data(), p.slot_base = first;
      p.cos = cos.data(), p.sin = sin.data(), p.num_positions = ROWS;
      p.k_cache = keys, p.v_cache = values, p.head_stride = ROWS * HEAD;
      p.segments = &s, p.num_segments = 1, p.threads = 1, p.layers = LAYERS;
      const int refusal = call<int>("pl_run_layers", (const Model*)&m, (const Pass*)&p, 0, (int)LAYERS);
      require(refusal == 0, "refused", kind, width);
    }
    if (width == ROWS) whole = y;
    require(y == whole, "other bits in a pass", kind, width);
  }
  for (int64_t i = 0; i < ROWS * D; i++) {
    char wide[4] = {};
    std::memcpy(wide + 4 - bytes, whole.data() + i * bytes, bytes);
    std::fwrite(wide, 4, 1, out);
  }
}

int main(int, char** arguments) {
  g_library = dlopen(arguments[1], RTLD_NOW);
  FILE *in = std::fopen(arguments[2], "rb"), *out = std::fopen(arguments[3], "wb");
  if (!g_library || !in || !out) return std::printf("%s\n", g_library ? "no file" : dlerror()), 2;
  const int64_t level = call<int>("pl_init", 99);
  std::fwrite(&level, sizeof level, 1, out);
  products(in, out);
  for (int64_t kind : {(int64_t)F32, (int64_t)BF16, (int64_t)I8, (int64_t)Q4_0}) network(kind, out);
  return std::fclose(out);
}
