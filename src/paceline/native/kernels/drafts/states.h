// Drafts from one product of all states with the head (Lyanna).

#pragma once

namespace {

// A tree of Algorithm 1: the logits of its levels, and its nodes; node 0 is the root, node n is entry n - 1.
struct Sampled {
  int64_t root, levels, position;  // position: of the root's children
  const float* logits;             // [levels, vocab] raw
  const Rules* rules;
  int64_t room;
  std::vector<int64_t> tokens, parents, queue{0};
  std::vector<double> scores;
};

// Algorithm 1 for several trees at once, a level a turn (Lyanna, section 5.2).
void sample_trees(const Model& m, const TokenInfo* info, int64_t limit, int64_t branches, bool noisy,
                  std::vector<Sampled>& trees, int64_t threads) {
  std::vector<Ranked> nodes;
  std::vector<int64_t> tokens;
  std::vector<float> log_q;
  std::vector<char> factors;
  const int64_t k = std::min(branches, limit), bytes = info ? info->table.k * (m.wide_activations ? 4 : 2) : 0;
  for (int64_t level = 0;; level++) {
    nodes.clear(), factors.clear();
    for (const Sampled& t : trees) {
      if (level >= t.levels) continue;
      for (int64_t node : t.queue) {
        nodes.push_back({t.logits + level * m.vocab, t.rules, t.position + level});
        const char* own = info ? (const char*)info->factors + (node ? t.tokens[node - 1] : t.root) * bytes : nullptr;
        factors.insert(factors.end(), own, own + bytes);
      }
    }
    const int64_t rows = nodes.size();
    if (rows == 0) return;
    tokens.resize(rows * k), log_q.resize(rows * k);
    if (info)
      rank(m, info->table, nullptr, factors.data(), limit, k, noisy, nodes, tokens.data(), log_q.data(), threads);
    else {
      Children job(limit, k, noisy, nodes, tokens.data(), log_q.data());
      team().run(std::clamp<int64_t>(rows * m.vocab / DRAWS, 1, threads), job);
    }
    int64_t at = 0;
    for (Sampled& t : trees) {
      if (level >= t.levels) continue;
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
// states with the head, and Algorithm 1 on their logits and on those that are left over. All numbers come in one list:
//     sequences, branches, 1 where the rows of a text see the token behind them, 1 where drafts are drawn with the
//         target's noise
//     for each: address of the pending tokens, their number, position of the first, base (-1: keys are listed),
//         address of the keys, steps (0: nothing new is drafted), root, position that the root's children will have in
//         the text, address of the rules (0: none), nodes of the new tree that come out at most, the best; address of the
//         logits left over [levels, vocab], levels (0: none), nodes of the second tree; address of the target's states in
//         front of the pending tokens [their number, d_model]
// raw [steps of all, vocab] is filled.
// What comes out, for each tree, the second ones of a sequence behind its first: nodes, then tokens and parents, as
// many as fit each; `scores` has those of all trees likewise. `p` as for `pl_roll`. Returns a `Refusal`. Source:
// Lyanna, sections 4 and 5.
int pl_sample(const Model* m, const Pass* p, const void* embedding, int64_t limit, const Fuse* f, const TokenInfo* info,
              const int64_t* list, float* raw, int64_t* out, double* scores) {
  constexpr int64_t NUMBERS = 14;
  const int64_t count = list[0], branches = list[1], threads = p->threads;
  const bool reads_tokens = list[2] != 0, noisy = list[3] != 0;
  const int64_t* of_sequence = list + 4;
  if (count < 0 || branches < 1 || check_fuse(*m, *f) != DONE || f->state.n == 0) return BAD_COUNT;
  if (info &&
      ((info->table.kind == F32) != (m->wide_activations != 0) || info->table.n != m->vocab || info->table.k < 1))
    return BAD_COUNT;
  std::vector<Chain> chains;
  std::vector<const char*> given;  // states of each chain
  std::vector<Sampled> trees;
  int64_t most = 0, total = 0, deepest = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t* s = of_sequence + NUMBERS * i;
    const int64_t steps = s[5], root = s[6], position = s[7], levels = s[11];
    const Rules* rules = (const Rules*)s[8];
    if (steps < 0 || levels < 0 || root < 0 || root >= m->vocab || (steps && (s[9] < 1 || !s[13])) ||
        (levels && s[12] < 1))
      return BAD_COUNT;
    if (steps) {
      given.push_back((const char*)s[13]);
      chains.push_back(
          {(const int64_t*)s[0], s[1], s[2], steps, s[3], (const int64_t*)s[4], 0, nullptr, nullptr, 0, rules});
      trees.push_back({root, steps, position, raw + total * m->vocab, rules, s[9], {}, {}, {0}, {}});
      most += s[1], total += steps, deepest = std::max(deepest, steps);
    }
    if (levels) trees.push_back({root, levels, position, (const float*)s[10], rules, s[12], {}, {}, {0}, {}});
  }
  const Refusal refusal = check_chains(*m, *p, limit, chains.data(), chains.size());
  if (refusal != DONE) return refusal;
  const int64_t bytes = m->d_model * (m->wide_activations ? 4 : 2);
  std::vector<char> hidden(std::max<int64_t>(most, chains.size()) * bytes), drafted(total * bytes), fed(hidden.size());
  std::vector<int64_t> positions(most), slots(most), tokens(most);
  std::vector<Segment> segments;
  for (int64_t step = 0; step < deepest; step++) {
    int64_t rows = 0, first = 0, live = 0;
    segments.clear();
    for (size_t i = 0; i < chains.size(); first += chains[i++].steps) {
      const Chain& c = chains[i];
      if (step >= c.steps) continue;
      const int64_t n = step ? 1 : c.num_pending, at = step ? c.position + c.num_pending + step - 1 : c.position;
      segments.push_back({rows, rows + n, at, at + n, c.base, c.keys, nullptr, nullptr});
      for (int64_t j = 0; j < n; j++, rows++) {
        positions[rows] = at + j, slots[rows] = c.base >= 0 ? c.base + at + j : c.keys[at + j];
        if (step) std::memcpy(fed.data() + rows * bytes, drafted.data() + (first + step - 1) * bytes, bytes);
        else tokens[rows] = c.pending[j], take_state(*m, *f, given[i] + j * bytes, fed.data() + rows * bytes);
      }
    }
    fuse(*m, *f, fed.data(), step || !reads_tokens ? nullptr : tokens.data(), embedding, rows, hidden.data(),
         (int)threads);
    Pass pass = *p;
    pass.rows = rows, pass.hidden_in = pass.hidden_out = hidden.data(), pass.positions = positions.data(),
    pass.slots = slots.data();
    pass.segments = segments.data(), pass.num_segments = segments.size();
    run_layers(*m, pass, 0, (int)p->layers);
    first = 0, live = 0;
    for (const Chain& c : chains) {
      if (step < c.steps)
        std::memcpy(drafted.data() + (first + step) * bytes, hidden.data() + (segments[live++].stop - 1) * bytes,
                    bytes);
      first += c.steps;
    }
  }
  if (total) head(*m, drafted.data(), total, raw, (int)threads);
  sample_trees(*m, info, limit, branches, noisy, trees, threads);
  for (Sampled& t : trees) {
    keep_best(t.room, t.tokens, t.parents, t.scores);
    out[0] = t.tokens.size();
    std::copy(t.tokens.begin(), t.tokens.end(), out + 1),
        std::copy(t.parents.begin(), t.parents.end(), out + 1 + t.room);
    std::copy(t.scores.begin(), t.scores.end(), scores);
    out += 1 + 2 * t.room, scores += t.room;
  }
  return DONE;
}

}  // extern "C"
