// A whole pass, from token ids to choices.

#pragma once

namespace {

// A `TokenPass` while it runs.
struct WholePass {
  Pass pass;
  const TokenPass* given = nullptr;
  std::vector<Segment> segments;
  std::vector<uint8_t> masks;
  std::vector<char> states;  // [rows, d_model]
  std::vector<int64_t> sequence, places;  // of each wanted row: its segment, and the position of the token behind it

  // What is given, checked; nothing is computed yet.
  Refusal read(const Model& m, const Pass& p, const TokenPass& t) {
    given = &t;
    segments.clear();
    int64_t bytes_of_masks = 0;
    for (const Span *s = t.spans, *end = s + t.num_spans; s < end; s++) {
      const int64_t width = s->stop - s->start;
      segments.push_back(segment_at(s->start, s->stop, s->prefix, s->prefix + width, s->base, s->keys));
      if (s->drafted < 0) continue;
      if (s->start < 0 || s->stop > t.rows || s->drafted >= width) return BAD_SEGMENT;
      for (int64_t n = 0; n < s->drafted; n++)
        if (s->parents[n] < 0 || s->parents[n] > n) return BAD_SEGMENT;
      bytes_of_masks += width * width;
    }
    pass = p;
    pass.rows = t.rows, pass.positions = t.positions, pass.slots = t.slots, pass.slot_base = t.slot_base;
    pass.segments = segments.data(), pass.num_segments = t.num_spans;
    if (t.rows < 1 || !all_within(t.wanted, t.num_wanted, 0, t.rows)) return BAD_COUNT;
    for (int64_t i = 1; i < t.num_wanted; i++)
      if (t.wanted[i] <= t.wanted[i - 1]) return BAD_COUNT;  // ascending, so that states can move up in place
    if (!all_within(t.tokens, t.rows, 0, m.tokens)) return BAD_TOKEN;
    masks.assign(bytes_of_masks, 0);
    return check_pass(m, pass, 0, (int)p.layers);
  }

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
    const int64_t bytes = state_bytes(m);
    char* out = (char*)taps.out + t * taps.rows * bytes;
    if (!taps.which) std::memcpy(out, states.data(), taps.rows * bytes);
    for (int64_t r = 0; taps.which && r < taps.rows; r++)
      std::memcpy(out + r * bytes, states.data() + taps.which[r] * bytes, bytes);
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
  void begin(const Model& m, const Linear& words) {
    uint8_t* mask = masks.data();
    for (size_t i = 0; i < segments.size(); i++) {
      const Span& span = given->spans[i];
      if (span.drafted < 0) continue;
      Segment& s = segments[i];
      const int64_t width = s.stop - s.start, root = width - 1 - span.drafted;
      for (int64_t r = 0; r < width; r++) {
        if (r <= root) std::memset(mask + r * width, 1, r);
        else std::memcpy(mask + r * width, mask + (root + span.parents[r - root - 1]) * width, width);
        mask[r * width + r] = 1;
      }
      s.visible = mask, s.block_positions = pass.positions + s.start;
      mask += width * width;
    }
    const int64_t bytes = state_bytes(m);
    grow(states, pass.rows * bytes);
    for (int64_t r = 0; r < pass.rows; r++)
      embed(m, words, given->tokens[r], states.data() + r * bytes);
    pass.hidden_in = pass.hidden_out = states.data();
  }

  // Logits of the wanted rows and of `more` behind all others, where they are to go or in `t_logits`.
  float* head(const Model& m, int64_t more) {
    const int64_t bytes = state_bytes(m), num_wanted = given->num_wanted, *wanted = given->wanted;
    float* logits = given->logits;
    for (int64_t i = 0; i < num_wanted; i++)
      if (wanted[i] != i) std::memmove(states.data() + i * bytes, states.data() + wanted[i] * bytes, bytes);
    if (more && num_wanted != pass.rows)
      std::memmove(states.data() + num_wanted * bytes, states.data() + pass.rows * bytes, more * bytes);
    if (!logits) grow(t_logits, (num_wanted + more) * m.vocab), logits = t_logits.data();
    if (num_wanted + more) ::head(m, states.data(), num_wanted + more, logits, (int)pass.threads);
    return logits;
  }

  // The token after each wanted row, by the rules of its segment; the likeliest where there are none.
  void choose(const Model& m, const float* logits) {
    const TokenPass& t = *given;
    if (!t.rules) {
      for_rows(t.num_wanted, m.vocab, pass.threads,
               [&](int64_t i) { t.chosen[i] = likeliest(logits + i * m.vocab, m.vocab); });
      return;
    }
    sequence.clear(), places.clear();
    for (int64_t i = 0, s = 0; i < t.num_wanted; i++) {
      while (t.wanted[i] >= segments[s].stop) s++;
      sequence.push_back(s), places.push_back(pass.positions[t.wanted[i]] + 1);
    }
    for_rows(t.num_wanted, m.vocab, pass.threads, [&](int64_t i) {
      const uint32_t* mask = t.masks ? t.masks + i * ((m.vocab + 31) / 32) : nullptr;
      t.chosen[i] = drawn(logits + i * m.vocab, m.vocab, t.rules[sequence[i]], places[i], mask);
    });
  }
};
thread_local WholePass t_whole;

}  // namespace

extern "C" {

// One whole pass: tokens become states, go through all layers, and after each row that is wanted a token is chosen. `p`
// carries the rotation table, caches, threads and adapters; `taps` may be null. Returns a `Refusal`.
int pl_choose(const Model* m, const Pass* p, const Linear* words, const TokenPass* given, Taps* taps) {
  WholePass& a = t_whole;
  Refusal found = a.read(*m, *p, *given);
  if (found == DONE && taps) found = a.check(*taps);
  if (found != DONE) return found;
  a.begin(*m, *words);
  a.run(*m, a.pass, 0, (int)p->layers, taps);
  a.choose(*m, a.head(*m, 0));
  return DONE;
}

}  // extern "C"
