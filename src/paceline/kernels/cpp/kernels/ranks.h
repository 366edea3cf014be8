// What ranks, processes that each compute a part of every product, give each other.
//
// The memory they share begins with a line of this header, a cell of each rank, and two buffers of each. Who joins writes
// its part to one of its buffers, counts up its cell, and reads the others' parts once their cells have come as far. The
// next join uses the other buffer, and nobody comes to the one after it before all have read: so one meeting a join is
// enough. Sums begin with rank 0's part, at every rank.
//
// A rank that waits spins for a bounded time and then sleeps on the other's cell. The wait ends where the process of
// another rank has ended, and where rank 0 gives the others up.

#pragma once

namespace {

constexpr int64_t RANK_LINE = 128;      // bytes of the header, and of a cell
constexpr int64_t RANK_LOOK_NS = 5000000;  // of sleep, between two looks at the others' processes

struct RankCell {
  std::atomic<uint32_t> joins, sleepers;
};

struct RankHeader {
  std::atomic<uint32_t> lost;  // a rank is gone: nobody waits any more
};

inline RankHeader& rank_header(const Ranks& r) { return *(RankHeader*)r.memory; }
inline RankCell& rank_cell(const Ranks& r, int64_t rank) {
  return *(RankCell*)((char*)r.memory + RANK_LINE * (1 + rank));
}
inline char* rank_buffer(const Ranks& r, int64_t rank) {
  return (char*)r.memory + RANK_LINE * (1 + r.count) + (2 * rank + (r.joins & 1)) * r.capacity;
}

inline void rank_sleep(std::atomic<uint32_t>& word, uint32_t old) {
#if defined(__linux__)
  const timespec moment{0, RANK_LOOK_NS};
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT, old, &moment, nullptr, 0);
#else
  (void)word, (void)old;
  std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

// Whether a process of another rank has ended: its file descriptor is readable then.
inline bool rank_ended(const Ranks& r) {
  std::vector<pollfd> ends;
  for (int64_t i = 0; i < r.num_lives; i++) ends.push_back({(int)r.lives[i], POLLIN, 0});
  return poll(ends.data(), ends.size(), 0) > 0;
}

inline bool rank_waits(const Ranks& r, RankCell& other, uint32_t wanted) {
  const auto there = [&] { return (int32_t)(other.joins.load(std::memory_order_acquire) - wanted) >= 0; };
  const Clock::time_point began = Clock::now();
  for (int64_t turn = 0; !there(); turn++) {
    pause();
    if (turn % 64 == 63 && microseconds(Clock::now() - began) > r.spin_us) break;
  }
  if (there()) return true;
  other.sleepers.fetch_add(1);
  bool well = true;
  while (well && !there()) {
    const uint32_t seen = other.joins.load();
    if ((int32_t)(seen - wanted) < 0) rank_sleep(other.joins, seen);
    well = there() || !(rank_header(r).lost.load() || rank_ended(r) ||
                        microseconds(Clock::now() - began) > r.timeout_us);
  }
  other.sleepers.fetch_sub(1);
  return well;
}

// After this rank's part is in its buffer: waits until all others' are in theirs. False: one is gone.
inline bool rank_meet(const Ranks& r) {
  RankCell& own = rank_cell(r, r.rank);
  const uint32_t now = (uint32_t)r.joins + 1;
  own.joins.store(now);
#if defined(__linux__)
  if (own.sleepers.load()) syscall(SYS_futex, (uint32_t*)&own.joins, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
  for (int64_t i = 0; i < r.count; i++)
    if (i != r.rank && !rank_waits(r, rank_cell(r, i), now)) return false;
  return true;
}

// One join of so many bytes in pieces that a buffer holds: `give` writes piece [at, at + n) to a buffer, `take` reads it
// from all of them.
template <class Give, class Take> bool rank_join(Ranks& r, int64_t units, int64_t unit_bytes, Give give, Take take) {
  const int64_t most = std::max<int64_t>(1, r.capacity / unit_bytes);
  r.collectives++, r.bytes += units * unit_bytes;
  for (int64_t at = 0; at < units; at += most) {
    const int64_t n = std::min(most, units - at);
    give(at, n, rank_buffer(r, r.rank));
    if (!rank_meet(r)) return false;
    take(at, n);
    r.joins++;
  }
  return true;
}

// x = the sum of all ranks' x.
template <class T> bool rank_sum(Ranks& r, T* x, int64_t count) {
  return rank_join(
      r, count, sizeof(T), [&](int64_t at, int64_t n, char* to) { std::memcpy(to, x + at, n * sizeof(T)); },
      [&](int64_t at, int64_t n) {
        std::memcpy(x + at, rank_buffer(r, 0), n * sizeof(T));
        for (int64_t i = 1; i < r.count; i++) {
          const T* more = (const T*)rank_buffer(r, i);
          for (int64_t j = 0; j < n; j++) x[at + j] += more[j];
        }
      });
}

// Of rows that are `stride` bytes apart every rank has `own` bytes, rank after rank; afterwards each has all.
inline bool rank_gather(Ranks& r, char* x, int64_t rows, int64_t own, int64_t stride) {
  return rank_join(
      r, rows, own,
      [&](int64_t at, int64_t n, char* to) {
        for (int64_t i = 0; i < n; i++) std::memcpy(to + i * own, x + (at + i) * stride + r.rank * own, own);
      },
      [&](int64_t at, int64_t n) {
        for (int64_t rank = 0; rank < r.count; rank++)
          for (int64_t i = 0; i < n && rank != r.rank; i++)
            std::memcpy(x + (at + i) * stride + rank * own, rank_buffer(r, rank) + i * own, own);
      });
}

}  // namespace

extern "C" {

// x [count] float64 (wide) or float32 becomes the sum of all ranks' x. Returns a `Refusal`.
int pl_rank_sum(Ranks* r, void* x, int64_t count, int wide) {
  if (count < 0) return BAD_COUNT;
  return (wide ? rank_sum(*r, (double*)x, count) : rank_sum(*r, (float*)x, count)) ? DONE : LOST;
}

// Of each of the rows of x, `own` bytes of every rank, rank after rank, this rank's become all ranks'. Returns a `Refusal`.
int pl_rank_gather(Ranks* r, void* x, int64_t rows, int64_t own) {
  if (rows < 0 || own < 1 || own > r->capacity) return BAD_COUNT;
  return rank_gather(*r, (char*)x, rows, own, own * r->count) ? DONE : LOST;
}

// This rank has made no join yet; what another one waits for ends (lost = 1), or may begin again (0). -1: as it is.
int pl_rank_begin(Ranks* r, int lost) {
  if (lost >= 0) rank_header(*r).lost.store((uint32_t)lost);
  if (lost == 1) return DONE;
  r->joins = 0;
  rank_cell(*r, r->rank).joins.store(0), rank_cell(*r, r->rank).sleepers.store(0);
  return DONE;
}

}  // extern "C"
