#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "support/cpu.h"
#include "support/error.h"
#include "support/thread_pool.h"

using namespace mlx_moe;

namespace {

// True if run() called every index of [0, n) exactly once.
bool runs_once_each(ThreadPool& pool, size_t n) {
  std::vector<std::atomic<int>> calls(n);
  pool.run(n, [&](size_t i) { ++calls[i]; });
  for (auto& c : calls)
    if (c != 1) return false;
  return true;
}

}  // namespace

TEST_CASE("the pool calls every index once") {
  for (size_t threads : {1, 2, 3, 8}) {
    CAPTURE(threads);
    ThreadPool pool(threads);
    CHECK(pool.size() == threads);
    for (size_t n : {0, 1, 2, 3, 7, 64, 1000, 20000}) CHECK(runs_once_each(pool, n));
    size_t wrong = 0;
    for (int i = 0; i < 2000; ++i) wrong += !runs_once_each(pool, 1 + i % 17);
    CHECK(wrong == 0);
  }
}

TEST_CASE("workers that slept come back") {
  ThreadPool pool(4);
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(runs_once_each(pool, 100));
  }
}

TEST_CASE("workers that others crowd out come back") {
  std::atomic<bool> stop{false};
  std::vector<std::thread> others;
  for (unsigned i = 0; i <= std::thread::hardware_concurrency(); ++i)
    others.emplace_back([&] {
      while (!stop) {
      }
    });
  ThreadPool pool(3);
  int right = 0;
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    right += runs_once_each(pool, 100);
  }
  stop = true;
  for (auto& t : others) t.join();
  CHECK(right == 20);
}

TEST_CASE("an idle thread takes work from a busy one") {
  ThreadPool pool(2);
  std::atomic<bool> second{false};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  pool.run(4, [&](size_t i) {  // 0 and 1 start on the same thread, 0 waits for 1
    if (i == 1) second = true;
    while (i == 0 && !second && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
  });
  CHECK(std::chrono::steady_clock::now() < deadline);
}

TEST_CASE("an exception reaches the caller and the pool goes on") {
  for (size_t threads : {1, 4}) {
    ThreadPool pool(threads);
    for (size_t bad : {0, 1, 50, 99}) {
      CHECK_THROWS_WITH_AS(pool.run(100,
                                    [&](size_t i) {
                                      if (i == bad) throw std::runtime_error("index");
                                    }),
                           "index", std::runtime_error);
      CHECK(runs_once_each(pool, 100));
    }
    CHECK_THROWS_AS(pool.run(100, [](size_t) { throw Error("each"); }), Error);
    CHECK(runs_once_each(pool, 100));
  }
}

TEST_CASE("nested and concurrent callers all finish their work") {
  ThreadPool pool(3);
  std::atomic<size_t> inner{0};
  pool.run(10, [&](size_t) { pool.run(10, [&](size_t) { ++inner; }); });
  CHECK(inner == 100);

  std::atomic<size_t> wrong{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int i = 0; i < 300; ++i) wrong += !runs_once_each(pool, 50);
    });
  for (auto& caller : callers) caller.join();
  CHECK(wrong == 0);
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow threads into a forked child
TEST_CASE("a forked child computes with a pool of its own") {
  CHECK(runs_once_each(ThreadPool::shared(), 100));
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(runs_once_each(ThreadPool::shared(), 1000) ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(runs_once_each(ThreadPool::shared(), 100));
}
#endif

TEST_CASE("MLX_MOE_NUM_THREADS is a number from 1 to 1024") {
  setenv("MLX_MOE_NUM_THREADS", "3", 1);
  CHECK(chosen_threads() == 3);
  for (const char* bad : {"0", "-1", "1025", "two", "2x"}) {
    CAPTURE(bad);
    setenv("MLX_MOE_NUM_THREADS", bad, 1);
    CHECK_THROWS_AS(chosen_threads(), Error);
  }
  unsetenv("MLX_MOE_NUM_THREADS");
  CHECK(chosen_threads() >= 1);
}
