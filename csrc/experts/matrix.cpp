#include "experts/matrix.h"

#include "support/error.h"

namespace mlx_moe {

namespace {
constexpr const char* kNames[] = {"dense", "affine", "mxfp4", "mxfp8", "nvfp4"};
}

Mode parse_mode(const std::string& name) {
  for (int i = 0; i < 5; ++i)
    if (name == kNames[i]) return Mode(i);
  throw Error("unknown quantisation mode '" + name + "'; known: affine, mxfp4, mxfp8, nvfp4");
}

const char* name_of(Mode mode) { return kNames[int(mode)]; }

void validate(const Matrix& m) {
  require(m.experts > 0 && m.rows > 0 && m.cols > 0, "a weight with no experts, rows or columns");
  if (m.mode == Mode::dense) return;
  auto got = std::string(name_of(m.mode)) + " with bits=" + std::to_string(m.bits) +
             " group_size=" + std::to_string(m.group);
  bool known;
  switch (m.mode) {
    case Mode::affine:
      known = ((m.bits >= 2 && m.bits <= 6) || m.bits == 8) &&
              (m.group == 32 || m.group == 64 || m.group == 128);
      break;
    case Mode::mxfp4:
      known = m.bits == 4 && m.group == 32;
      break;
    case Mode::mxfp8:
      known = m.bits == 8 && m.group == 32;
      break;
    default:
      known = m.bits == 4 && m.group == 16;
      break;
  }
  require(known, "unknown quantisation: " + got +
                     "; known: affine 2-6 or 8 bits in groups of 32, 64 or 128, mxfp4 and mxfp8 "
                     "in groups of 32, nvfp4 in groups of 16");
  require(m.cols % size_t(m.group) == 0,
          std::to_string(m.cols) + " columns are not whole groups: " + got);
}

}  // namespace mlx_moe
