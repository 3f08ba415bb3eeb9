#include "schedule/split.h"

#include <algorithm>
#include <cmath>

#include "schedule/improve.h"
#include "support/error.h"

namespace mlx_moe {

namespace {

constexpr size_t kSplitSteps = 24, kCandidates = 32;

// Shards of one expert go from `from` to `to`.
struct Transfer {
  double seconds, both;  // of the slower unit after it, and of the two
  size_t expert, from, to;
  uint32_t parts;
};

void look_at_transfers(const Packing& p, size_t e, size_t a, size_t b, Transfer& best) {
  if (!p.may(e, b)) return;
  const uint32_t has = p.parts(e, a), there = p.parts(e, b);
  const auto most = uint32_t(std::min<uint64_t>(has, p.room(b)));
  if (most == 0) return;
  // Times of both units are linear in the shards between the first and the last one to go.
  auto at = [&](uint32_t q) {
    const double ours = p.seconds_with(e, a, has - q), theirs = p.seconds_with(e, b, there + q);
    const double slower = std::max(ours, theirs);
    if (slower < best.seconds || (slower == best.seconds && ours + theirs < best.both))
      best = {slower, ours + theirs, e, a, b, q};
  };
  at(most);
  if (most < 2) return;
  const double gap = p.seconds_with(e, a, has - 1) - p.seconds_with(e, b, there + 1);
  const double a_shard = p.seconds_with(e, a, has) - p.seconds_with(e, a, has - 1);
  const double b_shard = p.seconds_with(e, b, there + 2) - p.seconds_with(e, b, there + 1);
  if (gap <= 0) return at(1);
  const double q = a_shard + b_shard > 0 ? 1 + gap / (a_shard + b_shard) : most;
  const auto low = uint32_t(std::clamp(q, 1.0, double(most)));
  at(low);
  if (low < most) at(low + 1);
}

// Experts of a unit to split: those that are already, and whole ones of all sizes.
std::vector<uint32_t> candidates(const Packing& p, size_t a) {
  const auto& whole = p.whole(a);
  const size_t stride = 1 + whole.size() / kCandidates;
  std::vector<uint32_t> found;
  for (size_t i = 0; i < whole.size() && p.load(whole[i]) > 0; i += stride)
    found.push_back(whole[i]);
  for (uint32_t e = 0; p.splits() > 0 && e < p.experts() && p.load(e) > 0; ++e)
    if (p.parts(e, a) > 0 && p.parts(e, a) < p.shards()) found.push_back(e);
  return found;
}

}  // namespace

void spread_expert(Packing& p, size_t expert) {
  double speed = 0;
  for (size_t u = 0; u < p.units(); ++u)
    if (p.may(expert, u)) speed += 1 / std::max(p.slope(u), 1e-30);
  uint32_t left = p.shards();
  for (size_t u = 0; u < p.units(); ++u) {
    if (!p.may(expert, u)) continue;
    const double share = 1 / std::max(p.slope(u), 1e-30) / speed;
    const auto parts = uint32_t(std::min<double>(share * p.shards(), double(p.room(u))));
    p.set(expert, u, std::min(parts, left));
    left -= p.parts(expert, u);
  }
  for (; left > 0; --left) {
    size_t best = p.units();
    double least = 0;
    for (size_t u = 0; u < p.units(); ++u)
      if (p.room(u) > 0 && p.may(expert, u)) {
        const double after = p.seconds_with(expert, u, p.parts(expert, u) + 1);
        if (best == p.units() || after < least) best = u, least = after;
      }
    require(best < p.units(), "the units that an expert may be on are full: ", left,
            " of its shards have no place");
    p.set(expert, best, p.parts(expert, best) + 1);
  }
}

double score(const Packing& p, const PlaceOptions& o) {
  const double noise = o.noise > 0 ? o.noise * std::sqrt(1 + o.counting) * p.spread() : 0;
  if (!o.serial) return p.makespan() + noise;
  double all = 0;
  for (size_t u = 0; u < p.units(); ++u) all += p.seconds(u);
  return all;
}

double weighed(const Packing& p, const PlaceOptions& o) {
  return score(p, o) * (1 + o.split_gain * double(p.splits()));
}

void split(Packing& p, double bound, const PlaceOptions& o) {
  Packing trial = p;
  double least = weighed(p, o);
  for (size_t step = 0; step < kSplitSteps; ++step) {
    const size_t a = trial.critical();
    const double now = trial.seconds(a);
    if (now <= bound * (1 + kClose)) break;
    Transfer best{now * (1 - kClose), 0, 0, a, a, 0};
    for (size_t e : candidates(trial, a))
      for (size_t b = 0; b < trial.units(); ++b)
        if (b != a) look_at_transfers(trial, e, a, b, best);
    if (best.to == a) break;
    trial.move(best.expert, a, best.to, best.parts);
    improve(trial, bound);
    if (const double weight = weighed(trial, o); weight < least) {
      least = weight;
      p = trial;
    }
  }
}

}  // namespace mlx_moe
