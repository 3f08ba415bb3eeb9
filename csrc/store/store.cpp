#include "store/store.h"

#include <algorithm>
#include <system_error>

#include "store/failure.h"
#include "support/error.h"

namespace mlx_moe {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPoll = std::chrono::milliseconds(50);

std::vector<LayerLayout> lay_out_all(const std::vector<LayerSource>& sources,
                                     const Checkpoint& checkpoint) {
  require(!sources.empty(), "a store needs at least one layer");
  std::vector<LayerLayout> layers;
  for (const LayerSource& source : sources) layers.push_back(lay_out(source, checkpoint));
  return layers;
}

const StoreOptions& checked(const StoreOptions& o) {
  require(o.readers >= 1 && o.readers <= 64, "readers is ", o.readers, ", expected 1 to 64");
  require(o.timeout >= 0, "timeout is ", o.timeout, ", expected 0 or more seconds");
  return o;
}

}  // namespace

HeldExperts::~HeldExperts() { store_->release(experts_); }

ExpertStore::ExpertStore(const std::vector<std::string>& paths,
                         const std::vector<LayerSource>& layers, const StoreOptions& options)
    : checkpoint_(paths, options.direct),
      layers_(lay_out_all(layers, checkpoint_)),
      options_(checked(options)),
      residency_(layers_, options.budget, options.policy) {
  Lock guard(threads_->mutex);  // who starts early waits for the others
  try {
    for (size_t i = 0; i < options.readers; ++i)
      threads_->readers.emplace_back([this] { read_runs(); });
  } catch (const std::system_error& e) {
    if (!threads_->readers.empty()) return;  // fewer will do
    guard.unlock();
    delete threads_;
    fail(Failure::busy, "the system starts no thread to read with: ", e.what());
  }
}

ExpertStore::~ExpertStore() {
  if (process_ != getpid()) return;
  close();
  delete threads_;
}

void ExpertStore::close() {
  if (process_ != getpid()) return;
  {
    Lock held(threads_->mutex);
    closed_ = true;
    next_.clear();
    warm_.clear();
  }
  threads_->work.notify_all();
  threads_->done.notify_all();
  std::lock_guard one(threads_->closing);
  for (std::thread& reader : threads_->readers)
    if (reader.joinable()) reader.join();
}

ExpertStore::Lock ExpertStore::lock() const {
  if (process_ != getpid())
    fail(Failure::closed, "the expert store belongs to the parent process; open one here");
  return Lock(threads_->mutex);
}

void ExpertStore::check_open() const {
  if (closed_) fail(Failure::closed, "the expert store is closed");
}

// Numbers over all layers, each once, rising.
std::vector<uint32_t> ExpertStore::numbers(size_t layer, std::span<const uint32_t> experts) const {
  require(layer < layers_.size(), "layer ", layer, " of ", layers_.size());
  const LayerLayout& l = layers_[layer];
  std::vector<bool> wanted(l.experts);
  for (uint32_t e : experts) {
    require(e < l.experts, l.name, ": expert ", e, " of ", l.experts);
    wanted[e] = true;
  }
  std::vector<uint32_t> numbers;
  for (size_t e = 0; e < l.experts; ++e)
    if (wanted[e]) numbers.push_back(residency_.number(layer, e));
  return numbers;
}

std::shared_ptr<HeldExperts> ExpertStore::acquire(size_t layer, std::span<const uint32_t> experts,
                                                  const Poll& poll) {
  const std::vector<uint32_t> wanted = numbers(layer, experts);
  const LayerLayout& l = layers_[layer];
  // Outlives the guard: letting go takes the same lock.
  std::shared_ptr<HeldExperts> held(new HeldExperts(shared_from_this()));
  auto guard = lock();
  check_open();
  if (wanted.size() > residency_.budget() / l.slot_bytes)
    fail(Failure::memory, l.name, ": ", wanted.size(), " experts at once need ",
         wanted.size() * l.slot_bytes, " bytes, the limit is ", residency_.budget(),
         "; raise the limit, or run the forward in parts");
  wait_for_slots(guard, layer, wanted, poll);
  const auto begun = residency_.hold(layer, wanted);
  held->experts_ = wanted;  // from here on whatever is thrown lets them go
  std::vector<std::shared_ptr<Load>> coming;
  for (uint32_t e : wanted)
    if (residency_.at(e).load) coming.push_back(residency_.at(e).load);
  // Guesses about a layer that has begun are of no use any more.
  std::erase_if(next_, [&](uint32_t e) {
    if (residency_.layer_of(e) != layer) return false;
    residency_.drop(e);
    return true;
  });
  try {
    start(begun, wanted_);
    hurry(coming);
    if (!coming.empty()) {
      threads_->work.notify_all();
      wait(guard, poll, false, [&] {
        return std::all_of(coming.begin(), coming.end(), [](auto& load) { return load->done(); });
      });
    }
    for (const auto& load : coming)
      if (load->failed) fail(*load->failed, l.name, ": ", load->message);
  } catch (...) {
    guard.unlock();  // what is held is released without it
    throw;
  }
  std::vector<const uint8_t*> slots;
  for (uint32_t e : wanted) slots.push_back(residency_.at(e).slot);
  guard.unlock();
  const uint32_t first = residency_.number(layer, 0);
  for (const MatrixLayout& m : l.matrices) {
    auto& table = held->tables_.emplace_back(l.experts);
    Matrix& matrix = held->matrices_.emplace_back(m.format);
    for (size_t i = 0; i < wanted.size(); ++i) table[wanted[i] - first] = m.arrays(slots[i]);
    matrix.table = table.data();
    if (wanted.empty()) continue;
    const ExpertArrays& any = table[wanted[0] - first];
    matrix.added = any.added;
    matrix.global_scale = any.global_scale;
  }
  return held;
}

// All or nothing, so that callers who wait hold nothing that others wait for.
void ExpertStore::wait_for_slots(Lock& guard, size_t layer, std::span<const uint32_t> wanted,
                                 const Poll& poll) {
  if (residency_.fits(wanted)) return;
  bool fits = false;
  try {
    wait(guard, poll, true, [&] { return fits = residency_.fits(wanted); });
  } catch (const StoreFailure& e) {
    if (e.failure != Failure::busy) throw;
    fail(Failure::busy, layers_[layer].name, ": waited ", options_.timeout,
         " s for slots that other forwards hold, of ", residency_.budget(),
         " bytes; release them, or raise the limit");
  }
}

// Waits with the lock given back. The time counts as a stall.
template <class Ready>
void ExpertStore::wait(Lock& guard, const Poll& poll, bool limited, Ready&& ready) {
  const auto begun = Clock::now();
  const auto waited = [&] { return std::chrono::duration<double>(Clock::now() - begun).count(); };
  while (!ready() && !closed_ && !(limited && waited() > options_.timeout)) {
    if (threads_->done.wait_for(guard, kPoll) == std::cv_status::no_timeout || !poll) continue;
    guard.unlock();
    try {
      poll();
    } catch (...) {
      guard.lock();
      throw;
    }
    guard.lock();
  }
  residency_.counters().stall_seconds += waited();
  if (ready()) return;
  check_open();
  fail(Failure::busy, "");
}

void ExpertStore::start(const std::vector<std::shared_ptr<Load>>& loads, std::deque<Run>& queue) {
  std::vector<Reading> readings;
  for (const auto& load : loads) {
    const size_t layer = residency_.layer_of(load->expert);
    const auto& pieces = layers_[layer].pieces[load->expert - residency_.number(layer, 0)];
    readings.push_back({load, &pieces, residency_.at(load->expert).slot});
  }
  for (Run& run : cut_into_runs(readings)) queue.push_back(std::move(run));
}

// What was begun ahead and is waited for now goes before the rest.
void ExpertStore::hurry(const std::vector<std::shared_ptr<Load>>& loads) {
  const auto is_wanted = [&](const Run& run) {
    return std::any_of(run.loads.begin(), run.loads.end(), [&](auto& load) {
      return std::find(loads.begin(), loads.end(), load) != loads.end();
    });
  };
  for (size_t i = 0; i < ahead_.size();) {
    if (!is_wanted(ahead_[i])) {
      ++i;
      continue;
    }
    wanted_.push_back(std::move(ahead_[i]));
    ahead_.erase(ahead_.begin() + ptrdiff_t(i));
  }
}

void ExpertStore::release(std::span<const uint32_t> wanted) {
  if (process_ != getpid()) return;
  {
    Lock guard(threads_->mutex);
    residency_.release(wanted);
  }
  threads_->done.notify_all();
}

void ExpertStore::prefetch(size_t layer, std::span<const uint32_t> experts, bool warm) {
  const std::vector<uint32_t> wanted = numbers(layer, experts);
  {
    auto guard = lock();
    check_open();
    // In the caller's order, the most likely first.
    for (uint32_t e : experts)
      if (residency_.enqueue(residency_.number(layer, e)))
        (warm ? warm_ : next_).push_back(residency_.number(layer, e));
  }
  threads_->work.notify_all();
}

bool ExpertStore::idle() const {
  auto guard = lock();
  return next_.empty() && warm_.empty() && ahead_.empty() && reading_ahead_ == 0;
}

std::vector<uint32_t> ExpertStore::resident(size_t layer) const {
  require(layer < layers_.size(), "layer ", layer, " of ", layers_.size());
  auto guard = lock();
  std::vector<uint32_t> found;
  for (uint32_t e = 0; e < layers_[layer].experts; ++e)
    if (residency_.at(residency_.number(layer, e)).state == Residency::State::resident)
      found.push_back(e);
  return found;
}

StoreCounts ExpertStore::counts() const {
  auto guard = lock();
  return residency_.counts();
}

void ExpertStore::check_files() const {
  for (const auto& file : checkpoint_.files()) file->check_path();
}

bool ExpertStore::direct() const {
  const auto& files = checkpoint_.files();
  return !files.empty() &&
         std::all_of(files.begin(), files.end(), [](const auto& f) { return f->direct(); });
}

// A reader's life.
void ExpertStore::read_runs() {
  Lock guard(threads_->mutex);
  for (;;) {
    Run run;
    bool ahead = false;
    threads_->work.wait(guard, [&] { return closed_ || next(run, ahead); });
    if (closed_) return;
    (ahead ? reading_ahead_ : reading_wanted_) += 1;
    guard.unlock();
    std::optional<Failure> failed;
    std::string message;
    try {
      checkpoint_.files()[run.file]->read(run.segments);
    } catch (const StoreFailure& e) {
      failed = e.failure;
      message = e.what();
    } catch (const std::exception& e) {
      failed = Failure::read;
      message = e.what();
    }
    guard.lock();
    (ahead ? reading_ahead_ : reading_wanted_) -= 1;
    finished(run, failed, message);
    if (!ahead && reading_wanted_ == 0) threads_->work.notify_all();
  }
}

// One reader is always left for who waits; while one reads for them, no warm expert is begun.
bool ExpertStore::next(Run& run, bool& ahead) {
  if (closed_) return false;
  ahead = wanted_.empty();
  if (ahead) {
    const size_t readers = threads_->readers.size();
    if (reading_ahead_ + 1 >= std::max<size_t>(readers, 2)) return false;
    while (ahead_.empty()) {
      if (next_.empty() && reading_wanted_ > 0) return false;
      if (!begin_ahead()) return false;
    }
  }
  auto& queue = ahead ? ahead_ : wanted_;
  run = std::move(queue.front());
  queue.pop_front();
  return true;
}

// Begins the read of one expert that was asked for ahead; false if none is.
bool ExpertStore::begin_ahead() {
  const bool warm = next_.empty();
  auto& queue = warm ? warm_ : next_;
  if (queue.empty()) return false;
  const uint32_t expert = queue.front();
  queue.pop_front();
  if (residency_.at(expert).state != Residency::State::queued) return true;
  if (auto load = residency_.begin_ahead(expert, !warm)) start({load}, ahead_);
  return true;
}

void ExpertStore::finished(const Run& run, std::optional<Failure> failed,
                           const std::string& message) {
  bool some = false;
  for (size_t i = 0; i < run.segments.size(); ++i) {
    const auto& load = run.loads[i];
    if (!failed) residency_.counters().bytes_read += run.segments[i].size;
    if (failed && !load->failed) {
      load->failed = failed;
      load->message = message;
    }
    if (--load->parts_left > 0) continue;
    residency_.finish(load);
    some = true;
  }
  if (some) threads_->done.notify_all();
}

}  // namespace mlx_moe
