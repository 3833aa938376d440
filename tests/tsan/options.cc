// ThreadSanitizer's defaults for every program of the tsan preset, so that no test depends on an
// environment variable that somebody must remember. TSAN_OPTIONS still overrides them.

extern "C" const char* __tsan_default_options() {
  // Libraries that are not instrumented (OpenBLAS, OpenSSL): their accesses are ignored, ours
  // are not. Nothing is suppressed.
  return "ignore_noninstrumented_modules=1:halt_on_error=0:exitcode=66:second_deadlock_stack=1";
}
