#pragma once

namespace {

// Speculative streams beside the main rows of `Asked` (Speculative Streaming, section 2.1), or after them.
struct Fused {
  struct Rider { int64_t node, row; };  // a node whose streams go with the main rows; row of the first of them
  struct Carrier {                // a sequence whose next draft is read from streams
    int64_t segment, root;        // root: its row
    int64_t streams;              // that are wanted, the first ones
    int64_t most;                 // accepted nodes behind which a draft is of use
    int64_t riders, num_riders;   // the first of them
    const int64_t* ends;          // tokens that end the answer
    int64_t num_ends;
    int64_t path, length;         // its accepted nodes, once they are known
    int64_t frontier(const std::vector<int64_t>& paths) const { return length ? paths[path + length - 1] : 0; }
  };

  int64_t k = 0, scratch = 0, room = 0;  // slots of the streams' K and V: the first one, and how many
  bool noisy = false;  // whether drafts are drawn with the noise of the target's own choices
  int64_t most = 0;    // keys of its main row that a stream attends to; 0: all
  const Rules* rules = nullptr;  // by segment
  std::vector<Carrier> carriers;
  std::vector<Rider> riders;
  std::vector<int64_t> paths, positions, slots, keys, places, late;
  std::vector<uint8_t> masks;
  std::vector<Segment> segments;
  std::vector<AdapterRange> adapters;
  std::vector<Limit> limits;
  std::vector<char> tap, begun;  // main rows before the streams' first layer; streams that run afterwards

  // Behind `Asked`'s numbers:
  //     carriers, k, first scratch slot, scratch slots, 1 where drafts are drawn with the target's noise, keys of its
  //         main row that a stream attends to (0: all; else every node carries streams)
  //     for each carrier: segment, root row, streams, most, ends, riders; the tokens of the ends; the riders, ascending
  Refusal read(const Model& m, const Asked& a, const StreamSet& set) {
    const int64_t* at = a.end;
    const int64_t count = at[0];
    k = at[1], scratch = at[2], room = at[3], noisy = at[4] != 0, most = at[5], at += 6;
    carriers.clear(), riders.clear();
    if (count < 0 || k < 1 || k > m.vocab || most < 0 || set.gamma < 1 || set.insertion < 1 ||
        set.insertion >= a.pass.layers)
      return BAD_COUNT;
    int64_t rows = 0, later = 0, last = -1;
    for (int64_t i = 0; i < count; i++) {
      const int64_t streams = at[2], num_ends = at[4], num_riders = at[5];
      Carrier c{at[0], at[1], streams, at[3], (int64_t)riders.size(), num_riders, at + 6, num_ends, 0, 0};
      if (c.segment <= last || c.segment >= (int64_t)a.segments.size() || num_ends < 0 || num_riders < 0)
        return BAD_COUNT;
      if (streams < 1 || streams > set.gamma) return BAD_COUNT;
      const Segment& s = a.segments[last = c.segment];
      const int64_t drafted = a.of_segment[6 * c.segment + 5];
      if (c.root < s.start || c.root >= s.stop || (drafted >= 0 && c.root != s.stop - 1 - drafted)) return BAD_COUNT;
      if (!std::binary_search(a.wanted, a.wanted + a.num_wanted, c.root)) return BAD_COUNT;
      if (place_of(a, c.root) + s.stop - c.root > a.num_wanted ||
          a.wanted[place_of(a, c.root) + s.stop - c.root - 1] != s.stop - 1)
        return BAD_COUNT;
      if (most && num_riders != s.stop - c.root) return BAD_COUNT;  // weights that choose are those of the pass
      at += 6 + num_ends;
      for (int64_t r = 0, before = -1; r < num_riders; r++, at++, rows += streams) {
        if (*at <= before || *at >= s.stop - c.root) return BAD_COUNT;
        riders.push_back({before = *at, a.pass.rows + rows});
      }
      later += streams;
      carriers.push_back(c);
    }
    if (std::max(rows, later) > room || !within(scratch, room, cache_slots(m, a.pass))) return BAD_SLOT;
    if (m.rotated && !all_within(a.pass.positions, a.pass.rows, 0, a.pass.num_positions - set.gamma))
      return BAD_POSITION;
    return DONE;
  }

  static int64_t place_of(const Asked& a, int64_t row) {
    return std::lower_bound(a.wanted, a.wanted + a.num_wanted, row) - a.wanted;
  }

  template <class A>
  void run(const Model& m, Asked& a, const StreamSet& set, float* logits, int64_t* out, float* log_q, Taps* taps) {
    const int layers = (int)a.pass.layers, insertion = (int)set.insertion;
    a.run(m, a.pass, 0, insertion, taps);
    tap.assign(a.states.begin(), a.states.begin() + a.pass.rows * Asked::row_bytes(m));
    int64_t rode = 0;
    for (const Carrier& c : carriers) rode += c.streams * c.num_riders;
    if (rode) ride<A>(m, a, set, rode, taps);
    else a.run(m, a.pass, insertion, layers, taps);
    logits = a.head(m, rode, logits);
    a.choose(m, logits, rules, out);
    late.clear(), paths.clear();
    int64_t* told = out + a.num_wanted;
    for (size_t i = 0; i < carriers.size(); i++, told += 2 + set.gamma * k) {
      told[0] = told[1] = 0;
      if (!walk(a, carriers[i], out)) continue;
      const Rider* rider = rider_of(carriers[i]);
      told[1] = rider != nullptr;
      if (!rider) late.push_back((int64_t)i);
      else
        told[0] = tell(m, a, carriers[i], logits + (a.num_wanted + rider->row - a.pass.rows) * m.vocab, told + 2,
                       log_q + i * set.gamma * k);
    }
    told[0] = 0;
    if (late.empty()) return;
    const Clock::time_point began = Clock::now();
    run_late<A>(m, a, set);
    const float* said = t_logits.data();
    for (int64_t i : late) {
      int64_t* own = out + a.num_wanted + i * (2 + set.gamma * k);
      own[0] = tell(m, a, carriers[i], said, own + 2, log_q + i * set.gamma * k);
      said += carriers[i].streams * m.vocab;
    }
    told[0] = microseconds(Clock::now() - began);
  }

  // The k best tokens of each stream of a sequence's last accepted node; returns of how many streams they could be
  // found.
  int64_t tell(const Model& m, const Asked& a, const Carrier& c, const float* logits, int64_t* tokens,
               float* log_q) const {
    // Stream j has the position of the last token before its own.
    const int64_t after = a.pass.positions[c.root + c.frontier(paths)] + 1;
    const Rules* r = rules && rules[c.segment].temperature > 0 ? rules + c.segment : nullptr;
    for (int64_t j = 0; j < c.streams; j++, logits += m.vocab, tokens += k, log_q += k) {
      const float* scores = r ? scored(logits, m.vocab, *r, after + j + 1, noisy) : logits;
      if (!scores) return j;
      top(scores, m.vocab, k, tokens, log_q);
    }
    return c.streams;
  }

  // f(M) + P_j with f the identity (eq. 4), for streams 1 .. count of one row.
  template <class A> static void start(const Model& m, const StreamSet& set, const A* state, int64_t count, A* out) {
    const A* embeddings = (const A*)set.embeddings;
    for (int64_t j = 0; j < count; j++)
      for (int64_t i = 0; i < m.d_model; i++)
        put(out + j * m.d_model + i, wide(state[i]) + wide(embeddings[j * m.d_model + i]));
  }

  // The walk through a sequence's tree along the choices; whether a draft behind it is of use.
  bool walk(const Asked& a, Carrier& c, const int64_t* chosen) {
    const Segment& s = a.segments[c.segment];
    const int64_t *own = chosen + place_of(a, c.root), *parents = a.parents[c.segment];
    auto ends = [&](int64_t token) { return std::find(c.ends, c.ends + c.num_ends, token) != c.ends + c.num_ends; };
    c.path = (int64_t)paths.size(), c.length = 0;
    int64_t want = own[0], at = 0;
    bool wanted = want != UNDECIDED && !ends(want);
    for (int64_t node = 1; node < s.stop - c.root; node++) {
      if ((parents ? parents[node - 1] : node - 1) != at || a.tokens[c.root + node] != want) continue;
      paths.push_back(at = node), want = own[node], c.length++;
      wanted = wanted && want != UNDECIDED && !ends(want);
    }
    return wanted && c.length <= c.most;
  }

  const Rider* rider_of(const Carrier& c) const {
    for (int64_t r = c.riders; r < c.riders + c.num_riders; r++)
      if (riders[r].node == c.frontier(paths)) return &riders[r];
    return nullptr;
  }

  static int64_t key(const Segment& s, int64_t j) { return s.base >= 0 ? s.base + j : s.keys[j]; }

  // The upper layers for main rows and riders, which come behind them; each sequence's riders are a segment.
  template <class A> void ride(const Model& m, Asked& a, const StreamSet& set, int64_t rode, Taps* taps) {
    const int64_t main = a.pass.rows, d = m.d_model;
    Pass p = a.pass;
    if ((int64_t)a.states.size() < (main + rode) * Asked::row_bytes(m))
      a.states.resize((main + rode) * Asked::row_bytes(m));
    positions.assign(p.positions, p.positions + main), slots.clear();
    for (int64_t r = 0; r < main; r++) slots.push_back(p.slots ? p.slots[r] : p.slot_base + r);
    int64_t num_keys = 0, num_places = 0, bytes = 0;
    for (const Carrier& c : carriers) {
      const Segment& s = a.segments[c.segment];
      const int64_t streams = c.streams * c.num_riders;
      num_keys += s.num_keys + streams, num_places += s.stop - s.start + streams,
          bytes += streams * (s.stop - s.start + streams);
    }
    keys.resize(num_keys), places.resize(num_places), masks.assign(bytes, 0);  // so that addresses in them stay
    segments = a.segments, limits.clear();
    int64_t *next_key = keys.data(), *next_place = places.data();
    uint8_t* mask = masks.data();
    for (const Carrier& c : carriers) {
      const Segment& s = a.segments[c.segment];
      const int64_t streams = c.streams * c.num_riders, width = s.stop - s.start, row = (int64_t)positions.size(),
                    block = width + streams;
      if (!streams) continue;
      segments.push_back({row, row + streams, s.prefix, s.num_keys + streams, -1, next_key, mask, next_place});
      for (int64_t j = 0; j < s.num_keys; j++) *next_key++ = key(s, j);
      next_place = std::copy(p.positions + s.start, p.positions + s.stop, next_place);
      int64_t own = 0;  // streams of this sequence so far
      for (int64_t r = c.riders; r < c.riders + c.num_riders; r++) {
        const Rider& rider = riders[r];
        const int64_t carried = c.root + rider.node, seen = carried - s.start;  // its row, and in the segment
        if (most) limits.push_back({carried, rider.row, rider.row + c.streams, s.num_keys, most});
        start(m, set, (const A*)tap.data() + carried * d, c.streams, (A*)a.states.data() + rider.row * d);
        for (int64_t j = 0; j < c.streams; j++, mask += block) {
          if (s.visible) std::memcpy(mask, s.visible + seen * width, width);
          else std::memset(mask, 1, seen + 1);
          std::memset(mask + width + own, 1, j + 1);
          positions.push_back(p.positions[carried] + j + 1), slots.push_back(scratch + rider.row - main + j);
          *next_key++ = slots.back(), *next_place++ = positions.back();
        }
        own += c.streams;
      }
    }
    adapters.assign(p.adapters, p.adapters + p.num_adapters);
    if (set.adapter) adapters.push_back({main, main + rode, set.rank, set.adapter});
    p.rows = main + rode, p.positions = positions.data(), p.slots = slots.data(),
    p.hidden_in = p.hidden_out = a.states.data();
    p.segments = segments.data(), p.num_segments = (int64_t)segments.size();
    p.adapters = adapters.data(), p.num_adapters = (int64_t)adapters.size();
    p.limits = limits.data(), p.num_limits = (int64_t)limits.size();
    a.run(m, p, (int)set.insertion, (int)p.layers, taps);
  }

  // The streams of the last accepted nodes of those in `late`: each a chain behind its sequence's accepted keys. Their
  // logits go to `t_logits`.
  template <class A> void run_late(const Model& m, const Asked& a, const StreamSet& set) {
    const int64_t d = m.d_model;
    Pass p = a.pass;
    int64_t num_keys = 0, rows = 0;
    for (int64_t i : late)
      rows += carriers[i].streams, num_keys += a.segments[carriers[i].segment].num_keys + carriers[i].streams;
    grow(begun, rows * Asked::row_bytes(m));
    keys.resize(num_keys), positions.clear(), segments.clear();
    int64_t *next_key = keys.data(), row = 0;
    for (int64_t i : late) {
      const Carrier& c = carriers[i];
      const Segment& s = a.segments[c.segment];
      const int64_t *first = next_key, carried = c.root + c.frontier(paths), root = s.prefix + c.root - s.start;
      for (int64_t j = 0; j <= root; j++) *next_key++ = key(s, j);
      for (int64_t n = c.path; n < c.path + c.length; n++) *next_key++ = key(s, root + paths[n]);
      const int64_t prefix = next_key - first;
      for (int64_t j = 0; j < c.streams; j++)
        *next_key++ = scratch + row + j, positions.push_back(p.positions[carried] + j + 1);
      segments.push_back({row, row + c.streams, prefix, prefix + c.streams, -1, first, nullptr, nullptr});
      start(m, set, (const A*)tap.data() + carried * d, c.streams, (A*)begun.data() + row * d);
      row += c.streams;
    }
    adapters.clear();
    if (set.adapter) adapters.push_back({0, rows, set.rank, set.adapter});
    p.rows = rows, p.positions = positions.data(), p.slots = nullptr, p.slot_base = scratch;
    p.hidden_in = p.hidden_out = begun.data(), p.segments = segments.data(), p.num_segments = (int64_t)segments.size();
    p.adapters = adapters.data(), p.num_adapters = (int64_t)adapters.size();
    run_layers(m, p, (int)set.insertion, (int)p.layers);
    grow(t_logits, rows * m.vocab);
    head(m, begun.data(), rows, t_logits.data(), (int)p.threads);
  }
};
thread_local Fused t_fused;

}  // namespace

extern "C" {

// The same with speculative streams, where main rows never see them: riders go through the upper layers beside the main
// rows; where a sequence's last accepted node carried none, its streams go through these layers afterwards. `set` is
// the trained set, and `list` goes on as `Fused::read` says; `rules` and `logits` may be null. Of every stream of a
// sequence's last accepted node come the k best tokens by its rules, and the log-probabilities that these give them:
//     out: chosen [wanted]; for each carrier: its streams, 1 where they rode in the pass, tokens [gamma, k];
//         microseconds that
//         the streams took afterwards
//     log_q: for each carrier [gamma, k]
//     logits: [wanted and rows of riders, vocab]
//     taps: of main rows, or null
// A carrier without streams is one whose next draft nobody wants, or one with a choice that cannot be made here.
// Returns a `Refusal`.
int pl_choose_streams(const Model* m, const Pass* p, const void* embedding, const StreamSet* set, const int64_t* list,
                      const Rules* rules, float* logits, int64_t* out, float* log_q, Taps* taps) {
  Asked& a = t_asked;
  Fused& f = t_fused;
  Refusal found = a.read(*m, *p, list);
  if (found == DONE) found = f.read(*m, a, *set);
  if (found == DONE && taps) found = a.check(*taps);
  if (found != DONE) return found;
  a.begin(*m, embedding);
  f.rules = rules;
  if (m->wide_activations) f.run<float>(*m, a, *set, logits, out, log_q, taps);
  else f.run<bf16>(*m, a, *set, logits, out, log_q, taps);
  return DONE;
}

}  // extern "C"
