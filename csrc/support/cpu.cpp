#include "support/cpu.h"

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "support/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mlx_moe {

namespace {

#if defined(__x86_64__)
// Linux hands out the tile registers on request (Documentation/arch/x86/xstate.rst).
bool tiles_allowed() {
#if defined(__linux__)
  constexpr int kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}

unsigned cpuid(unsigned leaf, char reg) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(leaf, 0, &a, &b, &c, &d)) return 0;
  return reg == 'c' ? c : d;
}

bool has_f16c() { return cpuid(1, 'c') >> 29 & 1; }

bool has_amx() {  // amx-bf16 and amx-tile
#if defined(MLX_MOE_EMULATE_AMX)
  return true;
#endif
  unsigned d = cpuid(7, 'd');
  return (d >> 22 & 1) && (d >> 24 & 1) && tiles_allowed();
}
#endif

std::vector<std::string> detect() {
  std::vector<std::string> isas;
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  bool vnni = avx512 && __builtin_cpu_supports("avx512vbmi") &&
              __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("gfni");
  bool amx = vnni && __builtin_cpu_supports("avx512bf16") && has_amx();
  if (amx) isas.push_back("amx");
  if (vnni) isas.push_back("vnni");
  if (avx512) isas.push_back("avx512");
  if (avx2) isas.push_back("avx2");
#elif defined(__aarch64__)
  isas.push_back("neon");
#endif
  isas.push_back("scalar");
  return isas;
}

size_t available_processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return size_t(CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

const std::vector<std::string>& usable_isas() {
  // Never destroyed: threads may still compute when the process exits.
  static const auto& isas = *new std::vector<std::string>(detect());
  return isas;
}

std::string chosen_isa() {
  const char* forced = std::getenv("MLX_MOE_ISA");
  const auto& isas = usable_isas();
  if (!forced || !*forced) return isas.front();
  if (std::find(isas.begin(), isas.end(), forced) != isas.end()) return forced;
  std::string list;
  for (const auto& isa : isas) list += (list.empty() ? "" : ", ") + isa;
  throw Error("MLX_MOE_ISA=" + std::string(forced) + " cannot run here; usable: " + list);
}

size_t chosen_threads() {
  const char* text = std::getenv("MLX_MOE_NUM_THREADS");
  if (!text || !*text) return available_processors();
  char* end = nullptr;
  long n = std::strtol(text, &end, 10);
  require(*end == 0 && n >= 1 && n <= 1024,
          "MLX_MOE_NUM_THREADS=" + std::string(text) + " is not a number from 1 to 1024");
  return size_t(n);
}

}  // namespace mlx_moe
