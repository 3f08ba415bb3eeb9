#include "store/runs.h"

#include <algorithm>

namespace mlx_moe {

namespace {

constexpr size_t kRunBytes = 2 << 20;  // large enough for the disk, small enough to share
constexpr uint64_t kGap = 8 << 10;     // not worth a read of its own

struct Item {
  uint32_t file;
  Segment segment;
  const std::shared_ptr<Load>* load;
};

}  // namespace

std::vector<Run> cut_into_runs(const std::vector<Reading>& readings) {
  std::vector<Item> items;
  for (const Reading& r : readings)
    for (const Piece& p : *r.pieces)
      for (size_t done = 0; done < p.size; done += kRunBytes)
        items.push_back(
            {p.file,
             {p.offset + done, std::min(kRunBytes, p.size - done), r.slot + p.at + done},
             &r.load});
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return a.file != b.file ? a.file < b.file : a.segment.offset < b.segment.offset;
  });
  std::vector<Run> runs;
  for (const Item& item : items) {
    const Segment& s = item.segment;
    bool joins = false;
    if (!runs.empty() && runs.back().file == item.file) {
      const Segment &first = runs.back().segments.front(), &last = runs.back().segments.back();
      const uint64_t end = last.offset + last.size;
      joins = s.offset >= end && s.offset - end <= kGap &&
              s.offset + s.size - first.offset <= kRunBytes;
    }
    if (!joins) runs.push_back({item.file, {}, {}});
    runs.back().segments.push_back(s);
    runs.back().loads.push_back(*item.load);
    ++(*item.load)->parts_left;
  }
  return runs;
}

}  // namespace mlx_moe
