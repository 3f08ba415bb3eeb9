#include "routing/combine.h"

#include <algorithm>
#include <climits>
#include <string>
#include <utility>
#include <vector>

#include "routing/rows.h"
#include "support/error.h"
#include "support/thread_pool.h"

namespace mlx_moe {
namespace {

constexpr size_t kChunk = 8;         // tokens a task
constexpr size_t kAlone = 64 << 10;  // bytes of rows not worth waking a thread for

// Where the row of an assignment is.
struct Place {
  int32_t part = -1, row = 0;  // -1: nowhere
};

std::string name_of(Place p, size_t parts) {
  return std::to_string(p.row) + (parts > 1 ? " of part " + std::to_string(p.part) : "");
}

// The places of all assignments.
std::vector<Place> place_rows(std::span<const Part> parts, size_t total) {
  std::vector<Place> places(total);
  for (size_t p = 0; p < parts.size(); ++p)
    for (size_t i = 0; i < parts[p].rows.count; ++i) {
      const int32_t a = parts[p].assignments[i];
      if (a == -1) continue;
      const Place here{int32_t(p), int32_t(i)};
      if (size_t(uint32_t(a)) >= total)
        throw Error("assignments[" + name_of(here, parts.size()) + "] is " + std::to_string(a) +
                    ", expected -1 or an assignment below " + std::to_string(total));
      Place& place = places[size_t(a)];
      if (place.part >= 0)
        throw Error("assignment " + std::to_string(a) + " is in rows " +
                    name_of(place, parts.size()) + " and " + name_of(here, parts.size()) +
                    ", expected once");
      place = here;
    }
  return places;
}

// The terms of token t's sum.
void gather(std::span<const Part> parts, const std::vector<Place>& places, const Scores& scores,
            size_t t, std::vector<Term>& terms) {
  terms.clear();
  if (t >= scores.tokens) return;
  for (size_t a = t * scores.top_k; a < (t + 1) * scores.top_k; ++a) {
    if (places[a].part < 0) continue;
    const Rows& rows = parts[size_t(places[a].part)].rows;
    const size_t at = size_t(places[a].row) * rows.width * size_of(rows.type);
    terms.push_back({static_cast<const char*>(rows.data) + at, scores.data[a], rows.type});
  }
}

// Checks the parts; the bytes that there are to read and write.
size_t check(std::span<const Part> parts, const Scores& scores, const Sums& out) {
  require(
      parts.size() <= INT32_MAX && scores.tokens <= INT32_MAX / std::max<size_t>(scores.top_k, 1),
      "more than 2147483647 assignments");
  size_t bytes = scores.tokens * out.width * size_of(out.type);
  for (const Part& part : parts) {
    require(part.rows.count <= INT32_MAX, "more than 2147483647 rows");
    require(part.rows.width == out.width, "rows have ", part.rows.width, " values, out ",
            out.width);
    bytes += part.rows.count * out.width * size_of(part.rows.type);
  }
  return bytes;
}

}  // namespace

void combine(std::span<const Part> parts, const Scores& scores, bool accumulate, const Sums& out) {
  const size_t bytes = check(parts, scores, out), row_bytes = out.width * size_of(out.type);
  const std::vector<Place> places = place_rows(parts, scores.tokens * scores.top_k);
  const RowCode& code = row_code();
  auto task = [&](size_t chunk) {
    std::vector<Term> terms, next;
    const size_t begin = chunk * kChunk, end = std::min(scores.tokens, begin + kChunk);
    gather(parts, places, scores, begin, terms);
    for (size_t t = begin; t < end; ++t, std::swap(terms, next)) {
      gather(parts, places, scores, t + 1, next);
      code.sum({terms.data(), terms.size()}, {next.data(), next.size()}, out.width, accumulate,
               out.type, static_cast<char*>(out.data) + t * row_bytes);
    }
  };
  const size_t chunks = (scores.tokens + kChunk - 1) / kChunk;
  if (bytes < kAlone)
    for (size_t i = 0; i < chunks; ++i) task(i);
  else
    ThreadPool::shared().run(chunks, task);
}

}  // namespace mlx_moe
