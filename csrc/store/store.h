#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "store/runs.h"

namespace mlx_moe {

struct StoreOptions {
  size_t budget = 0;  // bytes of all slots together
  PolicyOptions policy;
  size_t readers = 4;   // threads
  bool direct = false;  // read past the page cache where the filesystem can
  double timeout = 60;  // seconds to wait for slots that others hold
};

class ExpertStore;

// Experts of one layer that stay in memory for as long as this lives.
class HeldExperts {
 public:
  ~HeldExperts();
  HeldExperts(const HeldExperts&) = delete;
  HeldExperts& operator=(const HeldExperts&) = delete;

  // A Matrix for each projection; only the held experts can be routed to.
  const std::vector<Matrix>& matrices() const { return matrices_; }

 private:
  friend class ExpertStore;
  explicit HeldExperts(std::shared_ptr<ExpertStore> store) : store_(std::move(store)) {}

  std::shared_ptr<ExpertStore> store_;
  std::vector<uint32_t> experts_;
  std::vector<Matrix> matrices_;
  std::vector<std::vector<ExpertArrays>> tables_;
};

// Experts of a checkpoint, read into slots as they are asked for, by threads of its own. For any
// number of callers at a time. Everything throws StoreFailure (an Error for a number out of range);
// what could not be read is tried again by the next who asks. A child process of fork() cannot use
// its parent's store.
class ExpertStore : public std::enable_shared_from_this<ExpertStore> {
 public:
  ExpertStore(const std::vector<std::string>& paths, const std::vector<LayerSource>& layers,
              const StoreOptions& options);
  ~ExpertStore();

  // Called now and then while waiting; what it throws ends the wait.
  using Poll = std::function<void()>;

  // The experts, in memory. Reads what is not there; waits while others hold the slots that it
  // needs. Fails with "MemoryLimit" if the budget could not hold them all at once.
  std::shared_ptr<HeldExperts> acquire(size_t layer, std::span<const uint32_t> experts,
                                       const Poll& poll = {});

  // Reads experts when nobody waits for others. `warm` ones come last, take free room only, and
  // stay asked for; the others may take the slot of one that is neither held nor just read, and
  // are forgotten once their layer has begun. A wrong guess costs time, nothing else.
  void prefetch(size_t layer, std::span<const uint32_t> experts, bool warm);
  // Whether nothing asked for ahead is waiting or being read.
  bool idle() const;

  // Of the layer's experts, those in memory.
  std::vector<uint32_t> resident(size_t layer) const;
  const std::vector<LayerLayout>& layers() const { return layers_; }
  StoreCounts counts() const;
  // StoreFailure unless every path still leads to the file that was opened, unchanged.
  void check_files() const;
  bool direct() const;
  // Ends all reading; who waits fails with "StoreClosed". What is held stays until it is released.
  void close();

 private:
  friend class HeldExperts;
  struct Threads {
    std::mutex mutex;
    std::condition_variable work, done;  // for readers; for who waits
    std::vector<std::thread> readers;
    std::mutex closing;
  };
  using Lock = std::unique_lock<std::mutex>;

  Lock lock() const;
  void check_open() const;
  std::vector<uint32_t> numbers(size_t layer, std::span<const uint32_t> experts) const;
  template <class Ready>
  void wait(Lock& lock, const Poll& poll, bool limited, Ready&& ready);
  void wait_for_slots(Lock& lock, size_t layer, std::span<const uint32_t> numbers,
                      const Poll& poll);
  void start(const std::vector<std::shared_ptr<Load>>& loads, std::deque<Run>& queue);
  void hurry(const std::vector<std::shared_ptr<Load>>& loads);
  void release(std::span<const uint32_t> numbers);
  void read_runs();
  bool begin_ahead();
  bool next(Run& run, bool& ahead);
  void finished(const Run& run, std::optional<Failure> failed, const std::string& message);

  const Checkpoint checkpoint_;
  std::vector<LayerLayout> layers_;
  const StoreOptions options_;
  const pid_t process_ = getpid();
  // Under the lock.
  Residency residency_;
  std::deque<Run> wanted_, ahead_;                 // begun: somebody waits for it, or nobody yet
  std::deque<uint32_t> next_, warm_;               // experts to read ahead
  size_t reading_ahead_ = 0, reading_wanted_ = 0;  // threads
  bool closed_ = false;

  // Left alone in a forked child, where nothing that waits in it exists.
  Threads* const threads_ = new Threads;
};

}  // namespace mlx_moe
