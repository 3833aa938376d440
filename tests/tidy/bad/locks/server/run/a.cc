// std::mutex may be spoken of.
std::mutex mutex_;
void Run::Stop() {
  const std::lock_guard lock(mutex_);
  std::unique_lock<std::mutex> other(mutex_);
}
std::condition_variable changed_;
absl::Mutex theirs_;
Mutex mutex_;  // of what follows
bool stopped_ = false;  // guarded by mutex_
bool ended_ MUOND_GUARDED_BY(mutex_) = false;
