// What clang's analysis of locks must find, and what it must pass: locks_test.py compares.
#include "proto/mutex.h"

namespace {

using muond::CondVar;
using muond::Mutex;
using muond::MutexLock;

class Counter {
 public:
  void Good() MUOND_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    AddLocked();
    changed_.wait(lock, [this]() MUOND_REQUIRES(mutex_) { return value_ > 0; });
    lock.unlock();
    lock.lock();
    ++value_;
  }
  int Unlocked() const { return value_; }  // FAULT
  void Unheld() { AddLocked(); }           // FAULT
  void After() {
    MutexLock lock(mutex_);
    lock.unlock();
    ++value_;  // FAULT
  }
  void Predicate() {
    MutexLock lock(mutex_);
    changed_.wait(lock, [this] { return value_ > 0; });  // FAULT
  }
  void Twice() {
    MutexLock lock(mutex_);
    Good();  // FAULT
  }

 private:
  void AddLocked() MUOND_REQUIRES(mutex_) { ++value_; }
  Mutex mutex_;
  CondVar changed_;
  int value_ MUOND_GUARDED_BY(mutex_) = 0;
};

}  // namespace

int main() {
  Counter counter;
  counter.Unheld();
  counter.Good();
  counter.After();
  counter.Predicate();
  counter.Twice();
  return counter.Unlocked();
}
