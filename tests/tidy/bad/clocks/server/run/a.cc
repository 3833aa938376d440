// absl::Now() in words is no wait.
const absl::Time end = absl::Now() + wait;
const auto now = std::chrono::system_clock::now();
context.set_deadline(absl::ToChronoTime(deadline));
