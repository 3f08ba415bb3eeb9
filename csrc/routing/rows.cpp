#include "routing/rows.h"

#include <string>

#include "support/cpu.h"

namespace mlx_moe {

const RowCode& row_code() {
  const std::string isa = chosen_isa();
#if defined(__x86_64__)
  if (isa == "avx2") return avx2_rows;
  if (isa != "scalar") return avx512_rows;  // which all better ones imply
#elif defined(__aarch64__)
  if (isa != "scalar") return neon_rows;
#endif
  return scalar_rows;
}

}  // namespace mlx_moe
