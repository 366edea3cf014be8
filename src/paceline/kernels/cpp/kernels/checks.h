// Refusals: what comes from elsewhere is checked before it is used.

#pragma once

namespace {

// What an entry point returns; where it is not DONE, nothing was done. Callers give ids, positions and slots: the entry
// point compares each of them with the size of what it indexes, once a row and once a key, before it uses the first.
enum Refusal : int {
  DONE = 0, BAD_POSITION = 1, BAD_TOKEN = 2, BAD_SLOT = 3, BAD_SEGMENT = 4, BAD_ADAPTERS = 5, BAD_COUNT = 6,
  LOST = 7  // another rank is gone; what was computed counts for nothing
};

// Whether first .. first + count - 1 lie in 0 .. end - 1.
inline bool within(int64_t first, int64_t count, int64_t end) {
  return first >= 0 && count >= 0 && count <= end && first <= end - count;
}

// Whether all of x lie in least .. end - 1. A number below `least` becomes a large one, as the difference is unsigned.
inline bool all_within(const int64_t* x, int64_t n, int64_t least, int64_t end) {
  uint64_t worst = 0;
  for (int64_t i = 0; i < n; i++) worst = std::max(worst, (uint64_t)x[i] - (uint64_t)least);
  return n == 0 || (end > least && worst < (uint64_t)end - (uint64_t)least);
}

// Keys 0 .. n - 1 of a sequence, contiguous from `base` on or listed; places among them are 32 bits wide.
inline bool keys_within(int64_t base, const int64_t* keys, int64_t n, int64_t slots) {
  if (n < 0 || n > INT32_MAX) return false;
  return base >= 0 ? within(base, n, slots) : keys && all_within(keys, n, 0, slots);
}

constexpr int64_t SCALE_ROOM = 16;  // bytes behind a packed row's numbers: its scale is in the first four

// Elements of a row of K or V.
inline int64_t cache_row(const Model& m, const Pass& p) { return m.head_dim + (p.packed ? SCALE_ROOM : 0); }
inline int64_t cache_slots(const Model& m, const Pass& p) { return p.head_stride / cache_row(m, p); }

Refusal check_segments(const Model& m, const Pass& p) {
  int64_t row = 0;
  for (int64_t i = 0; i < p.num_segments; i++) {
    const Segment& s = p.segments[i];
    if (s.start != row || s.stop < row || s.stop > p.rows) return BAD_SEGMENT;  // every row in one of them, in order
    if (s.prefix < 0 || s.prefix > s.num_keys || s.stop - s.start > s.num_keys) return BAD_SEGMENT;
    if (!keys_within(s.base, s.keys, s.num_keys, cache_slots(m, p))) return BAD_SLOT;
    row = s.stop;
  }
  return row == p.rows ? DONE : BAD_SEGMENT;
}

Refusal check_adapters(const Pass& p) {
  int64_t row = 0;
  for (int64_t i = 0; i < p.num_adapters; i++) {
    const AdapterRange& a = p.adapters[i];
    if (a.start < row || a.stop <= a.start || a.stop > p.rows || a.rank < 1 || !a.adapter) return BAD_ADAPTERS;
    row = a.stop;
  }
  return DONE;
}

// Rows start .. stop - 1 of one sequence: a chain, or a tree where `visible` says what they see of the last keys.
inline Segment segment_at(int64_t start, int64_t stop, int64_t prefix, int64_t num_keys, int64_t base,
                          const int64_t* keys, const uint8_t* visible = nullptr, const int64_t* places = nullptr) {
  Segment s;
  s.start = start, s.stop = stop, s.prefix = prefix, s.num_keys = num_keys, s.base = base, s.keys = keys;
  s.visible = visible, s.block_positions = places;
  return s;
}

Refusal check_rows(const Model& m, const Pass& p) {
  const int64_t slots = cache_slots(m, p);
  if (p.rows < 0 || p.threads < 1) return BAD_COUNT;
  if (!all_within(p.positions, p.rows, 0, m.rotated ? p.num_positions : INT64_MAX)) return BAD_POSITION;
  return (p.slots ? all_within(p.slots, p.rows, -1, slots) : within(p.slot_base, p.rows, slots)) ? DONE : BAD_SLOT;
}

Refusal check_pass(const Model& m, const Pass& p, int start, int stop) {
  if (start < 0 || stop > p.layers) return BAD_COUNT;
  Refusal found = check_rows(m, p);
  if (found == DONE) found = check_segments(m, p);
  return found == DONE ? check_adapters(p) : found;
}

Refusal check_view(const Model& m, const SparseView& v, const Chain& c, int64_t slots, int64_t keys) {
  if (v.sinks < 0 || v.window < 1 || v.window > INT32_MAX || c.num_pending != 1) return BAD_COUNT;
  if (!within(c.scratch, v.sinks, slots)) return BAD_SLOT;
  const int64_t gap = keys - v.sinks - v.window;  // keys that the chain's last row does not see
  return m.rotated && v.sinks && gap >= v.num_gaps ? BAD_POSITION : DONE;
}

Refusal check_chain(const Model& m, const Pass& p, const Chain& c) {
  const int64_t slots = cache_slots(m, p);
  if (c.num_pending < 1 || c.steps < 1) return BAD_COUNT;
  if (c.position < 0) return BAD_POSITION;
  if (c.position > slots || c.num_pending > slots || c.steps > slots) return BAD_SLOT;  // else their sum may overflow
  const int64_t keys = c.position + c.num_pending + c.steps - 1;
  if (m.rotated && keys > p.num_positions) return BAD_POSITION;
  if (!all_within(c.pending, c.num_pending, 0, m.tokens)) return BAD_TOKEN;
  if (!keys_within(c.base, c.keys, keys, slots)) return BAD_SLOT;
  if (c.view && c.view->sinks && p.packed) return BAD_COUNT;  // sinks are turned where keys are activations
  return c.view ? check_view(m, *c.view, c, slots, keys) : DONE;
}

Refusal check_chains(const Model& m, const Pass& p, int64_t limit, const Chain* chains, int64_t count) {
  if (p.threads < 1 || count < 0 || limit < 1 || limit > m.vocab) return BAD_COUNT;
  for (int64_t i = 0; i < count; i++) {
    const Refusal found = check_chain(m, p, chains[i]);
    if (found != DONE) return found;
  }
  return DONE;
}

}  // namespace
