#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace mlx_moe {

// A fixed set of threads that share index ranges by work stealing. The caller works too; idle
// workers stay awake for some milliseconds, giving way to others, then sleep. One job runs at a
// time: a second caller, or a nested call, computes its own job alone. After fork() the child
// starts a pool of its own.
class ThreadPool {
 public:
  explicit ThreadPool(size_t threads);
  ~ThreadPool();

  static ThreadPool& shared();

  size_t size() const { return threads_.size() + 1; }

  // Calls fn(i) once for each i in [0, n). Contiguous indices stay on one thread as far as the load
  // allows. The first exception is rethrown here once every thread has stopped.
  template <class Fn>
  void run(size_t n, Fn&& fn) {
    run_indices(
        n, [](void* f, size_t i) { (*static_cast<std::remove_reference_t<Fn>*>(f))(i); }, &fn);
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Call = void (*)(void*, size_t);
  // What a worker knows of other programs on its processor.
  struct Neighbours {
    int crowded = 0;  // how often it waited long of late
    Clock::time_point shy_until{};
  };
  struct alignas(64) Range {
    std::atomic<uint64_t> bounds{0};  // next << 32 | end
  };

  void run_indices(size_t n, Call call, void* fn);
  void worker(size_t self);
  bool wait_awake(uint32_t& seen, Neighbours& neighbours);
  bool try_join(uint32_t& seen);
  void work(size_t self);
  bool take(size_t self, size_t& i);
  bool steal(size_t self);

  std::vector<Range> ranges_;
  std::vector<std::thread> threads_;
  Call call_ = nullptr;
  void* fn_ = nullptr;
  std::atomic<bool> busy_{false};  // a job runs
  std::atomic<uint64_t> gate_{0};  // job number << 32 | open << 31 | workers inside
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace mlx_moe
