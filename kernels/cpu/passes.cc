// Which of the compiled instruction sets this processor can run.
#include "kernels/cpu/passes.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace muond::kernels::cpu {

// One per compilation of passes_impl.cc.
extern const Passes kPassesBase;
#if defined(MUOND_PASSES_X86)
extern const Passes kPassesAvx2;
extern const Passes kPassesAvx512;

namespace {

bool HasF16C() {
  // clang 14 does not know this feature by name; bit 29 of ECX of leaf 1.
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & (1u << 29)) != 0;
}

bool HasAvx2() { return __builtin_cpu_supports("avx2") && HasF16C(); }

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace
#endif

const Passes* const* SupportedPasses() {
  struct List {
    const Passes* entries[4] = {};
    List() {
      std::size_t count = 0;
#if defined(MUOND_PASSES_X86)
      if (HasAvx512()) entries[count++] = &kPassesAvx512;
      if (HasAvx2()) entries[count++] = &kPassesAvx2;
#endif
      entries[count] = &kPassesBase;
    }
  };
  static const List list;
  return list.entries;
}

}  // namespace muond::kernels::cpu
