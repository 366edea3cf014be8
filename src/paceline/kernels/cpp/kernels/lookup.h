// N-grams and suffixes of texts: drafts from token ids alone.

#pragma once

namespace {

// Where each n-gram of a growing text was last seen, as the position that follows it: `NgramIndex` of
// draft/ngram.py.
struct NgramText {
  struct Hash {
    const NgramText* text;
    int64_t n;
    size_t operator()(int64_t follower) const {
      uint64_t sum = 0;
      for (int64_t i = follower - n; i < follower; i++)
        sum = (sum ^ (uint64_t)text->tokens[i]) * 0x9e3779b97f4a7c15u, sum ^= sum >> 29;
      return sum;
    }
  };
  struct Same {
    const NgramText* text;
    int64_t n;
    bool operator()(int64_t a, int64_t b) const {
      return std::equal(text->tokens.begin() + (a - n), text->tokens.begin() + a, text->tokens.begin() + (b - n));
    }
  };
  using Places = std::unordered_map<int64_t, int64_t, Hash, Same>;  // by the end of an n-gram's first occurrence

  int64_t shortest, longest, indexed = 1;
  std::vector<int64_t> tokens;
  std::vector<Places> latest;  // by n, from the longest on

  NgramText(int64_t shortest, int64_t longest) : shortest(shortest), longest(longest) {
    for (int64_t n = longest; n >= shortest; n--) latest.emplace_back(16, Hash{this, n}, Same{this, n});
  }

  void extend(const int64_t* more, int64_t count) {
    tokens.insert(tokens.end(), more, more + count);
    const int64_t end = tokens.size();
    for (; indexed < end; indexed++)
      for (int64_t n = std::min(longest, indexed); n >= shortest; n--) latest[longest - n][indexed] = indexed;
  }

  // The last occurrence of the longest n-gram that ends the text, and how many tokens in front of it are alike, `most`
  // at most; 0: there is none.
  int64_t find(int64_t most, int64_t& follower) const {
    const int64_t end = tokens.size();
    for (int64_t n = std::min(longest, end); n >= shortest; n--) {
      const auto found = latest[longest - n].find(end);
      if (found == latest[longest - n].end()) continue;
      follower = found->second;
      for (const int64_t limit = std::min(most, follower);
           n < limit && tokens[follower - 1 - n] == tokens[end - 1 - n];)
        n++;
      return n;
    }
    return 0;
  }
};

// All runs of up to `most` + 1 tokens of some texts, and how often each occurs: `SuffixAutomaton` of
// draft/suffix.py, step by step.
struct Suffixes {
  struct Edge {
    int64_t token;
    int32_t target, next;  // next: the edge of the same state that was made after it, or -1
  };

  const int64_t most;
  int64_t size = 0;  // tokens taken in
  int32_t last = 0;
  // Of states; their edges in the order in which they were made.
  std::vector<int32_t> length{0}, link{-1}, first{-1}, final{-1}, edge_count{0};
  std::vector<int64_t> count{0};
  std::vector<Edge> edges;
  std::vector<int32_t> table = std::vector<int32_t>(64, -1);  // edges by state and token, open addressing
  std::vector<int32_t> owner;                                  // of edges: their state

  explicit Suffixes(int64_t most) : most(most) {}

  static size_t mix(int32_t state, int64_t token) {
    uint64_t h = ((uint64_t)(uint32_t)state << 32 ^ (uint64_t)token) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
  }

  // Where the edge is in the table, or would be.
  size_t place(int32_t state, int64_t token) const {
    const size_t mask = table.size() - 1;
    size_t at = mix(state, token) & mask;
    while (table[at] >= 0 && !(owner[table[at]] == state && edges[table[at]].token == token)) at = (at + 1) & mask;
    return at;
  }

  int32_t edge_of(int32_t state, int64_t token) const { return table[place(state, token)]; }

  int32_t next(int32_t state, int64_t token) const {
    const int32_t edge = edge_of(state, token);
    return edge < 0 ? -1 : edges[edge].target;
  }

  void join(int32_t state, int64_t token, int32_t target) {
    if (2 * (edges.size() + 1) > table.size()) {
      table.assign(2 * table.size(), -1);
      for (size_t e = 0; e < edges.size(); e++) table[place(owner[e], edges[e].token)] = e;
    }
    const int32_t edge = edges.size();
    table[place(state, token)] = edge;
    edges.push_back({token, target, -1}), owner.push_back(state);
    (first[state] < 0 ? first[state] : edges[final[state]].next) = edge;
    final[state] = edge, edge_count[state]++;
  }

  int32_t add(int32_t runs, int32_t shorter, int64_t seen) {
    length.push_back(runs), link.push_back(shorter), count.push_back(seen);
    first.push_back(-1), final.push_back(-1), edge_count.push_back(0);
    return length.size() - 1;
  }

  int32_t split(int32_t state, int64_t token, int32_t known) {
    const int32_t shorter = add(length[state] + 1, link[known], count[known]);
    for (int32_t e = first[known]; e >= 0; e = edges[e].next) join(shorter, edges[e].token, edges[e].target);
    link[known] = shorter;
    for (int32_t e; state >= 0 && (e = edge_of(state, token)) >= 0 && edges[e].target == known; state = link[state])
      edges[e].target = shorter;
    return shorter;
  }

  int32_t step(int64_t token) {
    int32_t state = last, known = next(state, token);
    if (known >= 0) return length[known] == length[state] + 1 ? known : split(state, token, known);
    const int32_t made = add(length[state] + 1, 0, 0);
    for (; state >= 0 && edge_of(state, token) < 0; state = link[state]) join(state, token, made);
    if (state >= 0) {
      known = next(state, token);
      const int32_t shorter = length[known] == length[state] + 1 ? known : split(state, token, known);
      link[made] = shorter;
    }
    return made;
  }

  void append(int64_t token) {
    const int32_t current = step(token);
    for (int32_t state = current; state > 0; state = link[state]) count[state]++;
    last = length[link[current]] >= most ? link[current] : current;
    size++;
  }

  void settle(int32_t& state, int64_t matched) const {
    while (state > 0 && length[link[state]] >= matched) state = link[state];
  }

  void follow(int32_t& state, int64_t& matched, int64_t token) const {
    int32_t edge;
    while ((edge = edge_of(state, token)) < 0 && state > 0) state = link[state], matched = length[state];
    const int32_t target = edge < 0 ? -1 : edges[edge].target;
    if (target <= 0) {
      state = 0, matched = 0;
      return;
    }
    state = target, matched = std::min(matched + 1, most);
    settle(state, matched);
  }

  void continued(int32_t& state, int64_t& matched) const {
    while (state > 0 && !edge_count[state]) state = link[state], matched = length[state];
  }

  // The edge whose runs are most frequent, of equals the one made last, and its share.
  int32_t likeliest(int32_t state, double& share) const {
    int32_t best = first[state];
    if (edge_count[state] == 1) return share = 1.0, best;
    int64_t highest = 0, total = 0;
    for (int32_t e = first[state]; e >= 0; e = edges[e].next) {
      const int64_t seen = count[edges[e].target];
      total += seen;
      if (seen >= highest) best = e, highest = seen;
    }
    return share = (double)highest / (double)total, best;
  }
};

// A running text with the runs in it, and where its last tokens occur there and in texts that it shares with others.
struct SuffixText {
  struct Match {
    const Suffixes* runs;
    int64_t number, state = 0, matched = 0, seen = 0, size = 0;  // number: of an automaton, as addresses are reused
  };

  Suffixes own;
  int32_t state = 0;
  int64_t matched = 0;
  std::vector<int64_t> tokens;
  std::vector<Match> shared;

  explicit SuffixText(int64_t most) : own(most) {}

  void extend(const int64_t* more, int64_t count) {
    for (int64_t i = 0; i < count; i++) {  // matched, then appended: a match always ends before the last token
      own.follow(state, matched, more[i]);
      own.append(more[i]);
      own.settle(state, matched);
    }
    tokens.insert(tokens.end(), more, more + count);
  }

  void catch_up(Match& match) const {
    const Suffixes& runs = *match.runs;
    const int64_t end = tokens.size();
    int32_t state = match.state;
    if (match.size != runs.size || end - match.seen > runs.most)
      state = 0, match.matched = 0, match.seen = std::max<int64_t>(0, end - runs.most);
    for (; match.seen < end; match.seen++) runs.follow(state, match.matched, tokens[match.seen]);
    match.state = state, match.size = runs.size;
  }
};

}  // namespace

extern "C" {

// An empty text whose n-grams of `shortest` .. `longest` tokens are looked up; null where these are no lengths.
void* pl_ngrams_new(int64_t shortest, int64_t longest) {
  return shortest < 1 || longest < shortest ? nullptr : new NgramText(shortest, longest);
}

void pl_ngrams_free(void* text) { delete (NgramText*)text; }

// Prompt lookup for several texts. All numbers come in one list:
//     texts, tokens beyond which a match is not told apart
//     for each text: its address, tokens that are new, tokens to draft
//     the new tokens of all
// out: for each text how long its match is (0: there is none), and the tokens drafted. Returns a `Refusal`.
int pl_ngrams(const int64_t* list, int64_t* out) {
  const int64_t count = list[0], most = list[1];
  const int64_t *of_text = list + 2, *fresh = of_text + 3 * count;
  for (int64_t i = 0; i < count; i++, of_text += 3) {
    const int64_t depth = of_text[2];
    if (!of_text[0] || of_text[1] < 0 || depth < 1) return BAD_COUNT;
    NgramText& text = *(NgramText*)of_text[0];
    text.extend(fresh, of_text[1]);
    fresh += of_text[1];
    const int64_t end = text.tokens.size();
    int64_t from = 0;
    *out = text.find(most, from);
    if (*out++)
      for (int64_t d = 0; d < depth; d++)
        out[d] = from + d < end ? text.tokens[from + d] : out[d - (end - from)];  // it repeats
    out += depth;
  }
  return DONE;
}

// The runs of texts, `most` + 1 tokens and less; null where that is no length. See `Suffixes`.
void* pl_suffixes_new(int64_t most) { return most < 1 ? nullptr : new Suffixes(most); }

void pl_suffixes_free(void* runs) { delete (Suffixes*)runs; }

// Take in one more text.
int pl_suffixes_add(void* runs, const int64_t* tokens, int64_t count) {
  if (!runs || count < 0) return BAD_COUNT;
  Suffixes& all = *(Suffixes*)runs;
  all.last = 0;
  for (int64_t i = 0; i < count; i++) all.append(tokens[i]);
  return DONE;
}

// An empty running text; null where `most` is no length.
void* pl_suffix_text_new(int64_t most) { return most < 1 ? nullptr : new SuffixText(most); }

void pl_suffix_text_free(void* text) { delete (SuffixText*)text; }

// Continue several texts as their longest suffixes were continued most often. All numbers come in one list:
//     texts, tokens of a match at least, automata of earlier texts
//     for each of these: its number, its address
//     for each text: its address, tokens that are new, tokens to draft at most, depth at most
//     the new tokens of all
// limits: tokens drafted at most for each matched one, and the chance of a path below which it ends.
// out: for each text the tokens drafted, the matched ones, and as many drafted ones as it may have; scores [as many]:
// logs of their chances, with the trust in so long a match. Returns a `Refusal`.
int pl_suffixes(const int64_t* list, const double* limits, int64_t* out, double* scores) {
  const int64_t texts = list[0], least = list[1], shared = list[2];
  const int64_t *of_shared = list + 3, *of_text = of_shared + 2 * shared, *fresh = of_text + 4 * texts;
  static thread_local std::vector<int64_t> drafted, best;
  static thread_local std::vector<double> chances, logs;
  if (least < 1 || shared < 0) return BAD_COUNT;
  for (int64_t t = 0; t < texts; t++, of_text += 4) {
    const int64_t nodes = of_text[2], deepest = of_text[3], room = std::min(nodes, deepest);
    if (!of_text[0] || of_text[1] < 0 || room < 1) return BAD_COUNT;
    SuffixText& text = *(SuffixText*)of_text[0];
    text.extend(fresh, of_text[1]);
    fresh += of_text[1];
    std::vector<SuffixText::Match> now;
    for (int64_t s = 0; s < shared; s++) {
      SuffixText::Match match{(const Suffixes*)of_shared[2 * s + 1], of_shared[2 * s]};
      for (const auto& known : text.shared)
        if (known.number == match.number) match = known;
      text.catch_up(match);
      now.push_back(match);
    }
    text.shared.swap(now);
    double best_score = 0;
    int64_t best_matched = 0;
    best.clear(), logs.clear();
    for (int64_t s = -1; s < shared; s++) {
      const Suffixes& runs = s < 0 ? text.own : *text.shared[s].runs;
      int32_t state = s < 0 ? text.state : text.shared[s].state;
      int64_t matched = s < 0 ? text.matched : text.shared[s].matched;
      const int64_t from = matched;
      const int64_t limit = std::min(nodes, std::max<int64_t>(1, (int64_t)(limits[0] * (double)matched)));
      if (matched < least || (double)limit <= best_score) continue;  // a node counts 1 at most
      drafted.clear(), chances.clear();
      double chance = 1, score = 0;
      while ((int64_t)drafted.size() < std::min(limit, deepest)) {
        runs.continued(state, matched);
        if (matched < least) break;
        double share;
        const int32_t edge = runs.likeliest(state, share);
        chance *= share;
        if (chance < limits[1]) break;
        const double said = std::log(chance);
        drafted.push_back(runs.edges[edge].token), chances.push_back(said), score += std::exp(said);
        state = runs.edges[edge].target, matched = std::min(matched + 1, runs.most);
        runs.settle(state, matched);
      }
      if (score > best_score) best_score = score, best_matched = from, best.swap(drafted), logs.swap(chances);
    }
    out[0] = best.size(), out[1] = best_matched;
    for (size_t i = 0; i < best.size(); i++) {
      const double n = best_matched, d = i + 1;
      out[2 + i] = best[i], scores[i] = logs[i] + std::log(n * (n + 1) / ((n + d) * (n + d + 1)));
    }
    out += 2 + room, scores += room;
  }
  return DONE;
}

// The honest chances of the nodes of several trees, and these in falling order. All numbers come in one list:

}  // extern "C"
