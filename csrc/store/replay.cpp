#include "store/replay.h"

#include <algorithm>

#include "support/error.h"

namespace mlx_moe {

StoreCounts replay(std::span<const int32_t> experts, std::span<const int64_t> slot_bytes,
                   const Forwards& forwards, size_t budget, const PolicyOptions& policy) {
  require(experts.size() == slot_bytes.size(), "there are ", experts.size(), " layers and ",
          slot_bytes.size(), " sizes of slots");
  require(forwards.offsets.size() == forwards.layers.size() + 1 && forwards.offsets[0] == 0 &&
              std::is_sorted(forwards.offsets.begin(), forwards.offsets.end()) &&
              size_t(forwards.offsets.back()) == forwards.experts.size(),
          "offsets are not those of ", forwards.layers.size(), " forwards of ",
          forwards.experts.size(), " experts");
  std::vector<LayerLayout> layers(experts.size());
  for (size_t l = 0; l < layers.size(); ++l) {
    require(experts[l] > 0 && slot_bytes[l] > 0, "layer ", l, " has no experts");
    layers[l].experts = size_t(experts[l]);
    layers[l].slot_bytes = Bank::whole_pages(size_t(slot_bytes[l]));
  }
  Residency residency(layers, budget, policy);  // slots that nobody touches take no memory
  std::vector<uint32_t> wanted;
  for (size_t i = 0; i < forwards.layers.size(); ++i) {
    const int32_t layer = forwards.layers[i];
    require(layer >= 0 && size_t(layer) < layers.size(), "layer ", layer, " of ", layers.size());
    wanted.clear();
    for (int64_t at = forwards.offsets[i]; at < forwards.offsets[i + 1]; ++at) {
      const int32_t expert = forwards.experts[size_t(at)];
      require(expert >= 0 && expert < experts[size_t(layer)], "expert ", expert, " of ",
              experts[size_t(layer)]);
      wanted.push_back(residency.number(size_t(layer), size_t(expert)));
    }
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    require(residency.fits(wanted), "the experts of forward ", i, " exceed ", budget, " bytes");
    for (const auto& load : residency.hold(size_t(layer), wanted)) {
      residency.counters().bytes_read += residency.bytes_of(load->expert);
      residency.finish(load);
    }
    residency.release(wanted);
  }
  return residency.counts();
}

}  // namespace mlx_moe
