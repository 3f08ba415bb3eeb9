#include "shim.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "internal.h"

namespace shim {

std::atomic<long> live = 0;
std::atomic<size_t> locked = 0, other_units = 0;

namespace {

std::mutex models_mutex;
std::map<std::pair<std::string, std::string>, std::shared_ptr<const Model>> models;

std::mutex seen_mutex;
Seen counts{};
size_t running = 0;

class Threads {
 public:
  Threads() {
    for (int i = 0; i < 4; ++i) threads_.emplace_back([this] { loop(); });
  }
  ~Threads() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (auto& t : threads_) t.join();
  }
  void add(std::function<void()> job) {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_one();
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      {
        auto job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        job();
      }
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

void install(const std::string& compiled, const std::string& function, Model model) {
  std::lock_guard lock(models_mutex);
  models[{compiled, function}] = std::make_shared<const Model>(std::move(model));
}

void uninstall_all() {
  std::lock_guard lock(models_mutex);
  models.clear();
}

std::shared_ptr<const Model> find(const std::string& compiled, const std::string& function) {
  std::lock_guard lock(models_mutex);
  const auto found = models.find({compiled, function});
  return found == models.end() ? nullptr : found->second;
}

Settings& settings() {
  static Settings settings;
  return settings;
}

long live_objects() {
  for (int i = 0; i < 2000 && live != 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return live;
}

Running::Running(bool batch, size_t tiles) : tiles_(tiles) {
  std::lock_guard lock(seen_mutex);
  counts.predictions += !batch;
  counts.batches += batch;
  counts.most_at_once = std::max(counts.most_at_once, running += tiles);
}

Running::~Running() {
  std::lock_guard lock(seen_mutex);
  running -= tiles_;
}

Seen seen() {
  std::lock_guard lock(seen_mutex);
  Seen now = counts;
  now.locked = locked;
  now.units = other_units;
  return now;
}

void forget_seen() {
  std::lock_guard lock(seen_mutex);
  counts = {};
  locked = other_units = 0;
}

void soon(std::function<void()> job) {
  static Threads threads;
  threads.add(std::move(job));
}

}  // namespace shim
