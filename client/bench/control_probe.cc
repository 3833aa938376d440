#include "client/bench/control_probe.h"

#include <chrono>
#include <utility>

namespace muond::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kPause(2);

}  // namespace

ControlProbe::ControlProbe(client::Admin admin)
    : admin_(std::move(admin)), thread_([this] { Ask(); }) {}

ControlProbe::~ControlProbe() { Stop(); }

std::vector<double> ControlProbe::Stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  return seconds_;
}

void ControlProbe::Ask() {
  while (!stop_) {
    const bool counts = flowing_;
    const Clock::time_point start = Clock::now();
    // Of a run that is not there: the smallest answer.
    const auto answer = admin_.Status("none");
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const bool answered = answer.ok() || absl::IsNotFound(answer.status());
    if (counts && answered) seconds_.push_back(seconds);
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace muond::bench
