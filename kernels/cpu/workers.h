// The threads of the cpu backend: loops over independent pieces of fixed size.
//
// What a piece is never depends on the number of threads, and every piece writes its own place, so
// results do not depend on who ran what.
#pragma once

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>

namespace muond::kernels::cpu {

class Workers {
 public:
  // `threads` at most, the caller's included; 0: one per core that this process may use.
  explicit Workers(int threads)
      : threads_(threads > 0 ? threads : tbb::info::default_concurrency()), arena_(threads_) {
    if (threads_ > tbb::info::default_concurrency()) {
      // oneTBB starts no more threads than cores unless told.
      more_threads_ = std::make_unique<tbb::global_control>(
          tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(threads_));
    }
  }

  int threads() const { return threads_; }

  // body(i) for every i < count, in any order and at the same time. Nested calls are allowed.
  template <typename Body>
  void ForEach(std::size_t count, const Body& body) {
    if (count <= 1 || threads_ == 1) {
      for (std::size_t i = 0; i < count; ++i) body(i);
      return;
    }
    arena_.execute([&] { tbb::parallel_for(std::size_t{0}, count, body); });
  }

  // ForEach for bodies that take long: each is handed out by itself, the first ones first.
  template <typename Body>
  void ForEachTask(std::size_t count, const Body& body) {
    if (count <= 1 || threads_ == 1) {
      for (std::size_t i = 0; i < count; ++i) body(i);
      return;
    }
    std::atomic<std::size_t> next{0};
    arena_.execute([&] {
      tbb::parallel_for(
          std::size_t{0}, std::min(count, static_cast<std::size_t>(threads_)),
          [&](std::size_t) {
            for (std::size_t i = next++; i < count; i = next++) body(i);
          },
          tbb::simple_partitioner());
    });
  }

  // body(first, last) over ranges that cover [0, count) once, in any order and at the same time.
  template <typename Body>
  void ForEachRange(std::size_t count, const Body& body) {
    if (count == 0) return;
    if (count == 1 || threads_ == 1) {
      body(std::size_t{0}, count);
      return;
    }
    arena_.execute([&] {
      tbb::parallel_for(
          tbb::blocked_range<std::size_t>(0, count),
          [&](const tbb::blocked_range<std::size_t>& range) { body(range.begin(), range.end()); });
    });
  }

  // Inside ForEach: which thread this is, below threads(), different for threads at work together.
  std::size_t CurrentThread() const {
    // A loop too short for the arena runs where the caller is, perhaps in an arena of its own.
    const int index = tbb::this_task_arena::current_thread_index();
    return index < 0 ? 0 : static_cast<std::size_t>(index) % static_cast<std::size_t>(threads_);
  }

 private:
  int threads_;
  std::unique_ptr<tbb::global_control> more_threads_;
  tbb::task_arena arena_;
};

// Where a piece of work may spread its loops: over all workers, or over the calling thread alone.
class Loop {
 public:
  explicit Loop(Workers* workers) : workers_(workers) {}  // null: the calling thread

  template <typename Body>
  void ForEach(std::size_t count, const Body& body) const {
    if (workers_ != nullptr) {
      workers_->ForEach(count, body);
      return;
    }
    for (std::size_t i = 0; i < count; ++i) body(i);
  }

 private:
  Workers* workers_;
};

}  // namespace muond::kernels::cpu
