#include "experts/kernel.h"
namespace mlx_moe {
const Kernel amx_kernel = {};
}
