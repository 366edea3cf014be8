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
  TreeStart* of;
  std::vector<char> states;  // [1 + forwarded, d_model] what the root's row and the nodes' gave, where they are fed on
  std::vector<int64_t> tokens, parents, depths, frontier{0};  // frontier: nodes to expand next, ascending
  std::vector<double> scores;                                 // cumulative log q
  int64_t forwarded = 0, passes = 0;                          // the first so many nodes have K and V

  int64_t committed() const { return of->position + of->num_pending; }
  int64_t depth(int64_t node) const { return node ? depths[node - 1] : 0; }
  int64_t slot(int64_t place) const { return slot_at(of->base, of->keys, place); }

  // The position of the tokens behind a node.
  int64_t place(int64_t node) const { return committed() + of->shift + depth(node); }

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

// The nodes of a tree that are expanded at a level, of those that were made at the one before; ascending.
std::vector<int64_t> next_frontier(const TreeRules& r, const Growing& tree, std::vector<int64_t> fresh, int64_t level) {
  if (level >= std::min(tree.of->max_depth, r.levels)) return {};
  auto better = [&](int64_t a, int64_t b) { return tree.scores[a - 1] > tree.scores[b - 1]; };
  if (r.topk > 1) {
    std::stable_sort(fresh.begin(), fresh.end(), better);
    if ((int64_t)fresh.size() > r.topk) fresh.resize(r.topk);
  } else if ((int64_t)(tree.tokens.size() + fresh.size() * r.factors[level]) > tree.of->budget) {
    return {};
  }
  auto hopeless = [&](int64_t n) { return tree.scores[n - 1] < r.floor; };
  fresh.erase(std::remove_if(fresh.begin(), fresh.end(), hopeless), fresh.end());
  std::sort(fresh.begin(), fresh.end());
  if (tree.forwarded + (int64_t)fresh.size() > tree.of->room) return {};
  return fresh;
}

}  // namespace

extern "C" {

// Drafts trees of several sequences at once, a level a pass. Rows are embeddings; or, where `f` is given, made of a
// state and an embedding each: of the target's states and the pending tokens, and of what a node's parent's
// row gave and the node's own token. Of such trees the best nodes come out, `budget` at most. `p` as for `pl_roll`.
// Returns a `Refusal`.
int pl_grow(const Model* m, const Pass* p, const Linear* words, int64_t limit, TreeStart* starts, int64_t count,
            const TreeRules* rules, const Fuse* f) {
  if (count < 0 || rules->levels < 1 || rules->topk < 1) return BAD_COUNT;
  for (int64_t i = 0; i < rules->levels; i++)
    if (rules->factors[i] < 1) return BAD_COUNT;
  std::vector<Growing> trees;
  int64_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    TreeStart& s = starts[i];
    if (f && !s.states) return BAD_COUNT;
    if (s.room < 0 || s.budget < 1 || s.max_depth < 1 || s.max_depth > rules->levels) return BAD_COUNT;
    Chain chain;
    chain.pending = s.pending, chain.num_pending = s.num_pending, chain.position = s.position, chain.steps = s.room + 1;
    chain.base = s.base, chain.keys = s.keys;
    const Refusal refusal = check_chains(*m, *p, limit, &chain, 1);
    if (refusal != DONE) return refusal;
    most += std::max(s.num_pending, s.room);
    trees.push_back({&s});
  }
  if (f && check_fuse(*m, *f) != DONE) return BAD_COUNT;
  DraftRows rows(*m, *p, *words, most);
  const int64_t bytes = rows.bytes;
  std::vector<char> fed(f ? most * bytes : 0);
  std::vector<int64_t> places, named(most), best;
  std::vector<float> log_q;
  std::vector<Ranked> wanted;
  std::vector<uint8_t> masks;
  for (int64_t level = 0;; level++) {
    int64_t bits = 0, block = 0;
    for (Growing& g : trees) {
      if (level && !g.frontier.empty()) g.compact();
      bits += g.frontier.size() * g.forwarded, block += g.forwarded;
    }
    masks.assign(bits, 0), places.resize(block), rows.clear(), wanted.clear();
    bits = block = 0;
    auto add = [&](const Growing& g, int64_t token, int64_t position, int64_t place, const char* state) {
      if (!f) return rows.embed(token, position, g.slot(place));
      char* to = fed.data() + rows.count() * bytes;
      named[rows.count()] = token;
      if (level) std::memcpy(to, state, bytes);
      else take_state(*m, *f, state, to);
      rows.add(position, g.slot(place));
    };
    for (Growing& g : trees) {
      if (g.frontier.empty()) continue;
      const TreeStart& s = *g.of;
      const int64_t start = rows.count(), size = g.frontier.size(), behind = g.committed() + g.forwarded;
      for (int64_t node : g.frontier) wanted.push_back({nullptr, s.rules, g.place(node)});
      if (level == 0) {
        for (int64_t j = 0; j < s.num_pending; j++)
          add(g, s.pending[j], s.position + j, s.position + j, s.states + (f ? j * bytes : 0));
        rows.segments.push_back(segment_at(start, rows.count(), s.position, g.committed(), s.base, s.keys));
        continue;
      }
      for (int64_t node : g.frontier)
        add(g, g.tokens[node - 1], g.committed() - 1 + g.depth(node), g.committed() + node - 1,
            g.states.data() + g.parents[node - 1] * bytes);
      if (size == 1 && g.depth(g.frontier[0]) == g.forwarded) {  // a chain so far
        rows.segments.push_back(segment_at(start, rows.count(), behind - 1, behind, s.base, s.keys));
        continue;
      }
      rows.segments.push_back(segment_at(start, rows.count(), g.committed(), behind, s.base, s.keys,
                                         masks.data() + bits, places.data() + block));
      for (int64_t i = 0; i < size; i++)
        for (int64_t node = g.frontier[i]; node; node = g.parents[node - 1])
          masks[bits + i * g.forwarded + node - 1] = 1;
      for (int64_t node = 1; node <= g.forwarded; node++) places[block + node - 1] = g.committed() - 1 + g.depth(node);
      bits += size * g.forwarded, block += g.forwarded;
    }
    if (rows.count() == 0) break;
    if (f) fuse(*m, *f, fed.data(), named.data(), *words, rows.count(), rows.hidden.data(), (int)p->threads);
    rows.run();
    if (level == 0) rows.keep_last();
    const int64_t children = rules->topk > 1 ? rules->topk : rules->factors[level], k = std::min(children, limit);
    best.resize(wanted.size() * k), log_q.resize(wanted.size() * k);
    rank(*m, m->head, m->norm, rows.hidden.data(), limit, k, true, wanted, best.data(), log_q.data(), p->threads);
    const char* given = rows.hidden.data();
    int64_t at = 0;
    for (Growing& g : trees) {
      const int64_t size = g.frontier.size();
      if (f) g.states.insert(g.states.end(), given, given + size * bytes), given += size * bytes;
      // Of later levels only what fits is grown.
      const int64_t each = level == 0 && rules->topk == 1 ? g.of->budget : children;
      g.frontier = next_frontier(*rules, g, g.expand(best.data() + at, log_q.data() + at, k, each), level + 1);
      at += size * k;
    }
  }
  for (Growing& g : trees) {
    TreeStart& s = *g.of;
    if (f) keep_best(s.budget, g.tokens, g.parents, g.scores);
    s.nodes = g.tokens.size(), s.forwarded = g.forwarded, s.passes = g.passes;
    if (s.nodes > s.most) return BAD_COUNT;
    std::copy(g.tokens.begin(), g.tokens.end(), s.tokens), std::copy(g.parents.begin(), g.parents.end(), s.parents);
    std::copy(g.scores.begin(), g.scores.end(), s.scores);
  }
  return DONE;
}

}  // extern "C"
