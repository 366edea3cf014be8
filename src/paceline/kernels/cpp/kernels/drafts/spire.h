// Drafts with feedback memory (SPIRe).

#pragma once

namespace {

// Where K and V of a text's positions lie in a ring, and which of them a row sees: kv/ring.py.
inline int64_t ring_slot(const RingShape& r, int64_t ring, int64_t position) {
  return ring * (r.sinks + r.span) + (position < r.sinks ? position : r.sinks + (position - r.sinks) % r.span);
}

// The slots of the sinks and the window in front of position `stop`, those from position `start` on; their number.
inline int64_t ring_seen(const RingShape& r, int64_t ring, int64_t start, int64_t stop, int64_t* slots) {
  const int64_t first = std::min(r.sinks, stop);
  int64_t n = 0;
  for (int64_t j = 0; j < first; j++) slots[n++] = ring_slot(r, ring, j);
  for (int64_t j = std::max({first, start, stop - r.window}); j < stop; j++) slots[n++] = ring_slot(r, ring, j);
  return n;
}

Refusal check_ring_chain(const Model& m, const Pass& p, const RingShape& r, const RingChain& c) {
  const int64_t slots = cache_slots(m, p);
  if (c.steps < 1 || c.steps > r.span - r.window + 1) return BAD_COUNT;  // drafts take no slot that a row sees
  if (c.position < 0 || c.position > INT32_MAX || (m.rotated && c.position + c.steps > p.num_positions))
    return BAD_POSITION;
  if (c.start < 0 || c.start > c.position) return BAD_POSITION;
  if (c.position == 0 || (r.sinks == 0 && c.start == c.position)) return BAD_POSITION;  // nothing is seen
  if (c.root < 0 || c.root >= m.tokens) return BAD_TOKEN;
  return c.ring >= 0 && c.ring < slots / (r.sinks + r.span) ? DONE : BAD_SLOT;
}

// m^i = sum over l of mix[i][l] x^l, of one row: states [layers + 1] and memory [layers], `apart` and `between`
// elements apart.
template <class A> void mix_states(const float* mix, int64_t layers, int64_t d, const A* states, int64_t apart,
                                   A* memory, int64_t between) {
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

// K and V of states as each layer would compute them of its rows: row r's lies in row which[r] of states[layer] [most,
// d_model]. `p` carries rows, positions, slots, rotation table, caches and threads. Returns a `Refusal`.
int pl_keys(const Model* m, const Pass* p, const char* const* states, int64_t most, const int64_t* which) {
  const Refusal found = check_rows(*m, *p);
  if (found != DONE || p->rows == 0) return found;
  const int64_t bytes = state_bytes(*m), each = p->rows * bytes;
  static thread_local std::vector<char> picked;
  grow(picked, p->layers * each);
  for (int64_t l = 0; l < p->layers; l++)
    if (const int refused = pl_pick_rows(states[l], most, bytes, which, p->rows, picked.data() + l * each))
      return refused;
  Pass pass = *p;
  pass.hidden_in = picked.data();
  run_layers(*m, pass, 0, (int)p->layers, KEYS, p->rows * m->d_model);
  return DONE;
}

// SPIRe's drafts: chains of several sequences at once whose rows see K and V in rings, a token a pass. They
// see memory of strictly earlier tokens; a row's own is made by `mix` [layers, layers + 1] of what its layers gave, and
// kept for the rows after it. A chain ends once its cumulative log-probability is below `floor`. `p` as for `pl_roll`. Returns a `Refusal`. Source: SPIRe, 3.3.
int pl_recall(const Model* m, const Pass* p, const Linear* words, int64_t limit, const RingShape* shape,
              RingChain* chains, int64_t count, const float* mix, double floor) {
  const int64_t layers = p->layers, d = m->d_model;
  const RingShape& ring = *shape;
  if (count < 0 || p->threads < 1 || limit < 1 || limit > m->vocab) return BAD_COUNT;
  if (ring.sinks < 0 || ring.sinks > INT32_MAX || ring.window < 1 || ring.window > ring.span || ring.span > INT32_MAX)
    return BAD_COUNT;
  int64_t last = 0;
  for (int64_t i = 0; i < count; i++) {
    const Refusal refusal = check_ring_chain(*m, *p, ring, chains[i]);
    if (refusal != DONE) return refusal;
    last = std::max(last, chains[i].position + chains[i].steps);
  }
  const int64_t most = std::min(ring.sinks + ring.window, last);
  DraftRows rows(*m, *p, *words, (layers + 1) * count);  // a row's states lie behind each layer
  const int64_t bytes = rows.bytes;
  std::vector<char> memory(layers * count * bytes);
  std::vector<int64_t> keys(count * most);
  std::vector<double> score(count, 0.0);
  std::vector<Choice> choices;
  std::vector<int64_t> live(count);
  std::iota(live.begin(), live.end(), 0);
  for (int64_t i = 0; i < count; i++) chains[i].made = 0;
  while (!live.empty()) {
    const int64_t num_rows = live.size(), apart = num_rows * d;
    rows.clear(), choices.clear();
    for (int64_t r = 0; r < num_rows; r++) {
      const RingChain& c = chains[live[r]];
      const int64_t here = c.position + c.made;
      int64_t* seen = keys.data() + r * most;
      const int64_t n = ring_seen(ring, c.ring, c.start, here, seen);
      rows.segments.push_back(segment_at(r, r + 1, n, n, -1, seen));
      rows.embed(c.made ? c.tokens[c.made - 1] : c.root, here, -1);
      choices.push_back({c.rules, here + 1, c.tokens + c.made, c.log_q + c.made});
    }
    Pass pass = rows.pass();
    pass.hidden_out = rows.state(num_rows);
    run_layers(*m, pass, 0, (int)layers, QUERIES, apart);
    choose(*m, rows.state(layers * num_rows), limit, choices, p->threads);
    std::vector<int64_t> next, from;
    for (int64_t r = 0; r < num_rows; r++) {
      RingChain& c = chains[live[r]];
      score[live[r]] += (double)c.log_q[c.made++];
      if (c.made < c.steps && score[live[r]] >= floor) next.push_back(live[r]), from.push_back(r);
    }
    live = std::move(next);
    if (live.empty()) continue;
    const int64_t kept = live.size();
    rows.clear();
    for (int64_t k = 0; k < kept; k++) {
      const RingChain& c = chains[live[k]];
      rows.add(c.position + c.made - 1, ring_slot(ring, c.ring, c.position + c.made - 1));
      const char* state = rows.state(from[k]);
      char* own = memory.data() + k * bytes;
      if (m->wide_activations) mix_states(mix, layers, d, (const float*)state, apart, (float*)own, kept * d);
      else mix_states(mix, layers, d, (const bf16*)state, apart, (bf16*)own, kept * d);
    }
    pass = rows.pass();
    pass.hidden_in = memory.data();
    run_layers(*m, pass, 0, (int)layers, KEYS, kept * d);
  }
  return DONE;
}

}  // extern "C"
