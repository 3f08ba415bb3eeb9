#include "store/residency.h"

#include <algorithm>

#include "store/failure.h"

namespace mlx_moe {

Residency::Residency(const std::vector<LayerLayout>& layers, size_t budget,
                     const PolicyOptions& policy)
    : layers_(layers), bank_(budget) {
  for (size_t l = 0; l < layers.size(); ++l) {
    first_.push_back(uint32_t(layer_of_.size()));
    layer_of_.insert(layer_of_.end(), layers[l].experts, uint32_t(l));
  }
  entries_.resize(layer_of_.size());
  policy_ = make_policy(policy, entries_.size());
}

Residency::~Residency() {
  for (uint32_t e = 0; e < entries_.size(); ++e)
    if (entries_[e].slot) bank_.give(entries_[e].slot, bytes_of(e));
}

// Keeps the sum of what cannot be had.
template <class Change>
void Residency::change(uint32_t expert, Change&& change) {
  Entry& e = entries_[expert];
  const bool before = busy(e);
  change(e);
  if (before == busy(e)) return;
  before ? busy_ -= bytes_of(expert) : busy_ += bytes_of(expert);
}

bool Residency::fits(std::span<const uint32_t> experts) const {
  size_t more = 0;
  for (uint32_t e : experts)
    if (!busy(entries_[e])) more += bytes_of(e);
  return busy_ + more <= bank_.budget();
}

std::vector<std::shared_ptr<Load>> Residency::hold(size_t layer,
                                                   std::span<const uint32_t> experts) {
  for (uint32_t e : experts) policy_->used(e);
  for (uint32_t expert : experts)
    change(expert, [&](Entry& e) {
      ++e.users;
      const bool there = e.state == State::resident, coming = e.state == State::loading;
      if ((there || coming) && e.unused)
        ++counts_.prefetch_useful;
      else
        ++(there ? counts_.hits : counts_.misses);
      e.unused = false;
    });
  begin_forward(layer);
  std::vector<std::shared_ptr<Load>> loads;
  try {
    for (uint32_t e : experts)
      if (entries_[e].state == State::absent || entries_[e].state == State::queued)
        loads.push_back(begin(e, Evict::any));
  } catch (...) {  // no memory, whatever the budget says: as if nothing had begun
    for (const auto& load : loads) {
      load->failed = Failure::memory;
      load->parts_left = 0;
      finish(load);
    }
    release(experts);
    throw;
  }
  return loads;
}

// What was read for the layer's last forward, or ahead for this one, is as old as others now.
void Residency::begin_forward(size_t layer) {
  const size_t end = first_[layer] + layers_[layer].experts;
  for (size_t e = first_[layer]; e < end; ++e) entries_[e].fresh = false;
}

void Residency::release(std::span<const uint32_t> experts) {
  for (uint32_t expert : experts) change(expert, [](Entry& e) { --e.users; });
}

bool Residency::enqueue(uint32_t expert) {
  if (entries_[expert].state != State::absent) return false;
  entries_[expert].state = State::queued;
  return true;
}

void Residency::drop(uint32_t expert) {
  if (entries_[expert].state != State::queued) return;
  entries_[expert].state = State::absent;
  ++counts_.prefetch_dropped;
}

std::shared_ptr<Load> Residency::begin_ahead(uint32_t expert, bool evict) {
  auto load = begin(expert, evict ? Evict::stale : Evict::nothing);
  if (!load) {
    drop(expert);
    return nullptr;
  }
  entries_[expert].unused = true;
  ++counts_.prefetch_issued;
  return load;
}

std::shared_ptr<Load> Residency::begin(uint32_t expert, Evict which) {
  auto load = std::make_shared<Load>();
  load->expert = expert;
  uint8_t* slot = bank_.take(bytes_of(expert));
  while (!slot && bank_.used() + bytes_of(expert) > bank_.budget() && evict(which))
    slot = bank_.take(bytes_of(expert));
  if (!slot && which != Evict::any) return nullptr;
  if (!slot)
    fail(Failure::memory, layers_[layer_of_[expert]].name,
         ": the system has no memory for a slot of ", bytes_of(expert),
         " bytes; give the experts less memory than ", bank_.budget(), " bytes");
  change(expert, [&](Entry& e) {
    e.state = State::loading;
    e.slot = slot;
    e.load = load;
  });
  return load;
}

// Frees the slot of the expert that goes first: one that was read ahead and not used yet goes last.
bool Residency::evict(Evict which) {
  if (which == Evict::nothing) return false;
  const auto rank = [&](uint32_t i) { return entries_[i].fresh && entries_[i].unused; };
  size_t first = resident_.size();
  for (size_t i = 0; i < resident_.size(); ++i) {
    const uint32_t candidate = resident_[i];
    const Entry& e = entries_[candidate];
    if (e.users || (which == Evict::stale && e.fresh)) continue;
    if (first == resident_.size()) {
      first = i;
      continue;
    }
    const bool a = rank(candidate), b = rank(resident_[first]);
    if (a != b ? b : policy_->before(candidate, resident_[first])) first = i;
  }
  if (first == resident_.size()) return false;
  const uint32_t expert = resident_[first];
  Entry& e = entries_[expert];
  bank_.give(e.slot, bytes_of(expert));
  counts_.prefetch_wasted += e.unused;
  ++counts_.evictions;
  e = {};
  resident_[first] = resident_.back();
  resident_.pop_back();
  return true;
}

void Residency::finish(const std::shared_ptr<Load>& load) {
  const uint32_t expert = load->expert;
  change(expert, [&](Entry& e) {
    e.load = nullptr;
    if (load->failed) {
      bank_.give(e.slot, bytes_of(expert));
      e.slot = nullptr;
      e.state = State::absent;
      e.unused = false;
      return;
    }
    e.state = State::resident;
    e.fresh = true;
    resident_.push_back(expert);
  });
}

StoreCounts Residency::counts() const {
  StoreCounts c = counts_;
  c.resident_bytes = bank_.used();
  c.resident_experts = resident_.size();
  return c;
}

}  // namespace mlx_moe
