// The layers of a pass.

#pragma once

namespace {

// What layers compute of their rows: all; all but K and V; or K and V alone, every layer of states of its own.
enum Part { WHOLE, QUERIES, KEYS };

thread_local std::vector<int32_t> t_heads;

template <class A> struct Runner final : Job {
  enum Kind {
    NORM, PROJECT, ATTEND, JOIN_HEADS, ADD, JOIN_ADD, NORM_AGAIN, GATE, JOIN_GATE, ADD_AGAIN, JOIN_AGAIN, NORM_LAST
  };

  const Model& m;
  const Pass& p;
  const int start, stop;
  const Part part;
  const int64_t apart;  // elements between what two layers put out; 0: a layer's output takes the place of its input
  Ranks* const ranks;     // null: this is no rank of several
  const int64_t gathers;  // ranks whose heads and d_ff `out` and `down` read: 1, where they sum what comes of their own
  const int64_t own;      // which of these this is
  bool well = true;       // no rank was lost
  int64_t rows, padded_rows, d, attended_width, ff;
  A *normed, *query, *attended, *middle, *inner;
  float* added;       // [rows, d_model] what attention or MLP adds, in front of a norm of its own
  int64_t width = 1;  // threads that take part
  const bool post;    // whether what is added is known as a whole before it is added, as it has a norm of its own or is
                      // joined of ranks: then that is a stage, and so is the norm that follows
  bool alone;         // rows are so few that every thread norms them for itself, without a stage, where it can
  Pieces& pieces = t_pieces;
  // A tile computes all rows of a chunk at the price of one, so pieces with the same adapter share a product; without
  // tiles each has one of its own. A row's bits are the same either way.
  const bool in_tiles = std::is_same_v<A, bf16> && g_isa == AMX_BF16;
  int64_t low_width = 0;  // of a row of down(x)
  std::vector<int32_t>& heads = t_heads;  // the first query head of each of attention's packs, and one past the last
  int64_t widest = 1;                     // heads of the largest
  Kind order[12];  // a layer's stages: norms where `alone` is false
  int64_t per_layer = 0;

  Runner(const Model& model, const Pass& pass, int begin, int end, Part which, int64_t between)
      : m(model), p(pass), start(begin), stop(end), part(which), apart(between), ranks(model.ranks),
        gathers(ranks && ranks->by_outputs ? ranks->count : 1), own(gathers > 1 ? ranks->rank : 0),
        post(ranks || model.layers[begin].attention_post_norm) {
    rows = p.rows, padded_rows = up(rows, ROWS);
    d = up(m.d_model, K_STEP), ff = up(gathers * m.d_ff, K_STEP);
    attended_width = up(gathers * m.heads * m.head_dim, K_STEP);
    alone = rows <= 4;
    width = worth(start);
    const int64_t sizes[] = {(alone && !post ? 0 : padded_rows * d), rows * m.heads * m.head_dim,
                             padded_rows * attended_width, rows * m.d_model, padded_rows * ff};
    int64_t bytes = Buffers::room<float>(post ? rows * m.d_model : 0);
    for (int64_t n : sizes) bytes += Buffers::room<A>(n);
    Buffers& b = t_buffers;
    b.open(bytes);
    normed = b.take<A>(sizes[0]);
    query = b.take<A>(sizes[1]);
    attended = b.take<A>(sizes[2]);
    middle = b.take<A>(sizes[3]);
    inner = b.take<A>(sizes[4]);
    added = b.take<float>(post ? rows * m.d_model : 0);
    cut(p, pieces);
    for (int64_t i = 0; i < p.num_adapters; i++) low_width = std::max(low_width, up(p.adapters[i].rank, K_STEP));
    for (Kind kind : {NORM, PROJECT, ATTEND, JOIN_HEADS, ADD, JOIN_ADD, NORM_AGAIN, GATE, JOIN_GATE, ADD_AGAIN,
                      JOIN_AGAIN, NORM_LAST}) {
      if (part == KEYS && kind > PROJECT) break;
      if ((kind == JOIN_HEADS || kind == JOIN_GATE) && gathers == 1) continue;
      if ((kind == JOIN_ADD || kind == JOIN_AGAIN) && !ranks) continue;
      if (kind == NORM && alone) continue;
      if (kind == NORM_AGAIN && alone && !post) continue;
      if (kind == NORM_LAST && !post) continue;
      order[per_layer++] = kind;
    }
    cut_heads();
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
      case NORM: case NORM_AGAIN: case NORM_LAST: return rows;
      case PROJECT: return num_heads();
      case ATTEND: return attention_tasks(m.layers[layer_of(stage)]);
      case GATE: return m.d_ff / LANES;
      case JOIN_HEADS: case JOIN_ADD: case JOIN_GATE: case JOIN_AGAIN: return 1;
      default: return up(m.layers[layer_of(stage)].out.n, LANES) / LANES;
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
      case PROJECT: return project(l, index, alone ? normed_alone(in, l.attention_norm, fresh) : normed, claim);
      case ATTEND: return attention(l, index, claim);
      case ADD:
        return add(l.out, index, OUT, attended, attended_width, in, middle, claim, after(ADD, index, claim));
      case NORM_AGAIN:
        if (post) add_norms(l.attention_post_norm, in, middle, claim.begin, claim.end);
        return norm(middle, l.mlp_norm, claim);
      case GATE: return mlp(l.up, index, mlp_input(l, fresh), claim);
      case JOIN_HEADS: return gather(attended, rows, m.heads * m.head_dim, attended_width);
      case JOIN_GATE: return gather(inner, rows, m.d_ff, ff);
      case JOIN_ADD: return join_added(l.out);
      case JOIN_AGAIN: return join_added(l.down);
      case ADD_AGAIN:
        return add(l.down, index, DOWN, inner, ff, middle, output(index), claim, after(ADD_AGAIN, index, claim));
      case NORM_LAST: return add_norms(l.mlp_post_norm, middle, output(index), claim.begin, claim.end);
    }
  }

  // Where ranks compute different columns of `x`: `count` of each.
  template <class T> void gather(T* x, int64_t n, int64_t count, int64_t stride) {
    if (well && n > 0) well = rank_gather(*ranks, (char*)x, n, count * sizeof(T), stride * sizeof(T));
  }

  // What all ranks add to each row.
  void join_added(const Linear& l) {
    if (gathers > 1) gather(added, rows, l.n, m.d_model);
    else if (well && rows > 0) well = rank_sum(*ranks, added, rows * m.d_model);
  }

  // The weights that a thread reads first in the next stage with a product, after one of this kind.
  Next after(Kind kind, int index, const Claim& c) const {
    if (part == KEYS) return {};
    // A unit is so many blocks.
    auto share = [&](const Linear& l, int64_t units, int64_t step, int64_t blocks, int64_t pair) {
      return next_part(l, part_of(units, step, c.thread, c.width) * blocks,
                       part_of(units, step, c.thread + 1, c.width) * blocks, pair);
    };
    const Layer& l = m.layers[index];
    const int64_t outs = up(l.out.n, LANES) / LANES, inners = m.d_ff / LANES;
    if (kind == PROJECT) return share(l.out, outs, BLOCKS, 1, 0);
    if (kind == ADD) return share(l.up, inners, BLOCKS / 2, 1, inners);
    if (kind == GATE) return share(l.down, outs, BLOCKS, 1, 0);
    if (index + 1 < stop) return share(m.layers[index + 1].qkv, num_heads(), 1, m.head_dim / LANES, 0);
    return {};
  }

  // RMS norm of rows begin .. end - 1, for all threads.
  void norm(const A* x, const float* weight, const Claim& claim) {
    for (int64_t r = claim.begin; r < claim.end; r++)
      rms(x + r * m.d_model, weight, m.d_model, m.eps, normed + r * d, d);
  }

  // Rows begin .. end - 1 of out = residual + the norm of what is added.
  void add_norms(const float* weight, const A* residual, A* out, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      ::add_normed(added + r * m.d_model, weight, m.d_model, m.eps, residual + r * m.d_model, out + r * m.d_model);
  }

  // All rows normed by this thread, for itself.
  const A* normed_alone(const A* x, const float* weight, bool fresh) {
    std::vector<char>& own = t_scratch.normed;
    grow(own, (int64_t)(padded_rows * d * sizeof(A)) + 64);
    A* y = (A*)up((int64_t)own.data(), 64);
    for (int64_t r = 0; r < rows && fresh; r++) rms(x + r * m.d_model, weight, m.d_model, m.eps, y + r * d, d);
    return y;
  }

  // What the MLP reads.
  const A* mlp_input(const Layer& l, bool fresh) {
    return alone && !post ? normed_alone(middle, l.mlp_norm, fresh) : normed;
  }

  // Of all outputs of one Linear, what the adapters need: down(x). Every thread computes it for itself, in `low`: that
  // is a block or two of outputs more, which costs less than a stage.
  void lower(int index, Which which, const A* x, int64_t stride) {
    if (pieces.all.empty()) return;
    grow(t_scratch.low, padded_rows * low_width);
    for (int64_t r0 = 0; r0 < rows; r0 += ROWS)
      for (int64_t i = pieces.first[r0 / ROWS]; i < pieces.first[r0 / ROWS + 1]; i++) {
        const Piece& piece = pieces.all[i];
        const Linear& l = piece.adapter[index * PAIRS + which].down;
        if (!l.weight || (piece.same && in_tiles)) continue;
        if (in_tiles)
          lower_rows(l, Input<A>{x + r0 * stride, stride}, r0, piece.begin, std::min(r0 + ROWS, rows));
        else lower_rows(l, Input<A>{x + piece.begin * stride, stride}, piece.begin, piece.begin, piece.end);
      }
  }

  // Rows r0 .. end - 1 of down(x), of which those from `begin` on are kept, with zeros up to a multiple of K_STEP.
  void lower_rows(const Linear& l, Input<A> in, int64_t r0, int64_t begin, int64_t end) {
    alignas(64) float c[ROWS * BLOCKS * LANES];
    const int64_t total = up(l.n, LANES) / LANES, width = up(l.n, K_STEP);
    for (int64_t b = 0; b < total; b += BLOCKS) {
      const int blocks = (int)std::min<int64_t>(BLOCKS, total - b);
      const int64_t block[BLOCKS] = {b, b + 1, b + 2, b + 3};
      product(l, block, blocks, in, (int)(end - r0), c);
      for (int64_t r = begin; r < end; r++) {
        const float* sum = c + (r - r0) * BLOCKS * LANES;
        for (int64_t i = 0; i < blocks * LANES; i++) put(low(r) + b * LANES + i, sum[i]);
      }
    }
    for (int64_t r = begin; r < end; r++)
      for (int64_t i = total * LANES; i < width; i++) put(low(r) + i, 0.0f);
  }

  A* low(int64_t row) { return (A*)t_scratch.low.data() + row * low_width; }

  // c += up(down(x)) for the rows r0 .. r0 + n - 1 that have adapters; c as `product` left it.
  void adapt(int index, Which which, const int64_t block[], int blocks, int64_t r0, int n, float* c) {
    if (pieces.all.empty()) return;
    alignas(64) float delta[ROWS * BLOCKS * LANES];
    for (int64_t i = pieces.first[r0 / ROWS]; i < pieces.first[r0 / ROWS + 1]; i++) {
      const Piece& piece = pieces.all[i];
      const Linear& l = piece.adapter[index * PAIRS + which].up;
      if (!l.weight) continue;
      const int64_t first = piece.begin - r0, size = BLOCKS * LANES;
      if (!in_tiles)
        product(l, block, blocks, Input<A>{low(piece.begin), low_width}, (int)(piece.end - piece.begin),
                delta + first * size);
      else if (!piece.same) product(l, block, blocks, Input<A>{low(r0), low_width}, n, delta);
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
          const Next next = first + blocks < limit ? next_here(l.qkv, first + blocks, limit, rows) : then;
          product(l.qkv, block, blocks, in.from(r0), n, c, r0 == 0 ? next : Next{});
          adapt(index, QKV, block, blocks, r0, n, c);
          for (int r = 0; r < n; r++) {
            float* y = buffer.data() + r * hd + b * LANES;
            std::memcpy(y, c + r * BLOCKS * LANES, blocks * LANES * sizeof(float));
            finish(l.qkv, first * LANES, blocks * LANES, y);
          }
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
      const int64_t half = m.rotated / 2, at = l.rope * p.num_positions + p.positions[row];
      if (half && l.rope >= 0) rotate(x, p.cos + at * half, p.sin + at * half, m.rotated);
    }
    A* y;
    if (is_query) {
      y = query + (row * m.heads + h) * hd;
    } else {
      const int64_t where = slot(row);
      if (where < 0) return;
      void* const* caches = is_value ? p.v_cache : p.k_cache;
      const int64_t head = h - m.heads - (is_value ? m.kv_heads : 0);
      if (p.packed) return pack_row(x, hd, (int8_t*)caches[index] + head * p.head_stride + where * cache_row(m, p));
      y = (A*)caches[index] + head * p.head_stride + where * hd;
    }
    for (int64_t i = 0; i < hd; i += 16) put16(y + i, load(x + i));
  }

  // Attention's tasks: some rows of a segment under query heads that share keys and values, which are read once for all
  // of them. Where such groups are too few for all threads, they are cut where a thread's part of the heads ends.
  int64_t most_vectors() const { return on_pairs<A>(m) ? TILE_ROWS : VECTORS; }
  void cut_heads() {
    const int64_t most = most_vectors(), groups = m.heads / m.kv_heads;
    int64_t tasks = 0;
    for (int64_t s = 0; s < p.num_segments; s++)
      tasks += std::max<int64_t>(1, (p.segments[s].stop - p.segments[s].start) * groups / most) * m.kv_heads;
    const bool many = tasks >= 4 * width;
    heads.clear(), widest = 0;
    for (int64_t h = 0, part = 1; h < m.heads;) {
      heads.push_back((int32_t)h);
      int64_t end = std::min({h / groups * groups + groups, h + most, m.heads});
      for (; !many && part < width; part++) {
        const int64_t limit = part_of(m.heads, 1, part, width);
        if (limit > h) { end = std::min(end, limit); break; }
      }
      widest = std::max(widest, end - h), h = end;
    }
    heads.push_back((int32_t)m.heads);
  }
  // Rows that one task has: those that share most of their keys.
  int64_t task_rows(const Layer& l, const Segment& s) const {
    return l.window > 0 && s.num_keys > l.window ? 1 : std::max<int64_t>(1, most_vectors() / widest);
  }
  int64_t segment_chunks(const Layer& l, int64_t s) const {
    const int64_t wide_as = task_rows(l, p.segments[s]);
    return (p.segments[s].stop - p.segments[s].start + wide_as - 1) / wide_as;
  }
  int64_t segment_tasks(const Layer& l, int64_t s) const { return segment_chunks(l, s) * ((int64_t)heads.size() - 1); }
  int64_t attention_tasks(const Layer& l) const {
    int64_t all = 0;
    for (int64_t s = 0; s < p.num_segments; s++) all += segment_tasks(l, s);
    return all;
  }

  void attention(const Layer& l, int index, const Claim& claim) {
    if (claim.fresh) t_unpacked.of = nullptr;
    int64_t task = claim.begin, first = 0;
    for (int64_t s = 0; s < p.num_segments && task < claim.end; s++) {
      const Segment& seg = p.segments[s];
      const int64_t wide_as = task_rows(l, seg), chunks = segment_chunks(l, s), last = first + segment_tasks(l, s);
      for (; task < std::min(last, claim.end); task++) {
        const int64_t pack = (task - first) / chunks, r0 = (task - first) % chunks * wide_as, h = heads[pack];
        if (task + 1 < claim.limit) fetch_first(task + 1 < last || s + 1 == p.num_segments ? seg : p.segments[s + 1],
                                                task + 1 < last ? heads[(task + 1 - first) / chunks] : 0, index);
        attend_rows(seg, l.window, index, h, (int)(heads[pack + 1] - h), r0,
                    (int)std::min<int64_t>(wide_as, seg.stop - seg.start - r0));
      }
      first = last;
    }
  }

  // Asks for what a head's attention reads first.
  void fetch_first(const Segment& s, int64_t h, int index) const {
    if (p.packed) return;
    const A* keys = (const A*)p.k_cache[index] + h / (m.heads / m.kv_heads) * p.head_stride;
    fetch(s, 0, std::min(AHEAD, s.prefix), keys, m.head_dim);
  }

  // Rows r0 .. r0 + rows - 1 of a segment under `count` query heads from h on.
  void attend_rows(const Segment& s, int64_t window, int index, int64_t h, int count, int64_t r0, int rows) {
    const int64_t hd = m.head_dim, cache = h / (m.heads / m.kv_heads) * p.head_stride;
    Queries<A> q;
    q.r0 = r0, q.rows = rows, q.heads = count;
    for (int i = 0; i < q.count(); i++) {
      const int64_t row = s.start + r0 + i / count, head = h + i % count;
      q.query[i] = query + (row * m.heads + head) * hd, q.out[i] = attended_of(row, head);
    }
    const void *keys = p.k_cache[index], *values = p.v_cache[index];
    if (!p.packed) return attend_one(s, window, q, (const A*)keys + cache, (const A*)values + cache);
    // No row of the segment sees what lies a window before its first.
    const int64_t begin = window > 0 ? std::max<int64_t>(0, p.positions[s.start] - window + 1) : 0;
    A *k, *v;
    t_unpacked.fill(s, std::min(begin, s.prefix), hd, (const int8_t*)keys + cache, (const int8_t*)values + cache, k, v);
    attend_one(t_unpacked.segment, window, q, k, v);
  }

  A* attended_of(int64_t row, int64_t head) {
    return attended + row * attended_width + (own * m.heads + head) * m.head_dim;
  }

  void attend_one(const Segment& s, int64_t window, const Queries<A>& q, const A* k, const A* v) {
    if constexpr (std::is_same_v<A, bf16>) {
#if PL_AMX
      if (on_tiles<A>(m)) return attend_tiles(m, s, window, p.positions, q, k, v);
#endif
#if PL_DOT_BF16
      if (on_pairs<A>(m)) return attend_pairs(m, s, window, p.positions, q, k, v);
#endif
    }
    attend<A>(m, s, window, p.positions, q, k, v);
  }

  // out = residual + x W^T, rounded once; x W^T alone, to `added`, where a norm follows.
  void add(const Linear& l, int index, Which which, const A* x, int64_t stride, const A* residual, A* out,
           const Claim& claim, const Next& then) {
    const int64_t outs = m.d_model, column = own * l.n;
    if (claim.fresh) lower(index, which, x, stride);
    sweep(l, claim, input_of(l, x, stride, rows, claim.fresh), rows, then,
          [&](int64_t r0, int n, int64_t first, int64_t outputs, float* c) {
            const int64_t b = first / LANES, block[BLOCKS] = {b, b + 1, b + 2, b + 3};
            adapt(index, which, block, (int)(up(outputs, LANES) / LANES), r0, n, c);
            for (int r = 0; r < n; r++, c += BLOCKS * LANES) {
              const int64_t at = (r0 + r) * outs + first;
              finish(l, first, outputs, c);
              if (post) std::memcpy(added + at + column, c, outputs * sizeof(float));
              else add_row(c, residual + at, outputs, out + at);
            }
          });
  }

  // activation(gate) * up, two blocks of each at a time.
  void mlp(const Linear& l, int index, const A* x, const Claim& claim) {
    const int64_t total = m.d_ff / LANES, half = BLOCKS / 2;
    if (claim.fresh) lower(index, UP, x, d);
    const Input<A> in = input_of(l, x, d, rows, claim.fresh);
    const Next then = after(GATE, index, claim);
    alignas(64) float c[ROWS * BLOCKS * LANES];
    if (claim.begin == 0 && ff != gathers * m.d_ff)
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = gathers * m.d_ff; i < ff; i++) put(inner + r * ff + i, 0.0f);
    for (int64_t b = claim.begin; b < claim.end; b += half) {
      const int n = (int)std::min<int64_t>(half, claim.end - b);
      const Next next = b + n < claim.limit ? next_here(l, b + n, claim.limit, rows, total) : then;
      int64_t block[BLOCKS] = {};
      for (int i = 0; i < n; i++) block[i] = b + i, block[n + i] = total + b + i;
      for (int64_t r0 = 0; r0 < rows; r0 += ROWS) {
        const int chunk = (int)std::min<int64_t>(ROWS, rows - r0);
        product(l, block, 2 * n, in.from(r0), chunk, c, r0 == 0 ? next : Next{});
        adapt(index, UP, block, 2 * n, r0, chunk, c);
        for (int r = 0; r < chunk; r++) activate(l, b, n, c + r * BLOCKS * LANES, inner + (r0 + r) * ff + own * m.d_ff + b * LANES);
      }
    }
  }

  void activate(const Linear& l, int64_t b, int n, float* c, A* y) {
    finish(l, b * LANES, n * LANES, c);
    finish(l, m.d_ff + b * LANES, n * LANES, c + n * LANES);
    for (int i = 0; i < n; i++) {
      const v16 gate = load(c + i * LANES), value = load(c + (n + i) * LANES);
      put16(y + i * LANES, activated(gate, m.activation) * value);
    }
  }
};

}  // namespace
