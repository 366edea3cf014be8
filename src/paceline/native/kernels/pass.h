// A whole pass, from token ids to choices.

#pragma once

namespace {

// A pass from token ids on, as the caller asks for it. All numbers come in one list, so that he makes one:
//     rows, segments, wanted, slot_base (-1: slots are listed)
//     for each segment: start, stop, prefix, base (-1: keys are listed), address of the keys, drafted nodes in a tree
//         (-1: a chain)
//     tokens [rows], positions [rows], slots [rows] where they are listed, rows that are wanted (ascending)
//     for each segment with a tree: the parents of its drafted nodes, which are its last rows; the row before them is
//         the root, 0
struct Asked {
  Pass pass;
  int64_t num_wanted = 0;
  const int64_t *of_segment = nullptr, *tokens = nullptr, *wanted = nullptr;
  const int64_t* end = nullptr;  // behind the list
  std::vector<Segment> segments;
  std::vector<const int64_t*> parents;  // of each segment's drafted nodes; null: a chain
  std::vector<uint8_t> masks;
  std::vector<char> states;  // [rows, d_model]
  std::vector<int64_t> sequence, places;  // of each wanted row: its segment, and the position of the token behind it

  // What is asked, checked; nothing is computed yet.
  Refusal read(const Model& m, const Pass& p, const int64_t* list) {
    const int64_t rows = list[0], count = list[1], slot_base = list[3];
    num_wanted = list[2], of_segment = list + 4, tokens = of_segment + 6 * count;
    const int64_t *positions = tokens + rows, *slots = positions + rows;
    wanted = slots + (slot_base < 0 ? rows : 0), end = wanted + num_wanted;
    segments.clear(), parents.clear();
    int64_t bytes_of_masks = 0;
    for (const int64_t* s = of_segment; s < tokens; s += 6) {
      const int64_t start = s[0], stop = s[1], prefix = s[2], drafted = s[5];
      segments.push_back({start, stop, prefix, prefix + stop - start, s[3], (const int64_t*)s[4], nullptr, nullptr});
      parents.push_back(drafted < 0 ? nullptr : end);
      if (drafted < 0) continue;
      if (start < 0 || stop > rows || drafted >= stop - start) return BAD_SEGMENT;
      for (int64_t n = 0; n < drafted; n++)
        if (end[n] < 0 || end[n] > n) return BAD_SEGMENT;
      end += drafted, bytes_of_masks += (stop - start) * (stop - start);
    }
    pass = p;
    pass.rows = rows, pass.positions = positions, pass.slots = slot_base < 0 ? slots : nullptr,
    pass.slot_base = slot_base;
    pass.segments = segments.data(), pass.num_segments = count;
    if (rows < 1 || !all_within(wanted, num_wanted, 0, rows)) return BAD_COUNT;
    for (int64_t i = 1; i < num_wanted; i++)
      if (wanted[i] <= wanted[i - 1]) return BAD_COUNT;  // ascending, so that states can move up in place
    if (!all_within(tokens, rows, 0, m.vocab)) return BAD_TOKEN;
    masks.assign(bytes_of_masks, 0);
    return check_pass(m, pass, 0, (int)p.layers);
  }

  static int64_t row_bytes(const Model& m) { return m.d_model * (m.wide_activations ? 4 : 2); }

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
    const int64_t bytes = row_bytes(m);
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
  void begin(const Model& m, const void* embedding) {
    uint8_t* mask = masks.data();
    for (size_t i = 0; i < segments.size(); i++) {
      if (!parents[i]) continue;
      Segment& s = segments[i];
      const int64_t width = s.stop - s.start, root = width - 1 - of_segment[6 * i + 5];
      for (int64_t r = 0; r < width; r++) {
        if (r <= root) std::memset(mask + r * width, 1, r);
        else std::memcpy(mask + r * width, mask + (root + parents[i][r - root - 1]) * width, width);
        mask[r * width + r] = 1;
      }
      s.visible = mask, s.block_positions = pass.positions + s.start;
      mask += width * width;
    }
    const int64_t bytes = row_bytes(m);
    grow(states, pass.rows * bytes);
    for (int64_t r = 0; r < pass.rows; r++)
      std::memcpy(states.data() + r * bytes, (const char*)embedding + tokens[r] * bytes, bytes);
    pass.hidden_in = pass.hidden_out = states.data();
  }

  // Logits of the wanted rows and of `more` behind all others, where they are to go or in `t_logits`.
  float* head(const Model& m, int64_t more, float* logits) {
    const int64_t bytes = row_bytes(m);
    for (int64_t i = 0; i < num_wanted; i++)
      if (wanted[i] != i) std::memmove(states.data() + i * bytes, states.data() + wanted[i] * bytes, bytes);
    if (more && num_wanted != pass.rows)
      std::memmove(states.data() + num_wanted * bytes, states.data() + pass.rows * bytes, more * bytes);
    if (!logits) grow(t_logits, (num_wanted + more) * m.vocab), logits = t_logits.data();
    if (num_wanted + more) ::head(m, states.data(), num_wanted + more, logits, (int)pass.threads);
    return logits;
  }

  // The token after each wanted row, by the rules of its segment; the likeliest where there are none.
  void choose(const Model& m, const float* logits, const Rules* rules, int64_t* chosen) {
    if (!rules)
      for (int64_t i = 0; i < num_wanted; i++) chosen[i] = likeliest(logits + i * m.vocab, m.vocab);
    if (!rules || num_wanted == 0) return;
    sequence.clear(), places.clear();
    for (int64_t i = 0, s = 0; i < num_wanted; i++) {
      while (wanted[i] >= segments[s].stop) s++;
      sequence.push_back(s), places.push_back(pass.positions[wanted[i]] + 1);
    }
    Draw draw(logits, num_wanted, m.vocab, rules, sequence.data(), places.data(), chosen);
    team().run(std::clamp<int64_t>(num_wanted * m.vocab / DRAWS, 1, pass.threads), draw);
  }
};
thread_local Asked t_asked;

}  // namespace

extern "C" {

// One whole pass: tokens become states, go through all layers, and after each row that is wanted a token is chosen: by
// `rules`, which has an entry a segment, with -1 where a choice cannot be made here; else the likeliest. `list` is as
// `Asked` says; `p` carries the rotation table, caches, threads and adapters; logits [wanted, vocab] is filled unless
// it is null; `taps` may be null. Returns a `Refusal`.
int pl_choose(const Model* m, const Pass* p, const void* embedding, const int64_t* list, const Rules* rules,
              float* logits, int64_t* chosen, Taps* taps) {
  Asked& a = t_asked;
  Refusal found = a.read(*m, *p, list);
  if (found == DONE && taps) found = a.check(*taps);
  if (found != DONE) return found;
  a.begin(*m, embedding);
  a.run(*m, a.pass, 0, (int)p->layers, taps);
  a.choose(*m, a.head(*m, 0, logits), rules, chosen);
  return DONE;
}

}  // extern "C"
