// What drafted nodes are worth.

#pragma once

namespace {

// How estimates of drafted nodes are corrected: engine/chances.py, whose constants come with every call.
struct Correction {
  int64_t depths, edges;
  const double* constants;  // UNKNOWN, MEMORY, SHIFT, FADE, MOST_SHIFT
  const double* edge;       // EDGES

  Correction(const int64_t* counts, const double* numbers)
      : depths(counts[0]), edges(counts[1]), constants(numbers), edge(numbers + 5) {}

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

  void learn(double* hits, double* tries, double* odds, int64_t cell, bool right) const {
    hits[cell] = constants[1] * hits[cell] + right, tries[cell] = constants[1] * tries[cell] + 1;
    odds[cell] = (hits[cell] + 0.01) / (tries[cell] - hits[cell] + 0.01);
  }

  double shifted(double shift, bool right, double given) const {
    const double moved = constants[3] * (shift + constants[2] * (right - given));
    return std::max(-constants[4], std::min(constants[4], moved));
  }
};

}  // namespace

extern "C" {

// Chances of all nodes of some trees, and the nodes with the best ones. `list` holds
//     the numbers of trees, kinds of nodes, classes of depths, edges of odds, and nodes that are ranked
//     for each tree: its nodes, the address of its sequence's shifts [kinds], addresses of its odds by class [kinds]
//     each node's parent (a root has none; its entry is not read), then each node's kind
// and `scores` [nodes] the logs of the drafter's estimates, or is null. The call fills cells [nodes], the classes of
// nodes; chances [2, nodes], of a node given its parent and of the path to it; places [2, ranked], tree and node; best
// [ranked], their chances. Returns the depth of the deepest node, -1 where `list` cannot be.
int64_t pl_weigh(const int64_t* list, const double* numbers, const double* scores, int64_t* cells, double* chances,
                 int64_t* places, double* best) {
  const int64_t trees = list[0], kinds = list[1], most = list[4];
  const Correction rule(list + 2, numbers);
  const int64_t* of_tree = list + 5;
  int64_t total = 0, deepest = 0, at = 0;
  for (int64_t t = 0; t < trees; t++) total += of_tree[t * (2 + kinds)];
  const int64_t *parents = of_tree + trees * (2 + kinds), *marks = parents + total;
  double *given = chances, *path = chances + total;
  static thread_local std::vector<int64_t> depths;
  static thread_local std::vector<double> factors;
  static thread_local std::vector<std::pair<int64_t, int64_t>> order;
  order.clear(), factors.resize(kinds);
  for (int64_t t = 0; t < trees; t++, of_tree += 2 + kinds) {
    const int64_t nodes = of_tree[0];
    if (nodes < 1) return -1;
    const double* shift = (const double*)of_tree[1];
    for (int64_t k = 0; k < kinds; k++) factors[k] = shift[k] != 0 ? std::exp(shift[k]) : 1.0;
    depths.assign(nodes, 0), cells[at] = 0, given[at] = path[at] = 1;
    for (int64_t i = 1; i < nodes; i++) {
      const int64_t parent = parents[at + i], kind = marks[at + i], node = at + i;
      if (parent < 0 || parent >= i || kind < 0 || kind >= kinds) return -1;
      const int64_t depth = depths[i] = depths[parent] + 1;
      const double own = scores ? rule.odds(scores[node] - scores[at + parent]) : numbers[0];
      cells[node] = rule.cell(own, depth);
      const double odds = ((const double*)of_tree[2 + kind])[cells[node]] * factors[kind];
      given[node] = odds / (1 + odds), path[node] = path[at + parent] * given[node];
      deepest = std::max(deepest, depth), order.push_back({t, node});
    }
    at += nodes;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](const auto& a, const auto& b) { return path[a.second] > path[b.second]; });
  of_tree = list + 5;
  static thread_local std::vector<int64_t> starts;
  starts.assign(1, 0);
  for (int64_t t = 0; t < trees; t++) starts.push_back(starts[t] + of_tree[t * (2 + kinds)]);
  for (int64_t i = 0; i < std::min<int64_t>(most, order.size()); i++)
    places[i] = order[i].first, places[most + i] = order[i].second - starts[order[i].first],
    best[i] = path[order[i].second];
  return deepest;
}

// Compares proposals, one after the other, with the texts that followed, and counts what was right. `list` holds
//     the numbers of proposals, kinds of nodes, classes of depths, edges of odds
//     for each proposal: addresses of its nodes' tokens, parents, kinds, classes and chances given the parent; the
//         numbers of its nodes and of the tokens that followed its root; the address of its sequence's shifts; for each
//         kind the addresses of hits, tries and odds by class
//     the tokens that followed the roots, of all proposals
// Returns a `Refusal`.
int pl_judge(const int64_t* list, const double* numbers) {
  const int64_t count = list[0], kinds = list[1];
  const Correction rule(list + 2, numbers);
  const int64_t *of_one = list + 4, *text = of_one + count * (8 + 3 * kinds);
  static thread_local std::vector<int64_t> right_up_to;  // of each right node: tokens of the text behind the root
  for (int64_t i = 0; i < count; i++, of_one += 8 + 3 * kinds) {
    const int64_t *tokens = (const int64_t*)of_one[0], *parents = (const int64_t*)of_one[1],
                  *marks = (const int64_t*)of_one[2];
    const int64_t* cells = (const int64_t*)of_one[3];
    const double* given = (const double*)of_one[4];
    const int64_t nodes = of_one[5], known = of_one[6];
    double* shift = (double*)of_one[7];
    right_up_to.assign(nodes, -1), right_up_to[0] = 0;
    for (int64_t n = 1; n < nodes; n++) {
      const int64_t place = right_up_to[parents[n]];
      if (place < 0 || place >= known) continue;
      const bool right = text[place] == tokens[n];
      double* const* counts = (double* const*)(of_one + 8 + 3 * marks[n]);
      rule.learn(counts[0], counts[1], counts[2], cells[n], right);
      shift[marks[n]] = rule.shifted(shift[marks[n]], right, given[n]);
      if (right) right_up_to[n] = place + 1;
    }
    text += known;
  }
  return DONE;
}

}  // extern "C"
