// Drafts with feedback memory (SPIRe).

#pragma once

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
  if (c.steps < 1 || c.steps > r.span - r.window + 1)
    return BAD_COUNT;  // what is drafted takes no slot that a row sees
  if (c.position < 0 || c.position > INT32_MAX || (m.rotated && c.position + c.steps > p.num_positions))
    return BAD_POSITION;
  if (c.start < 0 || c.start > c.position) return BAD_POSITION;
  if (feedback && (c.position == 0 || (r.sinks == 0 && c.start == c.position))) return BAD_POSITION;  // nothing is seen
  if (c.token < 0 || c.token >= m.vocab) return BAD_TOKEN;
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
  const int64_t bytes = m->d_model * (m->wide_activations ? 4 : 2), each = p->rows * bytes;
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

// SPIRe's drafts: chains of several sequences at once whose rows see K and V in rings, a token a pass. With `mix`
// [layers, layers + 1] they see memory of strictly earlier tokens, and a row's own is made of what its layers gave
// and kept for the rows behind it; without it they see the layers' own K and V, theirs among them. All numbers come in
// one list:
//     sequences, sinks, window, slots of a ring beside the sinks
//     for each: root, its position, steps, ring, first position beside the sinks that has K and V, address of the rules
//         (0: none)
// A chain ends once its cumulative log-probability is below `floor`. What comes out, for each: tokens made, then the
// tokens, as many as there are steps; `log_q` likewise without the number. `p` as for `pl_roll`. Returns a `Refusal`.
// Source: SPIRe, 3.3.
int pl_recall(const Model* m, const Pass* p, const void* embedding, int64_t limit, const int64_t* list,
              const float* mix, double floor, int64_t* out, float* log_q) {
  constexpr int64_t NUMBERS = 6;
  const int64_t count = list[0], layers = p->layers, d = m->d_model;
  const Ring ring{list[1], list[2], list[3]};
  if (count < 0 || p->threads < 1 || limit < 1 || limit > m->vocab) return BAD_COUNT;
  if (ring.sinks < 0 || ring.sinks > INT32_MAX || ring.window < 1 || ring.window > ring.span || ring.span > INT32_MAX)
    return BAD_COUNT;
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
      std::memcpy(states.data() + r * bytes, (const char*)embedding + (c.made() ? c.out[c.made()] : c.token) * bytes,
                  bytes);
    }
    Pass pass = *p;
    pass.rows = rows, pass.hidden_in = states.data(), pass.hidden_out = states.data() + rows * bytes;
    pass.positions = positions.data(), pass.slots = slots.data(), pass.segments = segments.data(),
    pass.num_segments = rows;
    run_layers(*m, pass, 0, (int)layers, mix ? QUERIES : WHOLE, apart);
    grow(t_logits, rows * m->vocab);
    head(*m, states.data() + layers * rows * bytes, rows, t_logits.data(), (int)p->threads);
    Guess guess{};
    guess.logits = t_logits.data(), guess.n = m->vocab, guess.limit = limit;
    for (const Recalling* c : live)
      guess.rows.push_back({c->rules, c->here() + 1, c->out + 1 + c->made(), c->log_q + c->made()});
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

}  // extern "C"
