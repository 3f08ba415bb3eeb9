#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "dispatch/executor.h"
#include "support/status.h"

namespace mlx_moe {

struct Request {
  size_t program;
  Dispatch tile;
};

// How one dispatch ended. `finite` is false where x or y holds an infinity or a NaN; `small` says
// that all of y is below the normal numbers of half precision (x is not all zero), where it has
// few bits left.
struct Outcome {
  Status status;
  bool finite = false;
  bool small = false;
};

// What one call submitted. The tiles must stay until wait() has returned.
class Pending {
 public:
  explicit Pending(size_t requests) : outcomes_(requests), left_(requests) {}
  // Outcomes in the order of the requests, once all are done.
  const std::vector<Outcome>& wait();

 private:
  friend class Queue;
  void finished(size_t request, Outcome outcome);

  std::mutex mutex_;
  std::condition_variable done_;
  std::vector<Outcome> outcomes_;
  size_t left_;
};

// The queue in front of an executor, for any number of callers. One thread of its own hands the
// requests over, so that callers go on meanwhile: tiles of one program and capacity that wait
// together go as one batch, and no more than `in_flight` tiles are with the executor at a time.
// A child process of fork() starts a thread of its own.
class Queue {
 public:
  Queue(std::unique_ptr<StaticExecutor> executor, size_t in_flight);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Queues all requests at once. Throws Error, with nothing queued, on a program that does not
  // exist and a tile of any shape but the program's.
  std::shared_ptr<Pending> submit(std::span<const Request> requests);

  StaticExecutor& executor() { return *executor_; }

  struct Counts {
    size_t tiles = 0, batches = 0, most_in_flight = 0;
  };
  Counts counts() const;

 private:
  struct Item {
    Request request;
    std::shared_ptr<Pending> pending;
    size_t number;
  };
  struct State;  // what must be new in a forked child

  State& state() const;
  void run(State& state);

  std::unique_ptr<StaticExecutor> executor_;
  const size_t in_flight_;
  mutable std::atomic<State*> state_{nullptr};
};

}  // namespace mlx_moe
