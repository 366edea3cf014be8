// Draft trees, level by level.

#pragma once

namespace {

// The best `budget` nodes of a tree, of equals the first ones, in their order (EAGLE-2, section 4.2). No node may have
// a better score than its parent; node 0 is the root, node n is entry n - 1.
void keep_best(int64_t budget, std::vector<int64_t>& tokens, std::vector<int64_t>& parents,
               std::vector<double>& scores) {
  const int64_t nodes = tokens.size();
  if (nodes <= budget) return;
  std::vector<int64_t> order(nodes), to(nodes + 1);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
  order.resize(budget);
  std::sort(order.begin(), order.end());
  for (int64_t i = 0; i < budget; i++) {
    const int64_t n = order[i];
    tokens[i] = tokens[n], parents[i] = to[parents[n]], scores[i] = scores[n], to[n + 1] = i + 1;
  }
  tokens.resize(budget), parents.resize(budget), scores.resize(budget);
}

// A draft tree while it grows: what `DraftModel` does level by level. Node 0 is the root, node n is entry n - 1.
struct Growing {
  const int64_t* pending;
  int64_t num_pending, position, room, base;
  const int64_t* keys;
  int64_t budget, max_depth;
  const Rules* rules;
  int64_t shift = 0;  // of a token's position in its text, beyond that of its row among the keys
  const char* given = nullptr;  // [pending, d_model] states in front of the pending tokens
  std::vector<char> states;  // [1 + forwarded, d_model] what the root's row and the nodes' gave, where they are fed on
  std::vector<int64_t> tokens, parents, depths, frontier{0};  // frontier: nodes to expand next, ascending
  std::vector<double> scores;                                 // cumulative log q
  int64_t forwarded = 0, passes = 0;                          // the first so many nodes have K and V

  int64_t committed() const { return position + num_pending; }
  int64_t depth(int64_t node) const { return node ? depths[node - 1] : 0; }
  int64_t slot(int64_t place) const { return base >= 0 ? base + place : keys[place]; }

  // The position of the tokens behind a node.
  int64_t place(int64_t node) const { return committed() + shift + depth(node); }

  // The children of every frontier node, of which the k best [frontier, k] are given, at most `most` of each.
  std::vector<int64_t> expand(const int64_t* best, const float* log_q, int64_t k, int64_t most) {
    std::vector<int64_t> fresh;
    passes += !frontier.empty();
    for (int64_t node : frontier) {
      for (int64_t i = 0; i < std::min(k, most); i++) {
        if (!(log_q[i] > -INFINITY)) continue;
        tokens.push_back(best[i]), parents.push_back(node), depths.push_back(depth(node) + 1);
        scores.push_back((node ? scores[node - 1] : 0.0) + (double)log_q[i]);
        fresh.push_back(tokens.size());
      }
      best += k, log_q += k;
    }
    return fresh;
  }

  // Moves the frontier behind the nodes that have K and V, since a node's slot is its place.
  void compact() {
    std::vector<int64_t> order, to(tokens.size() + 1);
    for (int64_t n = 1; n <= forwarded; n++) order.push_back(n);
    order.insert(order.end(), frontier.begin(), frontier.end());
    for (int64_t n = forwarded + 1; n <= (int64_t)tokens.size(); n++)
      if (!std::binary_search(frontier.begin(), frontier.end(), n)) order.push_back(n);
    for (size_t i = 0; i < order.size(); i++) to[order[i]] = i + 1;
    const Growing old = *this;
    for (size_t i = 0; i < order.size(); i++) {
      const int64_t n = order[i] - 1;
      tokens[i] = old.tokens[n], parents[i] = to[old.parents[n]], depths[i] = old.depths[n], scores[i] = old.scores[n];
    }
    for (int64_t& node : frontier) node = to[node];
    forwarded += frontier.size();
  }
};

// How trees grow: `DraftModelConfig`.
struct Shape {
  int64_t topk, beam;      // of a dynamic tree; topk 1: a static one
  int64_t levels;
  const int64_t* factors;  // [levels] children a level of a static tree
  double floor;            // no node below this score is expanded

  int64_t children(int64_t level) const { return topk > 1 ? topk : factors[level]; }

  std::vector<int64_t> next(const Growing& tree, std::vector<int64_t> fresh, int64_t level) const {
    if (level >= std::min(tree.max_depth, levels)) return {};
    auto better = [&](int64_t a, int64_t b) { return tree.scores[a - 1] > tree.scores[b - 1]; };
    if (topk > 1) {
      std::stable_sort(fresh.begin(), fresh.end(), better);
      if ((int64_t)fresh.size() > beam) fresh.resize(beam);
    } else if ((int64_t)(tree.tokens.size() + fresh.size() * factors[level]) > tree.budget) {
      return {};
    }
    fresh.erase(std::remove_if(fresh.begin(), fresh.end(), [&](int64_t n) { return tree.scores[n - 1] < floor; }),
                fresh.end());
    std::sort(fresh.begin(), fresh.end());
    if (tree.forwarded + (int64_t)fresh.size() > tree.room) return {};
    return fresh;
  }
};

}  // namespace

extern "C" {

// Drafts trees of several sequences at once, a level a pass. All numbers come in one list:
//     trees, topk, beam, levels, children of each level
//     for each tree: address of the pending tokens, their number, position of the first, slots behind them, base (-1:
//     keys are listed), address of the keys, budget, greatest depth, address of the rules (0: none), what a token's
//     position in its text is beyond that of its row, nodes that fit into `out`, address of the states in front of the
//     pending tokens (0: none)
// Rows are embeddings; or, where `f` is given, made of a state and an embedding each: of the target's states and the
// pending tokens, and of what a node's parent's row gave and the node's own token. Of such trees the best nodes come
// out, `budget` at most. What comes out, for each tree: nodes, how many of the first ones have K and V, passes, then
// tokens and parents, as many as fit each; `scores` has those of all trees likewise. `p` as for `pl_roll`. Returns a
// `Refusal`.
int pl_grow(const Model* m, const Pass* p, const void* embedding, int64_t limit, const int64_t* list, double floor,
            int64_t* out, double* scores, const Fuse* f) {
  constexpr int64_t NUMBERS = 12, ROOM = 10;
  const int64_t count = list[0];
  const Shape shape{list[1], list[2], list[3], list + 4, floor};
  const int64_t* of_tree = list + 4 + shape.levels;
  if (shape.levels < 1 || shape.topk < 1 || shape.beam < 0) return BAD_COUNT;
  for (int64_t i = 0; i < shape.levels; i++)
    if (shape.factors[i] < 1) return BAD_COUNT;
  std::vector<Growing> trees(count);
  int64_t most = 0;
  for (int64_t i = 0; i < count; i++, of_tree += NUMBERS) {
    const int64_t* t = of_tree;
    Growing& g = trees[i];
    g.pending = (const int64_t*)t[0], g.num_pending = t[1], g.position = t[2], g.room = t[3], g.base = t[4];
    g.keys = (const int64_t*)t[5], g.budget = t[6], g.max_depth = t[7], g.rules = (const Rules*)t[8], g.shift = t[9];
    g.given = (const char*)t[11];
    if (f && !g.given) return BAD_COUNT;
    if (g.room < 0 || g.budget < 1 || g.max_depth < 1 || g.max_depth > shape.levels) return BAD_COUNT;
    Chain chain{g.pending, g.num_pending, g.position, g.room + 1, g.base, g.keys, 0, nullptr, nullptr, 0, nullptr};
    const Refusal refusal = check_chains(*m, *p, limit, &chain, 1);
    if (refusal != DONE) return refusal;
    most += std::max(g.num_pending, g.room);
  }
  if (f && check_fuse(*m, *f) != DONE) return BAD_COUNT;
  const int64_t bytes = m->d_model * (m->wide_activations ? 4 : 2);
  std::vector<char> hidden(most * bytes), fed(f ? most * bytes : 0);
  std::vector<int64_t> positions(most), slots(most), places, named(most), best;
  std::vector<float> log_q;
  std::vector<Ranked> asked;
  std::vector<Segment> segments;
  std::vector<uint8_t> masks;
  for (int64_t level = 0;; level++) {
    int64_t rows = 0, wanted = 0, bits = 0, block = 0;
    for (Growing& g : trees) {
      if (level && !g.frontier.empty()) g.compact();
      bits += g.frontier.size() * g.forwarded, block += g.forwarded;
    }
    masks.assign(bits, 0), places.resize(block), segments.clear();
    bits = block = 0;
    auto add = [&](const Growing& g, int64_t token, int64_t position, int64_t place, const char* state) {
      positions[rows] = position, slots[rows] = g.slot(place), named[rows] = token;
      if (!f) std::memcpy(hidden.data() + rows * bytes, (const char*)embedding + token * bytes, bytes);
      else if (level) std::memcpy(fed.data() + rows * bytes, state, bytes);
      else take_state(*m, *f, state, fed.data() + rows * bytes);
      rows++;
    };
    for (Growing& g : trees) {
      if (g.frontier.empty()) continue;
      const int64_t start = rows, size = g.frontier.size(), behind = g.committed() + g.forwarded;
      if (level == 0) {
        for (int64_t j = 0; j < g.num_pending; j++)
          add(g, g.pending[j], g.position + j, g.position + j, g.given + (f ? j * bytes : 0));
        segments.push_back({start, rows, g.position, g.committed(), g.base, g.keys, nullptr, nullptr});
        continue;
      }
      for (int64_t node : g.frontier)
        add(g, g.tokens[node - 1], g.committed() - 1 + g.depth(node), g.committed() + node - 1,
            g.states.data() + g.parents[node - 1] * bytes);
      if (size == 1 && g.depth(g.frontier[0]) == g.forwarded) {  // a chain so far
        segments.push_back({start, rows, behind - 1, behind, g.base, g.keys, nullptr, nullptr});
        continue;
      }
      segments.push_back(
          {start, rows, g.committed(), behind, g.base, g.keys, masks.data() + bits, places.data() + block});
      for (int64_t f = 0; f < size; f++)
        for (int64_t node = g.frontier[f]; node; node = g.parents[node - 1])
          masks[bits + f * g.forwarded + node - 1] = 1;
      for (int64_t node = 1; node <= g.forwarded; node++) places[block + node - 1] = g.committed() - 1 + g.depth(node);
      bits += size * g.forwarded, block += g.forwarded;
    }
    if (rows == 0) break;
    if (f) fuse(*m, *f, fed.data(), named.data(), embedding, rows, hidden.data(), (int)p->threads);
    Pass pass = *p;
    pass.rows = rows, pass.hidden_in = pass.hidden_out = hidden.data(), pass.positions = positions.data(),
    pass.slots = slots.data();
    pass.segments = segments.data(), pass.num_segments = segments.size();
    run_layers(*m, pass, 0, (int)p->layers);
    if (level == 0)  // the last row of each
      for (const Segment& s : segments)
        std::memmove(hidden.data() + wanted++ * bytes, hidden.data() + (s.stop - 1) * bytes, bytes);
    else wanted = rows;
    asked.clear();
    for (const Growing& g : trees)
      for (int64_t node : g.frontier) asked.push_back({nullptr, g.rules, g.place(node)});
    const int64_t children = shape.children(level), k = std::min(children, limit);
    best.resize(wanted * k), log_q.resize(wanted * k);
    rank(*m, m->head, m->norm, hidden.data(), limit, k, true, asked, best.data(), log_q.data(), p->threads);
    const char* given = hidden.data();
    int64_t at = 0;
    for (Growing& g : trees) {
      const int64_t size = g.frontier.size();
      if (f) g.states.insert(g.states.end(), given, given + size * bytes), given += size * bytes;
      // Of later levels only what fits is grown.
      const int64_t most = level == 0 && shape.topk == 1 ? g.budget : children;
      g.frontier = shape.next(g, g.expand(best.data() + at, log_q.data() + at, k, most), level + 1);
      at += size * k;
    }
  }
  of_tree = list + 4 + shape.levels;
  for (Growing& g : trees) {
    if (f) keep_best(g.budget, g.tokens, g.parents, g.scores);
    const int64_t nodes = g.tokens.size(), room = of_tree[ROOM];
    if (nodes > room) return BAD_COUNT;
    out[0] = nodes, out[1] = g.forwarded, out[2] = g.passes;
    std::copy(g.tokens.begin(), g.tokens.end(), out + 3), std::copy(g.parents.begin(), g.parents.end(), out + 3 + room);
    std::copy(g.scores.begin(), g.scores.end(), scores);
    out += 3 + 2 * room, scores += room, of_tree += NUMBERS;
  }
  return DONE;
}

}  // extern "C"
