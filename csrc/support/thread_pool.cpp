#include "support/thread_pool.h"

#include <pthread.h>

#include <new>
#include <system_error>
#include <utility>

#include "support/cpu.h"

namespace mlx_moe {

namespace {

constexpr uint64_t kOpen = uint64_t(1) << 31, kInside = kOpen - 1;
using std::chrono::milliseconds, std::chrono::microseconds;

constexpr int kSpins = 2000;  // of the caller for the last worker: a hundred microseconds
// How long a worker stays awake for the next job. In a forward that is near, and to wake a halted
// processor takes 50 us on a virtual machine, for MLX's own threads as for ours. (Measured on Linux
// only.)
#ifdef __linux__
constexpr auto kAwake = milliseconds(5);
#else
constexpr auto kAwake = microseconds(100);
#endif
// Who gives way and waits for so long, more than now and then, has a neighbour that computes;
// spinning would cost the right to go first when there is work, so for a while it sleeps soon.
constexpr auto kCrowded = milliseconds(2), kShy = milliseconds(1000);
constexpr int kEachGap = 4, kTooMany = 6;  // each clean wait takes one off
constexpr auto kAwakeShy = microseconds(100);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

std::atomic<ThreadPool*> pool{nullptr};
std::mutex pool_mutex;

// The parent's threads do not exist in the child: leave the old pool alone and start anew.
void forget_pool() {
  pool.store(nullptr);
  new (&pool_mutex) std::mutex;
}

}  // namespace

ThreadPool& ThreadPool::shared() {
  if (ThreadPool* p = pool.load(std::memory_order_acquire)) return *p;
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  std::lock_guard lock(pool_mutex);
  if (ThreadPool* p = pool.load()) return *p;
  // Never destroyed: threads may still be asleep in it when the process exits.
  auto* made = new ThreadPool(chosen_threads());
  pool.store(made, std::memory_order_release);
  return *made;
}

ThreadPool::ThreadPool(size_t threads) : ranges_(threads) {
  threads_.reserve(threads);
  try {
    for (size_t i = 1; i < threads; ++i) threads_.emplace_back([this, i] { worker(i); });
  } catch (const std::system_error&) {
    // The system allows no more: compute with those that started.
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(sleep_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& t : threads_) t.join();
}

void ThreadPool::run_indices(size_t n, Call call, void* fn) {
  // Ranges count in 32 bits.
  if (n <= 1 || n >> 32 || threads_.empty() || busy_.exchange(true)) {
    for (size_t i = 0; i < n; ++i) call(fn, i);
    return;
  }
  call_ = call;
  fn_ = fn;
  failed_ = false;
  size_t workers = size();
  for (size_t w = 0; w < workers; ++w)
    ranges_[w].bounds.store(uint64_t(n * w / workers) << 32 | n * (w + 1) / workers);
  uint64_t job = (gate_.load() >> 32) + 1;
  gate_.store((job & 0xffffffff) << 32 | kOpen);
  if (sleepers_.load() > 0) {
    std::lock_guard lock(sleep_);
    wake_.notify_all();
  }
  work(0);
  // Whoever has not come in by now is not waited for.
  gate_.fetch_and(~kOpen);
  for (int i = 0; gate_.load(std::memory_order_acquire) & kInside; ++i)
    i < kSpins ? pause() : std::this_thread::yield();
  auto error = std::exchange(error_, nullptr);
  busy_ = false;
  if (error) std::rethrow_exception(error);
}

void ThreadPool::worker(size_t self) {
  uint32_t seen = 0;
  Neighbours neighbours;
  for (;;) {
    bool joined = wait_awake(seen, neighbours);
    if (!joined) {
      std::unique_lock lock(sleep_);
      ++sleepers_;
      wake_.wait(lock, [&] { return stop_ || (joined = try_join(seen)); });
      --sleepers_;
    }
    if (stop_ && !joined) return;
    work(self);
    gate_.fetch_sub(1, std::memory_order_release);
  }
}

bool ThreadPool::wait_awake(uint32_t& seen, Neighbours& neighbours) {
  auto now = Clock::now();
  bool shy = now < neighbours.shy_until, joined = false;
  for (auto end = now + (shy ? kAwakeShy : kAwake); now < end && !stop_;) {
    if ((joined = try_join(seen))) break;
    shy ? pause() : std::this_thread::yield();
    auto before = std::exchange(now, Clock::now());
    if (shy || now - before < kCrowded) continue;
    neighbours.crowded += kEachGap;
    if (neighbours.crowded > kTooMany) {
      neighbours.crowded = kEachGap;
      neighbours.shy_until = now + kShy;
    }
    return false;
  }
  if (!shy && neighbours.crowded) --neighbours.crowded;
  return joined;
}

bool ThreadPool::try_join(uint32_t& seen) {
  uint64_t gate = gate_.load();
  while ((gate & kOpen) && uint32_t(gate >> 32) != seen)
    if (gate_.compare_exchange_weak(gate, gate + 1)) {
      seen = uint32_t(gate >> 32);
      return true;
    }
  return false;
}

void ThreadPool::work(size_t self) {
  size_t i;
  do {
    while (take(self, i)) {
      if (failed_.load(std::memory_order_relaxed)) continue;
      try {
        call_(fn_, i);
      } catch (...) {
        if (!failed_.exchange(true)) error_ = std::current_exception();
      }
    }
  } while (steal(self));
}

bool ThreadPool::take(size_t self, size_t& i) {
  auto& bounds = ranges_[self].bounds;
  uint64_t b = bounds.load();
  while ((b >> 32) < (b & 0xffffffff))
    if (bounds.compare_exchange_weak(b, b + (uint64_t(1) << 32))) {
      i = b >> 32;
      return true;
    }
  return false;
}

// Takes the later half of the fullest range, so that its owner keeps its place in memory.
bool ThreadPool::steal(size_t self) {
  for (;;) {
    size_t victim = self, most = 0;
    uint64_t b = 0;
    for (size_t w = 0; w < ranges_.size(); ++w) {
      uint64_t r = ranges_[w].bounds.load();
      size_t left = (r >> 32) < (r & 0xffffffff) ? (r & 0xffffffff) - (r >> 32) : 0;
      if (w != self && left > most) victim = w, most = left, b = r;
    }
    if (most == 0) return false;
    uint64_t end = b & 0xffffffff, split = end - (most + 1) / 2;
    if (ranges_[victim].bounds.compare_exchange_strong(b, (b >> 32) << 32 | split)) {
      ranges_[self].bounds.store(split << 32 | end);
      return true;
    }
  }
}

}  // namespace mlx_moe
