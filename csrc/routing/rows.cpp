#include "routing/rows.h"

#include <string>

#include "support/cpu.h"

namespace mlx_moe {

const RowCode& row_code() {
  const std::string isa = chosen_isa();
#if defined(__x86_64__)
  if (isa == "amx" || isa == "avx512") return avx512_rows;
  if (isa == "avx2") return avx2_rows;
#elif defined(__aarch64__)
  if (isa == "neon") return neon_rows;
#endif
  return scalar_rows;
}

}  // namespace mlx_moe
