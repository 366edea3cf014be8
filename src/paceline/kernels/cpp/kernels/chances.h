// What drafted nodes are worth.

#pragma once

namespace {

// How estimates of drafted nodes are corrected: engine/chances.py, whose constants come with every call.
struct Correction {
  int64_t depths, edges, cells;
  const double* constants;  // UNKNOWN, MEMORY, SHIFT, FADE, MOST_SHIFT
  const double* edge;       // EDGES

  Correction(const int64_t* counts, const double* numbers)
      : depths(counts[0]),
        edges(counts[1]),
        cells(counts[0] * (counts[1] + 1)),
        constants(numbers),
        edge(numbers + 5) {}

  double odds(double log_chance) const {
    if (log_chance != log_chance) return constants[0];
    const double chance = std::exp(std::min(0.0, log_chance));
    return chance / std::max(1 - chance, 1e-4);
  }

  int64_t cell(double odds, int64_t depth) const {
    int64_t row = 0;
    for (int64_t d = depth - 1; d; d >>= 1) row++;
    return std::min(row, depths - 1) * (edges + 1) + (std::upper_bound(edge, edge + edges, odds) - edge);
  }

  void learn(double* table, int64_t cell, bool right) const {
    double &hits = table[cell], &tries = table[cells + cell];
    hits = constants[1] * hits + right, tries = constants[1] * tries + 1;
    table[2 * cells + cell] = (hits + 0.01) / (tries - hits + 0.01);
  }

  double shifted(double shift, bool right, double given) const {
    const double moved = constants[3] * (shift + constants[2] * (right - given));
    return std::max(-constants[4], std::min(constants[4], moved));
  }
};

// A sequence's part of a call, as it lies in the list.
struct WeighedText {
  int64_t nodes, last_nodes, known;  // of its new proposal and of its last one, roots included; tokens behind that root
  double* shift;                     // [kinds]
  int64_t* last;                     // [5, last_nodes] tokens, parents, kinds, classes, chances given the parent
  double* const* tables;             // [kinds] of hits, tries and odds by class

  explicit WeighedText(const int64_t* at)
      : nodes(at[0]),
        last_nodes(at[1]),
        known(at[2]),
        shift((double*)at[3]),
        last((int64_t*)at[4]),
        tables((double* const*)(at + 5)) {}

  // Compares the last proposal with the text behind its root, and counts what was right.
  void judge(const Correction& rule, const int64_t* text) {
    static thread_local std::vector<int64_t> right_up_to;  // of each right node: tokens of the text behind the root
    const int64_t n = last_nodes, *tokens = last, *parents = last + n, *marks = last + 2 * n, *cells = last + 3 * n;
    const double* given = (const double*)(last + 4 * n);
    right_up_to.assign(n, -1), right_up_to[0] = 0;
    for (int64_t i = 1; i < n; i++) {
      const int64_t place = right_up_to[parents[i]];
      if (place < 0 || place >= known) continue;
      const bool right = text[place] == tokens[i];
      rule.learn(tables[marks[i]], cells[i], right);
      shift[marks[i]] = rule.shifted(shift[marks[i]], right, given[i]);
      if (right) right_up_to[i] = place + 1;
    }
  }

  // Gives the nodes of the new proposal their chances; it is the last one from now on. Returns the depth of the
  // deepest, -1 where they are no tree.
  int64_t weigh(const Correction& rule, int64_t kinds, const int64_t* columns, int64_t total, const double* scores,
                double* path) {
    static thread_local std::vector<int64_t> depths;
    int64_t *parents = last + nodes, *marks = last + 2 * nodes, *cells = last + 3 * nodes, deepest = 0;
    double* given = (double*)(last + 4 * nodes);
    for (int64_t part = 0; part < 3; part++) std::copy_n(columns + part * total, nodes, last + part * nodes);
    depths.assign(nodes, 0), cells[0] = 0, given[0] = path[0] = 1;
    for (int64_t i = 1; i < nodes; i++) {
      const int64_t parent = parents[i], kind = marks[i];
      if (parent < 0 || parent >= i || kind < 0 || kind >= kinds) return -1;
      deepest = std::max(deepest, depths[i] = depths[parent] + 1);
      cells[i] = rule.cell(scores ? rule.odds(scores[i] - scores[parent]) : rule.constants[0], depths[i]);
      const double factor = shift[kind] != 0 ? std::exp(shift[kind]) : 1.0;
      const double odds = tables[kind][2 * rule.cells + cells[i]] * factor;
      given[i] = odds / (1 + odds), path[i] = path[parent] * given[i];
    }
    return deepest;
  }
};

struct RankedNode {
  double chance;
  int64_t tree, node, kind;
};

// How many nodes pay, of chances that fall, where so many rows cost `prices`.
int64_t best_count(const std::vector<RankedNode>& ranked, int64_t most, const double* prices) {
  double total = 0, best = 0;
  int64_t count = 0;
  for (int64_t k = 1; k <= most; k++) {
    total += ranked[k - 1].chance;
    if (total - prices[k] > best) best = total - prices[k], count = k;
  }
  return count;
}

}  // namespace

extern "C" {

// Judges the last proposals for some sequences by the texts that followed, and chooses among the nodes of new ones:
// the count of likeliest ones that are worth most beyond `prices` [1 + rows], what so many rows cost. `list` holds
//     the numbers of trees, kinds of nodes, classes of depths, edges of odds, and rows at most; whether all are kept
//     for each tree what `WeighedText` reads, 5 + kinds numbers
//     the tokens behind the roots of the last proposals, of all trees
//     each node's token, then each node's parent (that of a root is not read), then each node's kind
// and `scores` [nodes] the logs of the drafter's estimates, or is null. The call fills kept [trees + nodes], how many
// nodes of each tree are kept, and which, the roots among them; gains [1 + trees x kinds], the tokens expected of all,
// and of each tree's nodes of each kind beyond their rows' price. Returns the depth of the deepest node, -1 where
// `list` cannot be; no sequence then has a last proposal any more.
int64_t pl_weigh(const int64_t* list, const double* numbers, const double* scores, const double* prices, int64_t* kept,
                 double* gains) {
  const int64_t trees = list[0], kinds = list[1], size = 5 + kinds;
  const Correction rule(list + 2, numbers);
  static thread_local std::vector<RankedNode> ranked;
  static thread_local std::vector<double> path;
  int64_t total = 0, deepest = 0, at = 0, most = list[4];
  const int64_t* text = list + 6 + trees * size;
  for (int64_t t = 0; t < trees; t++) {
    WeighedText one(list + 6 + t * size);
    if (one.nodes < 1) return -1;
    one.judge(rule, text);
    text += one.known, total += one.nodes;
  }
  ranked.clear(), path.resize(total);
  for (int64_t t = 0; t < trees; t++) {
    WeighedText one(list + 6 + t * size);
    const int64_t levels = one.weigh(rule, kinds, text + at, total, scores ? scores + at : nullptr, path.data());
    if (levels < 0) return -1;
    deepest = std::max(deepest, levels);
    for (int64_t i = 1; i < one.nodes; i++) ranked.push_back({path[i], t, i, text[2 * total + at + i]});
    at += one.nodes;
  }
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.chance > b.chance; });
  most = std::min<int64_t>(most, ranked.size());
  const int64_t count = list[5] ? most : best_count(ranked, most, prices);
  std::fill_n(gains, 1 + trees * kinds, 0.0), std::fill_n(kept, trees, 1);
  for (int64_t k = 0; k < count; k++) {
    const RankedNode& node = ranked[k];
    gains[0] += node.chance, kept[node.tree]++;
    gains[1 + node.tree * kinds + node.kind] += node.chance - prices[count] / count;
  }
  ranked.resize(count);
  for (int64_t t = 0; t < trees; t++) ranked.push_back({0, t, 0, 0});
  std::sort(ranked.begin(), ranked.end(),
            [](const auto& a, const auto& b) { return a.tree != b.tree ? a.tree < b.tree : a.node < b.node; });
  for (size_t k = 0; k < ranked.size(); k++) kept[trees + k] = ranked[k].node;
  return deepest;
}

}  // extern "C"
