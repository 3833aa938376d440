// How threads exclude each other, in a form that the compiler checks.
//
// A field says what guards it, a function what must be held when it is called:
//
//     absl::Status StoreLocked() MUOND_REQUIRES(mutex_);
//     Mutex mutex_;
//     std::vector<Job> jobs_ MUOND_GUARDED_BY(mutex_);
//
// and clang's -Wthread-safety refuses what does not keep to it (preset clang; for g++ annotations
// are nothing). Below are std::mutex and std::condition_variable, at their price and with what
// sanitizers know of them: no other file names these, but for spdlog's sink (tidy rule `locks`).
//
// A lambda is a function of its own to the analysis. One that is called under the lock says so, as
// a wait's predicate must:
//
//     ready_.wait(lock, [this]() MUOND_REQUIRES(mutex_) { return !jobs_.empty(); });
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

#if defined(__clang__)
#define MUOND_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define MUOND_THREAD_ANNOTATION(x)
#endif
#define MUOND_GUARDED_BY(mutex) MUOND_THREAD_ANNOTATION(guarded_by(mutex))
// What a pointer points to, not the pointer.
#define MUOND_PT_GUARDED_BY(mutex) MUOND_THREAD_ANNOTATION(pt_guarded_by(mutex))
// The caller holds it.
#define MUOND_REQUIRES(...) MUOND_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
// The caller must not hold it: the function takes it, or waits for somebody who does.
#define MUOND_EXCLUDES(...) MUOND_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
// For what the analysis can't follow; the comment beside it says why it is right.
#define MUOND_UNCHECKED_LOCKS MUOND_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace muond {

class MUOND_THREAD_ANNOTATION(capability("mutex")) Mutex {
 public:
  void lock() MUOND_THREAD_ANNOTATION(acquire_capability()) { mutex_.lock(); }
  void unlock() MUOND_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }
  bool try_lock() MUOND_THREAD_ANNOTATION(try_acquire_capability(true)) {
    return mutex_.try_lock();
  }
  // Does nothing: tells the analysis what it can't see, that the caller holds it.
  void AssertHeld() const MUOND_THREAD_ANNOTATION(assert_capability(this)) {}

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds a mutex until its end of life, or unlock().
class MUOND_THREAD_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) MUOND_THREAD_ANNOTATION(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~MutexLock() MUOND_THREAD_ANNOTATION(release_capability()) {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void lock() MUOND_THREAD_ANNOTATION(acquire_capability()) { lock_.lock(); }
  void unlock() MUOND_THREAD_ANNOTATION(release_capability()) { lock_.unlock(); }

 private:
  friend class CondVar;
  std::unique_lock<std::mutex> lock_;
};

// A lock that is handed on, or kept among others. The analysis does not follow it.
using MovableLock = std::unique_lock<Mutex>;

// std::condition_variable's own words, with MutexLock in place of std::unique_lock.
class CondVar {
 public:
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }

  // Until somebody notifies, or for no reason.
  void wait(MutexLock& lock) { changed_.wait(lock.lock_); }
  template <typename Duration>
  void wait_for(MutexLock& lock, const Duration& duration) {
    changed_.wait_for(lock.lock_, duration);
  }
  // Until the predicate, which is called with the lock held, says true.
  template <typename Predicate>
  void wait(MutexLock& lock, Predicate predicate) MUOND_UNCHECKED_LOCKS {
    changed_.wait(lock.lock_, std::move(predicate));
  }
  // What the predicate says at the end: false, the time is over.
  template <typename Duration, typename Predicate>
  bool wait_for(MutexLock& lock, const Duration& duration,
                Predicate predicate) MUOND_UNCHECKED_LOCKS {
    return changed_.wait_for(lock.lock_, duration, std::move(predicate));
  }

 private:
  std::condition_variable changed_;
};

}  // namespace muond
