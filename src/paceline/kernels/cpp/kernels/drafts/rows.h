// The rows of a draft's pass: embedded, sent through the layers, and a choice behind each sequence's last one.

#pragma once

namespace {

// Where a sequence's token goes: from slot `base` on, or into slots that are listed.
inline int64_t slot_at(int64_t base, const int64_t* keys, int64_t place) {
  return base >= 0 ? base + place : keys[place];
}

struct DraftRows {
  const Model& m;
  const Pass& p;  // rotation table, caches and threads
  const Linear& words;  // the embedding
  const int64_t bytes;  // of a state
  std::vector<char> hidden;
  std::vector<int64_t> positions, slots;
  std::vector<Segment> segments;

  // Room for `most` rows.
  DraftRows(const Model& model, const Pass& pass, const Linear& table, int64_t most)
      : m(model), p(pass), words(table), bytes(state_bytes(m)), hidden(most * bytes) {}

  int64_t count() const { return positions.size(); }
  char* state(int64_t row) { return hidden.data() + row * bytes; }
  void clear() { positions.clear(), slots.clear(), segments.clear(); }
  void add(int64_t position, int64_t slot) { positions.push_back(position), slots.push_back(slot); }

  // The row of a token, which its embedding goes into.
  void embed(int64_t token, int64_t position, int64_t slot) {
    ::embed(m, words, token, state(count()));
    add(position, slot);
  }

  // The pass of these rows, from `hidden` to `hidden`.
  Pass pass() {
    Pass made = p;
    made.rows = count(), made.hidden_in = made.hidden_out = hidden.data();
    made.positions = positions.data(), made.slots = slots.data();
    made.segments = segments.data(), made.num_segments = segments.size();
    return made;
  }
  void run() { run_layers(m, pass(), 0, (int)p.layers); }

  // The state behind the last row of segment i becomes row i.
  void keep_last() {
    for (size_t i = 0; i < segments.size(); i++) std::memmove(state(i), state(segments[i].stop - 1), bytes);
  }
};

// A draft's next token after a state: where it goes, and by which rules it is chosen.
struct Choice {
  const Rules* rules;
  int64_t position;
  int64_t* token;
  float* log_q;
};

// Chooses a token below `limit` after each of some states: head, and guesses.
void choose(const Model& m, const void* states, int64_t limit, const std::vector<Choice>& choices, int64_t threads) {
  const int64_t rows = choices.size();
  grow(t_logits, rows * m.vocab);
  const float* logits = t_logits.data();  // this thread's
  head(m, states, rows, t_logits.data(), (int)threads);
  for_rows(rows, m.vocab, threads, [&](int64_t i) {
    const Choice& c = choices[i];
    guess(m, logits + i * m.vocab, limit, c.rules, c.position, c.token, c.log_q);
  });
}

}  // namespace
