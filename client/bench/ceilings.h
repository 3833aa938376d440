// What the machine can do at best, measured where the benchmark runs and in the same run: figures
// of a daemon mean something beside these only. A daemon on another machine has other ceilings.
#pragma once

#include <optional>
#include <string>

namespace muond::bench {

struct Ceilings {
  int threads = 1;                   // of "all threads"
  double memcpy_one_thread = 0;      // bytes copied per second, memory that is in no cache
  double memcpy = 0;                 // likewise, all threads at once
  double sgemm_flops = 0;            // fp32 products of 1024 x 1024, all threads, FLOP/s
  std::string sgemm_library;         // the faster one: "OpenBLAS Haswell", "oneDNN brg:avx512_core"
  std::optional<double> bf16_flops;  // bf16 products summed in fp32; none: not offered here
  std::string bf16_library;          // "oneDNN brg:avx512_core_bf16", or why there is none
};

// The best of some repetitions: a ceiling is no average. About two seconds. Threads are `threads`,
// or one per core for 0; each has a product of its own: how a backend that cuts its own tiles uses
// the libraries.
Ceilings MeasureCeilings(int threads);

// Bytes per second of `threads` threads copying memory that is in no cache, the best of five.
double MeasureMemcpy(int threads);

}  // namespace muond::bench
