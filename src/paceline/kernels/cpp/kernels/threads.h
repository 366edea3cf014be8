// A team of threads and its jobs.

#pragma once

namespace {

// Stages last microseconds, but another process may keep a thread off its core for milliseconds. So nobody waits for a
// thread that does not run: a job is a row of stages, threads claim a stage in pieces, and the next stage begins when
// all pieces are done, whichever threads did them. A thread that lost its core is waited for only if it had begun a
// piece. A thread that waits spins for a short while and then sleeps. A caller that waited long goes on without the
// other threads for a few times as long, and for twice that if it has to wait again soon: so a short disturbance costs
// little more than itself, and beside a process that stays busy the caller seldom tries the others.
//
// Which thread computes a piece changes no bits.

constexpr int SPINS = 20000;  // turns that a thread spins before it sleeps: longer than from one pass to the next
constexpr int64_t LONG_WAIT = 300;   // us: a caller's wait for a piece is long above this and a quarter of its job
constexpr int64_t JUDGED = 5;        // stages of a job whose waits count: no stage is a quarter of such a job
constexpr int64_t ALONE = 4;         // a caller goes on alone for so many times its wait, then for twice as long
constexpr int64_t LONGEST = 400000;  // us that it does so at most
constexpr int MOST_THREADS = 256;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;
inline int64_t microseconds(Clock::duration d) {
  return std::chrono::duration_cast<std::chrono::microseconds>(d).count();
}

// Where a thread's part of a stage begins: a stage's units are dealt in steps, and each thread begins with its own
// part.
inline int64_t part_of(int64_t units, int64_t step, int64_t thread, int64_t width) {
  return std::min(units, (units + step - 1) / step * thread / width * step);
}

// What a thread claimed of a stage: units begin .. end - 1, after which it will claim those up to `limit`.
struct Claim {
  int64_t begin, end, limit;
  int64_t thread, width;  // who, of how many
  bool fresh;             // this thread's first of the stage
};

// What the threads of a team work at.
struct Job {
  virtual int64_t stages() const = 0;
  virtual int64_t units(int64_t stage) const = 0;  // one or more
  virtual int64_t step(int64_t stage) const = 0;   // units that are claimed together
  virtual void work(int64_t stage, const Claim& claim) = 0;
 protected:
  ~Job() = default;
};

void free_tiles();

// The threads of one calling thread, itself the first.
class Team {
 public:
  // Runs a job by so many threads, or by fewer where the system gives no more. An exception of a job ends the process.
  void run(int64_t threads, Job& job) {
    int64_t T = std::min<int64_t>(threads, MOST_THREADS);
    const Clock::time_point start = Clock::now();
    if (T > 1 && start < alone_until_) T = 1;
    if (T > 1) T = std::min(T, hire(T - 1) + 1);
    if (T == 1) {
      for (int64_t stage = 0; stage < job.stages(); stage++) {
        const int64_t units = job.units(stage);
        job.work(stage, {0, units, units, 0, 1, true});
      }
      return free_tiles();
    }
    Clock::duration longest{};
    const bool wider = T > width_.exchange(T);
    if (wider) wider_.fetch_add(1), wake(wider_);
    job_ = &job, first_ = now_.load(std::memory_order_relaxed) + 1, last_ = first_ + (uint32_t)job.stages();
    open(first_);
    for (uint32_t stage = first_; stage != last_;) {
      take(stage);
      const Clock::time_point before = Clock::now();
      if (const uint32_t next = spin(stage); next != stage) { stage = next; continue; }
      stage = sleep(stage);
      longest = std::max(longest, Clock::now() - before);
    }
    free_tiles();
    if (job.stages() >= JUDGED && microseconds(longest) > LONG_WAIT) judge(longest, start);
  }

  ~Team() {
    ended_ = true;
    wider_.fetch_add(1), wake(wider_);
    publish(now_.load() + 1);
    for (std::thread& t : threads_) t.join();
  }

 private:
  // An open stage. Every claim carries the stage's number, so a late thread cannot claim a piece of another stage that
  // has taken this slot since; and a thread reads nothing of a job before it has a piece, which the job waits for.
  struct alignas(64) Part { std::atomic<uint64_t> next{0}; };  // number << 32 | units claimed
  struct alignas(64) Slot {
    std::atomic<int64_t> units{0}, step{1}, width{0};
    alignas(64) std::atomic<int64_t> left{0};
    Part parts[MOST_THREADS];
  };
  static constexpr uint32_t SLOTS = 4;

  void open(uint32_t stage) {
    Slot& s = slots_[stage % SLOTS];
    const bool work = stage != last_;
    const int64_t units = work ? job_->units(stage - first_) : 0, width = width_;
    for (int64_t t = 0; t < width; t++) s.parts[t].next.store(~0ull, std::memory_order_relaxed);  // no stage's number
    std::atomic_thread_fence(std::memory_order_release);
    s.units.store(units, std::memory_order_relaxed), s.left.store(units, std::memory_order_relaxed);
    s.step.store(work ? job_->step(stage - first_) : 1, std::memory_order_relaxed),
        s.width.store(width, std::memory_order_relaxed);
    for (int64_t t = 0; t < width; t++) s.parts[t].next.store((uint64_t)stage << 32, std::memory_order_release);
    publish(stage);
  }

  // Works at a stage until no piece is left, at its own part first; whoever does the last piece opens the next stage.
  void take(uint32_t stage, int64_t t = 0) {
    Slot& s = slots_[stage % SLOTS];
    bool fresh = true;
    const int64_t width = s.width.load(std::memory_order_relaxed);  // of another stage, perhaps: no claim succeeds then
    if (t >= width) return;
    for (int64_t i = 0; i < width; i++)
      if (take_part(s, stage, t, (t + i) % width, fresh)) return open(stage + 1);
  }

  // Claims in one part until nothing is left there; whether the last piece of the stage was among them.
  bool take_part(Slot& s, uint32_t stage, int64_t t, int64_t part, bool& fresh) {
    std::atomic<uint64_t>& next = s.parts[part].next;
    uint64_t at = next.load(std::memory_order_acquire);
    while (at >> 32 == stage) {
      const int64_t units = s.units.load(std::memory_order_relaxed), step = s.step.load(std::memory_order_relaxed);
      const int64_t width = s.width.load(std::memory_order_relaxed);
      std::atomic_thread_fence(
          std::memory_order_acquire);  // what was read may be another stage's: the claim fails then
      const int64_t limit = part_of(units, step, part + 1, width),
                    begin = part_of(units, step, part, width) + (int64_t)(uint32_t)at;
      if (begin >= limit) return false;
      const int64_t size = (std::max<int64_t>((limit - begin) / 2, 1) + step - 1) / step * step,
                    end = std::min(limit, begin + size);
      if (!next.compare_exchange_weak(at, at + (uint64_t)(end - begin), std::memory_order_acq_rel)) continue;
      job_->work(stage - first_, {begin, end, limit, t, width, fresh});
      fresh = false;
      if (s.left.fetch_sub(end - begin, std::memory_order_acq_rel) == end - begin) return true;
      at = next.load(std::memory_order_acquire);
    }
    return false;
  }

  void work(int64_t t) {
    uint32_t stage = 0;
    while (!ended_) {
      const uint32_t old = wider_.load();
      if (width_.load() <= t) {  // not needed until a job is wider
        while (!ended_ && wider_.load() == old) wait(wider_, old);
        continue;
      }
      uint32_t next = spin(stage);
      if (next == stage) {
        free_tiles();
        next = sleep(stage);
      }
      stage = next;
      if (!ended_) take(stage, t);
    }
  }

  uint32_t spin(uint32_t old) const {
    for (int i = 0; i < SPINS; i++) {
      const uint32_t now = now_.load(std::memory_order_acquire);
      if (now != old) return now;
      pause();
    }
    return old;
  }

  uint32_t sleep(uint32_t old) {
    sleepers_.fetch_add(1);
    while (now_.load() == old) wait(now_, old);
    sleepers_.fetch_sub(1);
    return now_.load();
  }

  void publish(uint32_t stage) {
    now_.store(stage);
    if (sleepers_.load() > 0) wake(now_);
  }

  // Sleep while a word is `old`, or for a moment: the caller looks again.
  static void wait(std::atomic<uint32_t>& word, uint32_t old) {
#if defined(__linux__)
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    (void)word, (void)old;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
  }
  static void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
  }

  // The caller waited that long in a job.
  void judge(Clock::duration wait, Clock::time_point start) {
    const Clock::time_point now = Clock::now();
    if (wait <= (now - start) / 4) return;
    const bool soon = now - alone_until_ < alone_;
    alone_ = std::min<Clock::duration>(std::max(ALONE * wait, soon ? 2 * alone_ : Clock::duration{}),
                                       std::chrono::microseconds(LONGEST));
    alone_until_ = now + alone_;
  }

  int64_t hire(int64_t wanted) {
    try {
      while ((int64_t)threads_.size() < wanted)
        threads_.emplace_back([this, t = (int64_t)threads_.size() + 1] { work(t); });
    } catch (const std::system_error&) {  // the system gives no more
    }
    return (int64_t)threads_.size();
  }

  std::vector<std::thread> threads_;
  Slot slots_[SLOTS];
  alignas(64) std::atomic<uint32_t> now_{0};  // the stage that is open; between two jobs one without units
  std::atomic<int> sleepers_{0};
  std::atomic<uint32_t> wider_{0};  // jobs that were wider than the one before
  std::atomic<int64_t> width_{1};   // threads of the last job
  alignas(64) Job* job_ = nullptr;
  uint32_t first_ = 0, last_ = 0;  // the job's first stage, and one past its last
  std::atomic<bool> ended_{false};
  Clock::duration alone_{};          // how long the caller went on without the other threads, last time
  Clock::time_point alone_until_{};  // when that ends or ended
};

// The calling thread's own. A forked process has no other threads: it gets a new team, and the old one stays as it was.
Team& team() {
  struct Owner {
    Team* team = nullptr;
    pid_t process = 0;
    ~Owner() { if (process == getpid()) delete team; }
  };
  static thread_local Owner owner;
  if (owner.process != getpid()) owner.team = new Team, owner.process = getpid();
  return *owner.team;
}

}  // namespace
