#include "dispatch/queue.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "support/error.h"
#include "support/thread_pool.h"

namespace mlx_moe {

namespace {

constexpr int16_t kInfinity = 0x7c00, kNormal = 0x0400;  // half precision: magnitudes as bits

// The largest magnitude, a NaN above infinity; compilers turn it into vector code.
int16_t largest(const uint16_t* values, size_t n) {
  int16_t most = 0;
  for (size_t i = 0; i < n; ++i) most = std::max(most, int16_t(values[i] & 0x7fff));
  return most;
}

// Of x too: an activation that is bounded on both sides makes finite values of infinite ones.
Outcome outcome(const Status& status, const Dispatch& tile) {
  if (!status.ok()) return {status};
  const size_t n = tile.groups * tile.capacity * tile.width;
  const int16_t x = largest(tile.x, n), y = largest(tile.y, n);
  return {status, std::max(x, y) < kInfinity, x > 0 && y < kNormal};
}

void check(const StaticExecutor& executor, const Request& r) {
  const ProgramShape* shape = executor.shape(r.program);
  require(shape, "there is no program ", r.program);
  const auto& fits = shape->capacities;
  const Dispatch& t = r.tile;
  if (t.groups == shape->groups && t.width == shape->width &&
      std::find(fits.begin(), fits.end(), t.capacity) != fits.end())
    return;
  std::string known;
  for (size_t c : fits) known += (known.empty() ? "" : " or ") + std::to_string(c);
  throw Error("program " + std::to_string(r.program) + " was handed a tile of [" +
              std::to_string(t.groups) + ", " + std::to_string(t.capacity) + ", " +
              std::to_string(t.width) + "], its static shape is [" + std::to_string(shape->groups) +
              ", " + known + ", " + std::to_string(shape->width) + "]");
}

}  // namespace

const std::vector<Outcome>& Pending::wait() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return left_ == 0; });
  return outcomes_;
}

void Pending::finished(size_t request, Outcome outcome) {
  std::lock_guard lock(mutex_);
  outcomes_[request] = std::move(outcome);
  if (--left_ == 0) done_.notify_all();
}

struct Queue::State {
  const pid_t process = getpid();
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> waiting;
  size_t running = 0;
  bool stop = false;
  Counts counts;
  std::thread thread;
};

Queue::Queue(std::unique_ptr<StaticExecutor> executor, size_t in_flight)
    : executor_(std::move(executor)), in_flight_(in_flight) {
  require(in_flight > 0, "in_flight is 0, expected at least 1");
}

Queue::~Queue() {
  State* s = state_.load();
  // A parent's thread does not exist here and cannot be joined: its state is left alone.
  if (!s || s->process != getpid()) return;
  {
    std::lock_guard lock(s->mutex);
    s->stop = true;
  }
  s->changed.notify_all();
  if (s->thread.joinable()) s->thread.join();
  delete s;
}

// Without a lock, which another thread might have held at the fork.
Queue::State& Queue::state() const {
  State* s = state_.load();
  if (s && s->process == getpid()) return *s;
  auto made = std::make_unique<State>();
  if (state_.compare_exchange_strong(s, made.get())) s = made.release();
  return *s;
}

std::shared_ptr<Pending> Queue::submit(std::span<const Request> requests) {
  for (const Request& r : requests) check(*executor_, r);
  auto pending = std::make_shared<Pending>(requests.size());
  State& s = state();
  {
    std::lock_guard lock(s.mutex);
    if (!s.thread.joinable()) s.thread = std::thread([this, &s] { run(s); });
    for (size_t i = 0; i < requests.size(); ++i) s.waiting.push_back({requests[i], pending, i});
  }
  s.changed.notify_all();
  return pending;
}

Queue::Counts Queue::counts() const {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return s.counts;
}

// Ends when asked to and nothing is left to do, so that every Pending is finished.
void Queue::run(State& s) {
  std::unique_lock lock(s.mutex);
  for (;;) {
    s.changed.wait(lock, [&] {
      return (!s.waiting.empty() && s.running < in_flight_) ||
             (s.stop && s.waiting.empty() && s.running == 0);
    });
    if (s.waiting.empty()) return;

    auto batch = std::make_shared<std::vector<Item>>();
    std::vector<Dispatch> tiles;
    const Request first = s.waiting.front().request;
    for (auto it = s.waiting.begin();
         it != s.waiting.end() && s.running + tiles.size() < in_flight_;) {
      if (it->request.program != first.program ||
          it->request.tile.capacity != first.tile.capacity) {
        ++it;
        continue;
      }
      tiles.push_back(it->request.tile);
      batch->push_back(std::move(*it));
      it = s.waiting.erase(it);
    }
    s.running += tiles.size();
    s.counts.tiles += tiles.size();
    s.counts.batches += 1;
    s.counts.most_in_flight = std::max(s.counts.most_in_flight, s.running);

    lock.unlock();
    executor_->start(first.program, tiles, [&s, batch](const Status& status) {
      for (Item& item : *batch) {
        item.pending->finished(item.number, outcome(status, item.request.tile));
      }
      // Under the lock to the end: once running is 0 the state may go.
      std::lock_guard lock(s.mutex);
      s.running -= batch->size();
      s.changed.notify_all();
    });
    lock.lock();
  }
}

}  // namespace mlx_moe
