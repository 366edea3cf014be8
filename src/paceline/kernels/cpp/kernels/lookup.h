// Suffixes of texts: drafts from token ids alone.
//
// The automaton is that of Blumer et al. (1985). A state stands for runs that occur at exactly the same places: the
// longest has length[state] tokens, the shortest length[link[state]] + 1. State 0 is the empty run, which is not counted.
// Once the last `most` tokens were seen before, the text is continued from that shorter run in place of the whole of
// it: runs beyond `most` + 1 are then incomplete, shorter ones stay exact, and the chain of links that every append
// walks has at most `most` + 1 states.

#pragma once

namespace {

// All runs of up to `most` + 1 tokens of some texts, and how often each occurs.
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

  // Find the last tokens in `count` automata, each given by its number and its address.
  void match(const int64_t* automata, int64_t count) {
    std::vector<Match> now;
    for (int64_t i = 0; i < count; i++) {
      Match match{(const Suffixes*)automata[2 * i + 1], automata[2 * i]};
      for (const auto& known : shared)
        if (known.number == match.number) match = known;
      catch_up(match);
      now.push_back(match);
    }
    shared.swap(now);
  }
};

}  // namespace

extern "C" {

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
    text.match(of_shared, shared);
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

// What follows the longest suffix of one text and a path of drafted tokens after it, which is not taken in:
//     tokens of a match at least, tokens wanted, automata of earlier texts; for each of these: its number, its address
//     the text's address, tokens that are new, tokens of the path; these tokens
// least: share of a follower below which it is left out.
// out: how many follow, the matched tokens, and the followers, likeliest first, of equals the smallest; shares of each.
int pl_suffix_followers(const int64_t* list, double least_share, int64_t* out, double* shares) {
  const int64_t least = list[0], width = list[1], automata = list[2];
  const int64_t *of_text = list + 3 + 2 * automata, *fresh = of_text + 3, *path = fresh + of_text[1];
  if (least < 1 || width < 1 || automata < 0 || !of_text[0] || of_text[1] < 0 || of_text[2] < 0) return BAD_COUNT;
  SuffixText& text = *(SuffixText*)of_text[0];
  text.extend(fresh, of_text[1]);
  text.match(list + 3, automata);
  std::vector<std::pair<double, int64_t>> best, now;  // -share and token
  int64_t longest = least - 1;
  for (int64_t s = -1; s < automata; s++) {
    const Suffixes& runs = s < 0 ? text.own : *text.shared[s].runs;
    int32_t state = s < 0 ? text.state : text.shared[s].state;
    int64_t matched = s < 0 ? text.matched : text.shared[s].matched, total = 0;
    for (int64_t i = 0; i < of_text[2]; i++) runs.follow(state, matched, path[i]);
    runs.continued(state, matched);
    if (matched <= longest) continue;
    for (int32_t e = runs.first[state]; e >= 0; e = runs.edges[e].next) total += runs.count[runs.edges[e].target];
    now.clear();
    for (int32_t e = runs.first[state]; e >= 0; e = runs.edges[e].next) {
      const double share = (double)runs.count[runs.edges[e].target] / (double)total;
      if (share >= least_share) now.emplace_back(-share, runs.edges[e].token);
    }
    if (!now.empty()) longest = matched, best.swap(now);
  }
  std::sort(best.begin(), best.end());
  out[0] = std::min<int64_t>(width, best.size()), out[1] = longest;
  for (int64_t i = 0; i < out[0]; i++) out[2 + i] = best[i].second, shares[i] = -best[i].first;
  return DONE;
}

}  // extern "C"
