// Drafts from one product of all states with the head (Lyanna).

#pragma once

namespace {

// A tree of Algorithm 1 while it grows; node 0 is the root, node n is entry n - 1.
struct Sampling {
  const SampleStart* of;
  SampledTree* tree;
  std::vector<int64_t> tokens, parents, queue{0};
  std::vector<double> scores;
};

// Algorithm 1 for several trees at once, a level a turn (Lyanna, section 5.2).
void sample_trees(const Model& m, const TokenInfo* info, int64_t limit, int64_t branches, bool noisy,
                  std::vector<Sampling>& trees, int64_t threads) {
  std::vector<Ranked> nodes;
  std::vector<int64_t> tokens;
  std::vector<float> log_q;
  std::vector<char> factors;
  const int64_t k = std::min(branches, limit), bytes = info ? info->table.k * (m.wide_activations ? 4 : 2) : 0;
  for (int64_t level = 0;; level++) {
    nodes.clear(), factors.clear();
    for (const Sampling& t : trees) {
      if (level >= t.tree->levels) continue;
      for (int64_t node : t.queue) {
        nodes.push_back({t.tree->logits + level * m.vocab, t.of->rules, t.of->place + level});
        const int64_t token = node ? t.tokens[node - 1] : t.of->root;
        const char* own = info ? (const char*)info->factors + token * bytes : nullptr;
        factors.insert(factors.end(), own, own + bytes);
      }
    }
    const int64_t rows = nodes.size();
    if (rows == 0) return;
    tokens.resize(rows * k), log_q.resize(rows * k);
    if (info)
      rank(m, info->table, nullptr, factors.data(), limit, k, noisy, nodes, tokens.data(), log_q.data(), threads);
    else
      for_rows(rows, m.vocab, threads, [&](int64_t i) {
        const Ranked& row = nodes[i];
        top_by(m, row.more, limit, row.rules, row.position, noisy, k, tokens.data() + i * k, log_q.data() + i * k);
      });
    int64_t at = 0;
    for (Sampling& t : trees) {
      if (level >= t.tree->levels) continue;
      std::vector<int64_t> fresh;
      for (int64_t node : t.queue)
        for (int64_t end = at + k; at < end; at++) {
          if (!(log_q[at] > -INFINITY)) continue;
          t.tokens.push_back(tokens[at]), t.parents.push_back(node);
          t.scores.push_back((node ? t.scores[node - 1] : 0.0) + (double)log_q[at]);
          fresh.push_back(t.tokens.size());
        }
      std::stable_sort(fresh.begin(), fresh.end(),
                       [&](int64_t a, int64_t b) { return t.scores[a - 1] > t.scores[b - 1]; });
      if ((int64_t)fresh.size() > branches) fresh.resize(branches);
      std::sort(fresh.begin(), fresh.end());
      t.queue = std::move(fresh);
    }
  }
}

}  // namespace

extern "C" {

// Lyanna's draft, and what is re-sampled of the one before: k passes of its layer for all sequences, one product of all
// states with the head, and Algorithm 1 on their logits and on those that are left over. `raw` [steps of all, vocab] is
// filled, with the logits of the new drafts. `p` as for `pl_roll`. Returns a `Refusal`.
// Source: Lyanna, sections 4 and 5.
int pl_sample(const Model* m, const Pass* p, const Linear* words, int64_t limit, const Fuse* f, const TokenInfo* info,
              SampleStart* starts, int64_t count, int64_t branches, int reads_tokens, int noisy, float* raw) {
  const int64_t threads = p->threads;
  if (count < 0 || branches < 1 || check_fuse(*m, *f) != DONE || f->state.n == 0) return BAD_COUNT;
  if (info &&
      ((info->table.kind == F32) != (m->wide_activations != 0) || info->table.n != m->vocab || info->table.k < 1))
    return BAD_COUNT;
  std::vector<Chain> chains;
  std::vector<const char*> given;  // states of each chain
  std::vector<Sampling> trees;
  int64_t most = 0, total = 0, deepest = 0;
  for (int64_t i = 0; i < count; i++) {
    SampleStart& s = starts[i];
    const int64_t steps = s.fresh.levels;
    if (s.root < 0 || s.root >= m->tokens || (steps && !s.states)) return BAD_COUNT;
    if (steps) {
      given.push_back(s.states);
      Chain& chain = chains.emplace_back();
      chain.pending = s.pending, chain.num_pending = s.num_pending, chain.position = s.position, chain.steps = steps;
      chain.base = s.base, chain.keys = s.keys, chain.rules = s.rules;
      s.fresh.logits = raw + total * m->vocab;
      most += s.num_pending, total += steps, deepest = std::max(deepest, steps);
    }
    for (SampledTree* tree : {&s.fresh, &s.left}) {
      if (tree->levels < 0 || (tree->levels && tree->most < 1)) return BAD_COUNT;
      if (tree->levels) trees.push_back({&s, tree, {}, {}, {0}, {}});
    }
  }
  const Refusal refusal = check_chains(*m, *p, limit, chains.data(), chains.size());
  if (refusal != DONE) return refusal;
  DraftRows rows(*m, *p, *words, std::max<int64_t>(most, chains.size()));
  const int64_t bytes = rows.bytes;
  std::vector<char> drafted(total * bytes), fed(rows.hidden.size());
  std::vector<int64_t> tokens(most);
  for (int64_t step = 0; step < deepest; step++) {
    rows.clear();
    for (size_t i = 0, first = 0; i < chains.size(); first += chains[i++].steps) {
      const Chain& c = chains[i];
      if (step >= c.steps) continue;
      const int64_t n = step ? 1 : c.num_pending, at = step ? c.position + c.num_pending + step - 1 : c.position;
      const int64_t start = rows.count();
      rows.segments.push_back(segment_at(start, start + n, at, at + n, c.base, c.keys));
      for (int64_t j = 0; j < n; j++) {
        char* state = fed.data() + rows.count() * bytes;
        if (step) std::memcpy(state, drafted.data() + (first + step - 1) * bytes, bytes);
        else tokens[rows.count()] = c.pending[j], take_state(*m, *f, given[i] + j * bytes, state);
        rows.add(at + j, slot_at(c.base, c.keys, at + j));
      }
    }
    fuse(*m, *f, fed.data(), step || !reads_tokens ? nullptr : tokens.data(), *words, rows.count(),
         rows.hidden.data(), (int)threads);
    rows.run();
    rows.keep_last();
    int64_t first = 0, live = 0;
    for (const Chain& c : chains) {
      if (step < c.steps) std::memcpy(drafted.data() + (first + step) * bytes, rows.state(live++), bytes);
      first += c.steps;
    }
  }
  if (total) head(*m, drafted.data(), total, raw, (int)threads);
  sample_trees(*m, info, limit, branches, noisy, trees, threads);
  for (Sampling& t : trees) {
    keep_best(t.tree->most, t.tokens, t.parents, t.scores);
    t.tree->nodes = t.tokens.size();
    std::copy(t.tokens.begin(), t.tokens.end(), t.tree->tokens);
    std::copy(t.parents.begin(), t.parents.end(), t.tree->parents);
    std::copy(t.scores.begin(), t.scores.end(), t.tree->scores);
  }
  return DONE;
}

}  // extern "C"
