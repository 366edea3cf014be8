// Streams that see few keys of their main row.

#pragma once

namespace {

// Of weights [n] the `most` largest that are not below 0, of equal ones the first; their places, ascending, go to
// `chosen`.
void choose_largest(const float* weights, int64_t n, int64_t most, std::vector<int32_t>& chosen) {
  typedef int32_t __attribute__((may_alias)) bits;
  const bits* x = (const bits*)weights;  // floats from 0 on have the order of their bits
  auto above = [&](int32_t least) {
    int32_t count = 0;
    for (int64_t j = 0; j < n; j++) count += x[j] >= least;
    return (int64_t)count;
  };
  int32_t low = 0, high = INT32_MAX;  // the smallest chosen weight is at least `low` and below `high`
  if (above(0) > most)
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      (above(middle) >= most ? low : high) = middle;
    }
  int64_t equal = most - above(low + 1);
  chosen.clear();
  for (int64_t j = 0; j < n; j++)
    if (x[j] > low || (x[j] == low && equal-- > 0)) chosen.push_back((int32_t)j);
}

// The streams of one main row in one layer: what they attend to is a segment of its own.
struct Few {
  const Limit* limit;
  const Segment* streams;  // the streams' segment, which lists every key that they may see
  int64_t own;             // place of the main row's own key
  Segment segment;
  std::vector<int32_t> chosen, siblings;  // keys of `streams`
  std::vector<int64_t> keys;
  std::vector<uint8_t> visible;

  int64_t rows() const { return limit->stop - limit->start; }
  int64_t slot(int64_t j) const { return streams->base >= 0 ? streams->base + j : streams->keys[j]; }
  int64_t position(int64_t j) const {
    return j < streams->prefix || !streams->block_positions ? j : streams->block_positions[j - streams->prefix];
  }
  bool sees(int64_t row, int64_t j) const {  // a key behind those that are chosen from
    const int64_t block = streams->num_keys - streams->prefix, r = limit->start - streams->start + row;
    if (!streams->visible) return j <= streams->num_keys - (streams->stop - streams->start) + r;
    return streams->visible[r * block + j - streams->prefix];
  }

  // `weights`: of the main row, summed over heads.
  void choose(float* weights, int64_t window, const int64_t* positions) {
    weights[own] = INFINITY;
    choose_largest(weights, limit->keys, limit->most, chosen);
    siblings.clear();
    for (int64_t j = limit->keys; j < streams->num_keys; j++)
      if (sees(rows() - 1, j)) siblings.push_back((int32_t)j);
    keys.clear();
    for (int32_t j : chosen) keys.push_back(slot(j));
    for (int32_t j : siblings) keys.push_back(slot(j));
    const int64_t few = (int64_t)chosen.size(), all = (int64_t)keys.size();
    const bool cut = window > 0 && streams->num_keys > window;  // a stream stands further on: it sees fewer old keys
    segment = segment_at(limit->start, limit->stop, few, all, -1, keys.data());
    bool chain = all - few == rows();
    for (int64_t r = 0; chain && r + 1 < rows(); r++) chain = sees(r, siblings[r]) && !sees(r, siblings[r + 1]);
    if (chain && !cut) return;
    visible.assign(rows() * all, 0);
    for (int64_t r = 0; r < rows(); r++) {
      const int64_t least = cut ? positions[limit->start + r] - window : -1;
      for (int64_t j = 0; j < few; j++) visible[r * all + j] = position(chosen[j]) > least;
      for (int64_t j = few; j < all; j++) visible[r * all + j] = sees(r, siblings[j - few]);
    }
    segment.prefix = 0, segment.visible = visible.data();
  }
};

struct Limited {  // all such streams of one pass
  std::vector<Few> all;
  std::vector<int32_t> of_row;     // [rows] the limit of a main row's streams; -1: it has no such streams
  std::vector<uint8_t> segments;   // [segments] whether a segment's rows are such streams
  std::vector<float> weights;      // [limits, heads, room]
  int64_t room = 0;
};
thread_local Limited t_limited;

}  // namespace
