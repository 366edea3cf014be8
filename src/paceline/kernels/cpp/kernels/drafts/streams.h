#pragma once

namespace {

// Speculative streams beside the main rows of a `WholePass` (Speculative Streaming, section 2.1), or after them.
struct StreamRows {
  struct Rider { int64_t node, row; };  // a node whose streams go with the main rows; row of the first of them
  struct Carried {                // a carrier while the pass runs
    Carrier* of;
    int64_t first, num_riders;    // of its riders
    int64_t path = 0, length = 0; // its accepted nodes, once they are known
    int64_t frontier(const std::vector<int64_t>& paths) const { return length ? paths[path + length - 1] : 0; }
  };

  StreamPass* given = nullptr;
  std::vector<Carried> carriers;
  std::vector<Rider> riders;
  std::vector<int64_t> paths, positions, slots, keys, places, late;
  std::vector<uint8_t> masks;
  std::vector<Segment> segments;
  std::vector<AdapterRange> adapters;
  std::vector<char> tap, begun;  // main rows before the streams' first layer; streams that run afterwards

  // Rows start .. stop - 1 are streams.
  void adapt(const StreamSet& set, int64_t start, int64_t stop) {
    if (!set.adapter) return;
    AdapterRange& range = adapters.emplace_back();
    range.start = start, range.stop = stop, range.rank = set.rank, range.adapter = set.adapter;
  }

  Refusal read(const Model& m, const WholePass& a, StreamPass& s) {
    const StreamSet& set = *s.set;
    given = &s;
    carriers.clear(), riders.clear();
    if (s.count < 0 || s.k < 1 || s.k > m.vocab || set.gamma < 1 || set.insertion < 1 ||
        set.insertion >= a.pass.layers)
      return BAD_COUNT;
    int64_t rows = 0, later = 0, last = -1;
    for (Carrier *c = s.carriers, *end = c + s.count; c < end; c++) {
      if (c->segment <= last || c->segment >= (int64_t)a.segments.size() || c->num_ends < 0 || c->num_riders < 0)
        return BAD_COUNT;
      if (c->streams < 1 || c->streams > set.gamma) return BAD_COUNT;
      const Segment& own = a.segments[last = c->segment];
      const int64_t drafted = a.given->spans[last].drafted, nodes = own.stop - c->root;
      if (c->root < own.start || c->root >= own.stop || (drafted >= 0 && c->root != own.stop - 1 - drafted))
        return BAD_COUNT;
      const int64_t *wanted = a.given->wanted, num_wanted = a.given->num_wanted, place = place_of(a, c->root);
      if (!std::binary_search(wanted, wanted + num_wanted, c->root)) return BAD_COUNT;
      if (place + nodes > num_wanted || wanted[place + nodes - 1] != own.stop - 1) return BAD_COUNT;
      carriers.push_back({c, (int64_t)riders.size(), c->num_riders});
      for (int64_t r = 0, before = -1; r < c->num_riders; r++, rows += c->streams) {
        if (c->riders[r] <= before || c->riders[r] >= nodes) return BAD_COUNT;
        riders.push_back({before = c->riders[r], a.pass.rows + rows});
      }
      later += c->streams;
    }
    if (std::max(rows, later) > s.room || !within(s.scratch, s.room, cache_slots(m, a.pass))) return BAD_SLOT;
    if (m.rotated && !all_within(a.pass.positions, a.pass.rows, 0, a.pass.num_positions - set.gamma))
      return BAD_POSITION;
    return DONE;
  }

  static int64_t place_of(const WholePass& a, int64_t row) {
    return std::lower_bound(a.given->wanted, a.given->wanted + a.given->num_wanted, row) - a.given->wanted;
  }

  template <class A> void run(const Model& m, WholePass& a, Taps* taps) {
    const StreamSet& set = *given->set;
    const int layers = (int)a.pass.layers, insertion = (int)set.insertion;
    a.run(m, a.pass, 0, insertion, taps);
    tap.assign(a.states.begin(), a.states.begin() + a.pass.rows * state_bytes(m));
    int64_t rode = 0;
    for (const Carried& c : carriers) rode += c.of->streams * c.num_riders;
    if (rode) ride<A>(m, a, set, rode, taps);
    else a.run(m, a.pass, insertion, layers, taps);
    const float* logits = a.head(m, rode);
    a.choose(m, logits);
    late.clear(), paths.clear(), given->late_us = 0;
    for (size_t i = 0; i < carriers.size(); i++) {
      Carried& c = carriers[i];
      c.of->found = c.of->rode = 0;
      if (!walk(a, c)) continue;
      const Rider* rider = rider_of(c);
      c.of->rode = rider != nullptr;
      if (!rider) late.push_back((int64_t)i);
      else c.of->found = tell(m, a, c, logits + (a.given->num_wanted + rider->row - a.pass.rows) * m.vocab);
    }
    if (late.empty()) return;
    const Clock::time_point began = Clock::now();
    run_late<A>(m, a, set);
    const float* said = t_logits.data();
    for (int64_t i : late) {
      const Carried& c = carriers[i];
      c.of->found = tell(m, a, c, said);
      said += c.of->streams * m.vocab;
    }
    given->late_us = microseconds(Clock::now() - began);
  }

  // The k best tokens of each stream of a sequence's last accepted node; returns of how many streams they were found.
  int64_t tell(const Model& m, const WholePass& a, const Carried& c, const float* logits) const {
    // Stream j has the position of the last token before its own.
    const int64_t after = a.pass.positions[c.of->root + c.frontier(paths)] + 1, k = given->k;
    const Rules* rules = a.given->rules ? a.given->rules + c.of->segment : nullptr;
    if (rules && !(rules->temperature > 0)) rules = nullptr;
    for (int64_t j = 0; j < c.of->streams; j++, logits += m.vocab) {
      const float* scores = rules ? scored(logits, m.vocab, *rules, after + j + 1, given->noisy != 0) : logits;
      if (!scores) return j;
      top(scores, m.vocab, k, c.of->tokens + j * k, c.of->log_q + j * k);
    }
    return c.of->streams;
  }

  // M + P_j (eq. 4 with f the identity), for streams 1 .. count of one row.
  template <class A> static void start(const Model& m, const StreamSet& set, const A* state, int64_t count, A* out) {
    const A* embeddings = (const A*)set.embeddings;
    for (int64_t j = 0; j < count; j++)
      for (int64_t i = 0; i < m.d_model; i++)
        put(out + j * m.d_model + i, wide(state[i]) + wide(embeddings[j * m.d_model + i]));
  }

  // The walk through a sequence's tree along the choices; whether a draft behind it is of use.
  bool walk(const WholePass& a, Carried& c) {
    const Carrier& of = *c.of;
    const Span& span = a.given->spans[of.segment];
    const int64_t* own = a.given->chosen + place_of(a, of.root);
    const int64_t* last = of.ends + of.num_ends;
    auto ends = [&](int64_t token) { return std::find(of.ends, last, token) != last; };
    c.path = (int64_t)paths.size(), c.length = 0;
    int64_t want = own[0], at = 0;
    bool wanted = want != UNDECIDED && !ends(want);
    for (int64_t node = 1; node < span.stop - of.root; node++) {
      const int64_t parent = span.drafted < 0 ? node - 1 : span.parents[node - 1];
      if (parent != at || a.given->tokens[of.root + node] != want) continue;
      paths.push_back(at = node), want = own[node], c.length++;
      wanted = wanted && want != UNDECIDED && !ends(want);
    }
    return wanted && c.length <= of.most;
  }

  const Rider* rider_of(const Carried& c) const {
    for (int64_t r = c.first; r < c.first + c.num_riders; r++)
      if (riders[r].node == c.frontier(paths)) return &riders[r];
    return nullptr;
  }

  static int64_t key(const Segment& s, int64_t j) { return s.base >= 0 ? s.base + j : s.keys[j]; }

  // The upper layers for main rows and riders, which come behind them; each sequence's riders are a segment.
  template <class A> void ride(const Model& m, WholePass& a, const StreamSet& set, int64_t rode, Taps* taps) {
    const int64_t main = a.pass.rows, d = m.d_model;
    Pass p = a.pass;
    if ((int64_t)a.states.size() < (main + rode) * state_bytes(m))
      a.states.resize((main + rode) * state_bytes(m));
    positions.assign(p.positions, p.positions + main), slots.clear();
    for (int64_t r = 0; r < main; r++) slots.push_back(p.slots ? p.slots[r] : p.slot_base + r);
    int64_t num_keys = 0, num_places = 0, bytes = 0;
    for (const Carried& c : carriers) {
      const Segment& s = a.segments[c.of->segment];
      const int64_t streams = c.of->streams * c.num_riders;
      num_keys += s.num_keys + streams, num_places += s.stop - s.start + streams,
          bytes += streams * (s.stop - s.start + streams);
    }
    keys.resize(num_keys), places.resize(num_places), masks.assign(bytes, 0);  // so that addresses in them stay
    segments = a.segments;
    int64_t *next_key = keys.data(), *next_place = places.data();
    uint8_t* mask = masks.data();
    for (const Carried& c : carriers) {
      const Segment& s = a.segments[c.of->segment];
      const int64_t streams = c.of->streams * c.num_riders, width = s.stop - s.start, row = (int64_t)positions.size(),
                    block = width + streams;
      if (!streams) continue;
      const int64_t num_keys = s.num_keys + streams;
      segments.push_back(segment_at(row, row + streams, s.prefix, num_keys, -1, next_key, mask, next_place));
      for (int64_t j = 0; j < s.num_keys; j++) *next_key++ = key(s, j);
      next_place = std::copy(p.positions + s.start, p.positions + s.stop, next_place);
      int64_t own = 0;  // streams of this sequence so far
      for (int64_t r = c.first; r < c.first + c.num_riders; r++) {
        const Rider& rider = riders[r];
        const int64_t carried = c.of->root + rider.node, seen = carried - s.start;  // its row, and in the segment
        start(m, set, (const A*)tap.data() + carried * d, c.of->streams, (A*)a.states.data() + rider.row * d);
        for (int64_t j = 0; j < c.of->streams; j++, mask += block) {
          if (s.visible) std::memcpy(mask, s.visible + seen * width, width);
          else std::memset(mask, 1, seen + 1);
          std::memset(mask + width + own, 1, j + 1);
          positions.push_back(p.positions[carried] + j + 1), slots.push_back(given->scratch + rider.row - main + j);
          *next_key++ = slots.back(), *next_place++ = positions.back();
        }
        own += c.of->streams;
      }
    }
    adapters.assign(p.adapters, p.adapters + p.num_adapters);
    adapt(set, main, main + rode);
    p.rows = main + rode, p.positions = positions.data(), p.slots = slots.data(),
    p.hidden_in = p.hidden_out = a.states.data();
    p.segments = segments.data(), p.num_segments = (int64_t)segments.size();
    p.adapters = adapters.data(), p.num_adapters = (int64_t)adapters.size();
    a.run(m, p, (int)set.insertion, (int)p.layers, taps);
  }

  // The streams of the last accepted nodes of those in `late`: each a chain behind its sequence's accepted keys. Their
  // logits go to `t_logits`.
  template <class A> void run_late(const Model& m, const WholePass& a, const StreamSet& set) {
    const int64_t d = m.d_model;
    Pass p = a.pass;
    int64_t num_keys = 0, rows = 0;
    for (int64_t i : late) {
      const Carrier& c = *carriers[i].of;
      rows += c.streams, num_keys += a.segments[c.segment].num_keys + c.streams;
    }
    grow(begun, rows * state_bytes(m));
    keys.resize(num_keys), positions.clear(), segments.clear();
    int64_t *next_key = keys.data(), row = 0;
    for (int64_t i : late) {
      const Carried& c = carriers[i];
      const Segment& s = a.segments[c.of->segment];
      const int64_t *first = next_key, carried = c.of->root + c.frontier(paths), root = s.prefix + c.of->root - s.start;
      for (int64_t j = 0; j <= root; j++) *next_key++ = key(s, j);
      for (int64_t n = c.path; n < c.path + c.length; n++) *next_key++ = key(s, root + paths[n]);
      const int64_t prefix = next_key - first;
      for (int64_t j = 0; j < c.of->streams; j++)
        *next_key++ = given->scratch + row + j, positions.push_back(p.positions[carried] + j + 1);
      segments.push_back(segment_at(row, row + c.of->streams, prefix, prefix + c.of->streams, -1, first));
      start(m, set, (const A*)tap.data() + carried * d, c.of->streams, (A*)begun.data() + row * d);
      row += c.of->streams;
    }
    adapters.clear();
    adapt(set, 0, rows);
    p.rows = rows, p.positions = positions.data(), p.slots = nullptr, p.slot_base = given->scratch;
    p.hidden_in = p.hidden_out = begun.data(), p.segments = segments.data(), p.num_segments = (int64_t)segments.size();
    p.adapters = adapters.data(), p.num_adapters = (int64_t)adapters.size();
    run_layers(m, p, (int)set.insertion, (int)p.layers);
    grow(t_logits, rows * m.vocab);
    head(m, begun.data(), rows, t_logits.data(), (int)p.threads);
  }
};
thread_local StreamRows t_streams;

}  // namespace

extern "C" {

// The same with speculative streams, where main rows never see them: riders go through the upper layers beside the main
// rows; where a sequence's last accepted node carried none, its streams go through these layers afterwards. Of every
// stream of a sequence's last accepted node come the k best tokens by its rules, and the log-probabilities that these
// give them. `taps` are of main rows, or null. Returns a `Refusal`.
int pl_choose_streams(const Model* m, const Pass* p, const Linear* words, const TokenPass* given, StreamPass* streams,
                      Taps* taps) {
  WholePass& a = t_whole;
  StreamRows& s = t_streams;
  Refusal found = a.read(*m, *p, *given);
  if (found == DONE) found = s.read(*m, a, *streams);
  if (found == DONE && taps) found = a.check(*taps);
  if (found != DONE) return found;
  a.begin(*m, *words);
  if (m->wide_activations) s.run<float>(*m, a, taps);
  else s.run<bf16>(*m, a, taps);
  return DONE;
}

}  // extern "C"
