// A byte stream through memory that two processes share: a ring with one writer and one reader.
//
// Who has to wait spins for a bounded time and then parks on an eventfd, beside which it watches a socket for the other
// side's end. Python calls this without its lock, so that a wait holds up no other thread. `runtime/shared.py` has the
// same in Python, over the same memory; each end may be either.
//
// A ring, at a multiple of 64 bytes: head (bytes written), tail (bytes read), whether the reader is parked, whether the
// writer is, each in a cache line of its own; then `capacity` bytes, a power of two. Head and tail only grow; the other
// process may write anything there, so that they are checked before they are used.

#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

namespace {

enum Status { DONE, LATE, CLOSED, INTERRUPTED, BROKEN, LARGE };

constexpr char MARK[] = "PLf1";
constexpr int64_t PREFIX = 8;   // bytes in front of a frame: the mark, and its length
constexpr int64_t TURNS = 32;   // of a spin between two looks at the time

struct Ring {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
  alignas(64) std::atomic<uint64_t> reader_parked;
  alignas(64) std::atomic<uint64_t> writer_parked;
  alignas(64) uint8_t bytes[1];
};
static_assert(sizeof(std::atomic<uint64_t>) == 8 && std::atomic<uint64_t>::is_always_lock_free, "it is shared memory");

struct Pipe {
  Ring* ring;
  int64_t capacity;
  int64_t data_fd, room_fd;  // eventfds: bytes came, bytes went
  int64_t life_fd;           // hangs up when the other process ends
  int64_t spin_us;
};

using Clock = std::chrono::steady_clock;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t since_us(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
}

template <class Ready> bool spin(const Ready& ready, int64_t us) {
  if (ready()) return true;
  if (us <= 0) return false;
  const Clock::time_point start = Clock::now();
  do
    for (int64_t i = 0; i < TURNS; i++) {
      pause();
      if (ready()) return true;
    }
  while (since_us(start) < us);
  return false;
}

void ring_bell(int64_t fd, std::atomic<uint64_t>& parked) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // either it sees what was stored before, or this sees it parked
  if (!parked.load(std::memory_order_relaxed)) return;
  parked.store(0, std::memory_order_relaxed);
  const uint64_t one = 1;
  while (write((int)fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

// Waits until `ready`; timeout_us below 0: for ever.
template <class Ready>
int wait(const Ready& ready, std::atomic<uint64_t>& parked, int64_t fd, int64_t life, int64_t spin_us, int64_t timeout_us) {
  if (spin(ready, timeout_us < 0 ? spin_us : std::min(spin_us, timeout_us))) return DONE;
  const Clock::time_point start = Clock::now();
  for (;;) {
    parked.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (ready()) return parked.store(0, std::memory_order_relaxed), DONE;
    const int64_t left = timeout_us < 0 ? -1 : std::max<int64_t>(0, timeout_us - since_us(start));
    pollfd fds[2] = {{(int)fd, POLLIN, 0}, {(int)life, 0, 0}};
    const timespec span = {left / 1000000, left % 1000000 * 1000};
    const int found = ppoll(fds, 2, left < 0 ? nullptr : &span, nullptr);
    const bool interrupted = found < 0 && errno == EINTR;
    parked.store(0, std::memory_order_relaxed);
    if (found > 0 && fds[0].revents) {
      uint64_t count;
      if (read((int)fd, &count, sizeof count) < 0 && errno == EBADF) return CLOSED;
    }
    if (ready()) return DONE;
    if (interrupted) return INTERRUPTED;
    if (found < 0 || (found > 0 && fds[1].revents)) return CLOSED;
    if (left == 0) return LATE;
  }
}

// Copies between a ring and straight memory, around its end.
template <class Copy> void around(uint64_t at, int64_t capacity, int64_t size, const Copy& copy) {
  const int64_t first = (int64_t)(at & (uint64_t)(capacity - 1)), straight = std::min(size, capacity - first);
  copy(first, 0, straight);
  if (size > straight) copy(0, straight, size - straight);
}

// A frame's prefix and what follows it, as one run of bytes.
struct Framed {
  uint8_t prefix[PREFIX];
  const uint8_t* data;
  Framed(const void* from, int64_t size) : data((const uint8_t*)from) {
    const uint32_t length = (uint32_t)size;
    memcpy(prefix, MARK, 4), memcpy(prefix + 4, &length, 4);
  }
  void copy(int64_t at, int64_t size, uint8_t* to) const {
    const int64_t head = std::clamp<int64_t>(PREFIX - at, 0, size);
    memcpy(to, prefix + at * (head > 0), head);
    memcpy(to + head, data + at + head - PREFIX, size - head);
  }
};

int write_some(const Pipe& p, const Framed& frame, int64_t size, int64_t* done, int64_t timeout_us) {
  Ring& r = *p.ring;
  const uint64_t head = r.head.load(std::memory_order_relaxed);
  const auto used = [&] { return head - r.tail.load(std::memory_order_acquire); };
  const int why = wait([&] { return used() != (uint64_t)p.capacity; }, r.writer_parked, p.room_fd, p.life_fd, p.spin_us, timeout_us);
  if (why != DONE) return why;
  const uint64_t before = used();
  if (before > (uint64_t)p.capacity) return BROKEN;
  const int64_t n = std::min(size - *done, p.capacity - (int64_t)before);
  around(head, p.capacity, n, [&](int64_t at, int64_t off, int64_t part) { frame.copy(*done + off, part, r.bytes + at); });
  r.head.store(head + (uint64_t)n, std::memory_order_release);
  *done += n;
  ring_bell(p.data_fd, r.reader_parked);
  return DONE;
}

int read_some(const Pipe& p, uint8_t* to, int64_t size, int64_t* done, int64_t timeout_us) {
  Ring& r = *p.ring;
  const uint64_t tail = r.tail.load(std::memory_order_relaxed);
  const auto there = [&] { return r.head.load(std::memory_order_acquire) - tail; };
  const int why = wait([&] { return there() != 0; }, r.reader_parked, p.data_fd, p.life_fd, p.spin_us, timeout_us);
  if (why != DONE) return why;
  const uint64_t filled = there();
  if (filled > (uint64_t)p.capacity) return BROKEN;
  const int64_t n = std::min(size - *done, (int64_t)filled);
  around(tail, p.capacity, n, [&](int64_t at, int64_t off, int64_t part) { memcpy(to + *done + off, r.bytes + at, part); });
  r.tail.store(tail + (uint64_t)n, std::memory_order_release);
  *done += n;
  ring_bell(p.room_fd, r.writer_parked);
  return DONE;
}

}  // namespace

extern "C" {

// Writes a frame of `size` bytes with its prefix, of which `*done` bytes are written already; the timeout is that of each wait
// for room.
int pl_ring_write(const Pipe* p, const void* from, int64_t size, int64_t* done, int64_t timeout_us) {
  const Framed frame(from, size);
  while (*done < PREFIX + size)
    if (const int why = write_some(*p, frame, PREFIX + size, done, timeout_us); why != DONE) return why;
  return DONE;
}

// Reads `size` bytes, of which `*done` are read already. A framed read takes a frame's prefix and then as many bytes as it says,
// where `size` has room for both; LARGE where it has not, and the prefix alone is read then.
int pl_ring_read(const Pipe* p, void* to, int64_t size, int framed, int64_t* done, int64_t timeout_us) {
  for (;;) {
    int64_t end = size;
    if (framed) {
      end = PREFIX;
      if (*done >= PREFIX) {
        uint32_t length;
        memcpy(&length, (const uint8_t*)to + 4, sizeof length);
        end += length;
        if (end > size) return LARGE;
      }
    }
    if (*done >= end) return DONE;
    if (const int why = read_some(*p, (uint8_t*)to, end, done, timeout_us); why != DONE) return why;
  }
}

}
