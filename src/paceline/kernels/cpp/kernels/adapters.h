// Ranges of rows with low-rank adapters.

#pragma once

namespace {

enum Which { QKV = 0, OUT = 1, UP = 2, DOWN = 3, PAIRS = 4 };  // of a layer's adapters

// The part of a range that lies in one chunk of ROWS rows.
struct Piece {
  int64_t begin, end;
  const LowRank* adapter;  // [layers][PAIRS]
  bool same;               // the piece before it has the same chunk and the same adapter
};
struct Pieces {
  std::vector<Piece> all;
  std::vector<int64_t> first;  // [chunks + 1] first piece of each chunk
};
thread_local Pieces t_pieces;

// Cuts a pass's ranges where its chunks of rows end.
inline void cut(const Pass& p, Pieces& pieces) {
  pieces.all.clear();
  pieces.first.clear();
  int64_t range = 0;
  for (int64_t r0 = 0; r0 < p.rows && p.num_adapters; r0 += ROWS) {
    const int64_t end = std::min<int64_t>(r0 + ROWS, p.rows);
    const LowRank* last = nullptr;
    pieces.first.push_back((int64_t)pieces.all.size());
    while (range < p.num_adapters && p.adapters[range].start < end) {
      const AdapterRange& a = p.adapters[range];
      pieces.all.push_back({std::max(a.start, r0), std::min(a.stop, end), a.adapter, a.adapter == last});
      last = a.adapter;
      if (a.stop > end) break;  // it goes on in the next chunk
      range++;
    }
  }
  pieces.first.push_back((int64_t)pieces.all.size());
}

}  // namespace
