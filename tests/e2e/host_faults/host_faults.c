/* libmuond_host_faults.so: preloaded into a daemon, it makes the machine under it misbehave, as the
 * test says in a file of 3 numbers that both have mapped (host_faults.py writes it):
 *
 *   disk_full   nonzero: writes to regular files fail with ENOSPC
 *   sync_delay  microseconds that each fsync takes longer
 *   clock_shift nanoseconds by which the wall clock is off (CLOCK_MONOTONIC never is); a wait until
 *               a time of that clock, begun after the jump, ends when the clock shows it
 *
 * MUOND_HOST_FAULTS names the file; without it every call passes through. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { kDiskFull, kSyncDelay, kClockShift, kCount };

static const _Atomic int64_t* control;

__attribute__((constructor)) static void Map(void) {
  const char* path = getenv("MUOND_HOST_FAULTS");
  if (path == NULL) return;
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) abort(); /* A test that faults nothing would prove nothing. */
  void* map = mmap(NULL, kCount * sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (map == MAP_FAILED) abort();
  control = map;
}

static int64_t Now(int which) { return control == NULL ? 0 : atomic_load(&control[which]); }

static int IsRegular(int fd) {
  struct stat about;
  return fstat(fd, &about) == 0 && S_ISREG(about.st_mode);
}

/* The function of this name that is behind ours. */
#define REAL(function)                   \
  static __typeof__(&(function)) real;   \
  if (real == NULL) real = (__typeof__(real))dlsym(RTLD_NEXT, #function)

ssize_t write(int fd, const void* data, size_t bytes) {
  REAL(write);
  if (Now(kDiskFull) && IsRegular(fd)) {
    errno = ENOSPC;
    return -1;
  }
  return real(fd, data, bytes);
}

int fsync(int fd) {
  REAL(fsync);
  const int64_t delay = Now(kSyncDelay);
  if (delay > 0) {
    const struct timespec wait = {delay / 1000000, delay % 1000000 * 1000};
    nanosleep(&wait, NULL);
  }
  return real(fd);
}

/* `time` moved by `ns`. */
static struct timespec Moved(struct timespec time, int64_t ns) {
  const int64_t moved = time.tv_sec * 1000000000ll + time.tv_nsec + ns;
  const struct timespec result = {moved / 1000000000, moved % 1000000000};
  return result;
}

int clock_gettime(clockid_t clock, struct timespec* time) {
  REAL(clock_gettime);
  const int result = real(clock, time);
  if (result == 0 && clock == CLOCK_REALTIME) *time = Moved(*time, Now(kClockShift));
  return result;
}

/* abseil's waits ask for the time so. */
int gettimeofday(struct timeval* time, void* zone) {
  (void)zone;
  struct timespec now;
  const int result = clock_gettime(CLOCK_REALTIME, &now);
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return result;
}

/* A time of CLOCK_REALTIME is beyond any of CLOCK_MONOTONIC, whichever the condition was made for. */
static int IsWallClock(const struct timespec* time) { return time->tv_sec > 1000000000; }

/* std::condition_variable's waits until a time of the wall clock. */
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const struct timespec* until) {
  static __typeof__(&pthread_cond_timedwait) real;
  if (real == NULL) {
    real = (__typeof__(real))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (real == NULL) real = (__typeof__(real))dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  }
  if (!IsWallClock(until)) return real(condition, mutex, until);
  const struct timespec kernel = Moved(*until, -Now(kClockShift));
  return real(condition, mutex, &kernel);
}

/* abseil's. */
long syscall(long number, ...) {
  REAL(syscall);
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  struct timespec kernel;
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) != 0 && a[3] != 0) {
    kernel = Moved(*(const struct timespec*)a[3], -Now(kClockShift));
    a[3] = (long)&kernel;
  }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
