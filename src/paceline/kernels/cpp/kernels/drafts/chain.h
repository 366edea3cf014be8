// Draft chains, a token a pass.

#pragma once

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
  return segment_at(row, row + 1, keys - 1, keys, -1, slots);
}

}  // namespace

extern "C" {

// Drafts chains of several sequences at once. `p` carries the rotation table, caches and threads; the embedding has
// `vocab` rows, as the head does. Returns a `Refusal`.
int pl_roll(const Model* m, const Pass* p, const Linear* words, int64_t limit, Chain* chains, int64_t count) {
  const Refusal refusal = check_chains(*m, *p, limit, chains, count);
  if (refusal != DONE) return refusal;
  int64_t most = count, seen = 0;  // seen: keys of the largest view that leaves any out
  for (int64_t i = 0; i < count; i++) {
    chains[i].made = 0, most += chains[i].num_pending;
    if (const SparseView* view = chains[i].view)
      seen = std::max(seen, std::min(view->sinks + view->window, cache_slots(*m, *p)));
  }
  DraftRows rows(*m, *p, *words, most);
  std::vector<int64_t> live, view_slots(count * seen);
  std::vector<float> score(count, 0.0f);
  std::vector<Choice> choices;
  while (true) {
    rows.clear(), live.clear(), choices.clear();
    for (int64_t i = 0; i < count; i++) {
      const Chain& c = chains[i];
      if (c.made >= c.steps || (c.made && score[i] < c.floor)) continue;
      const int64_t n = c.made ? 1 : c.num_pending, start = rows.count();
      const int64_t at = c.made ? c.position + c.num_pending + c.made - 1 : c.position;
      const bool partly = c.view && at + 1 > c.view->sinks + c.view->window;
      rows.segments.push_back(partly ? viewed(*m, *p, c, at, start, view_slots.data() + i * seen)
                                     : segment_at(start, start + n, at, at + n, c.base, c.keys));
      for (int64_t j = 0; j < n; j++)
        rows.embed(c.made ? c.tokens[c.made - 1] : c.pending[j], at + j, slot_at(c.base, c.keys, at + j));
      live.push_back(i);
      choices.push_back({c.rules, c.position + c.num_pending + c.made, c.tokens + c.made, c.log_q + c.made});
    }
    if (live.empty()) return DONE;
    rows.run();
    rows.keep_last();
    choose(*m, rows.hidden.data(), limit, choices, p->threads);
    for (int64_t i : live) score[i] += chains[i].log_q[chains[i].made++];
  }
}

}  // extern "C"
