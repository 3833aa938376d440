#include "client/cli/chrome_trace.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_format.h"

namespace muond::cli {
namespace {

constexpr int kStepLine = 0, kWaitLine = 1, kDeviceLine = 2;  // thread ids; devices follow

Json Name(const char* what, int pid, int tid, const std::string& name) {
  return {{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", {{"name", name}}}};
}

// A complete event; times in microseconds.
Json Span(const std::string& name, const char* category, int pid, int tid, double start_seconds,
          double seconds, Json arguments) {
  return {{"ph", "X"},   {"name", name}, {"cat", category},
          {"pid", pid},  {"tid", tid},   {"ts", start_seconds * 1e6},
          {"dur", std::max(seconds, 0.0) * 1e6}, {"args", std::move(arguments)}};
}

}  // namespace

Json ChromeTrace(const std::vector<v1::StepEvent>& events) {
  std::map<std::string, int> pids;
  std::set<std::pair<int, int>> lines;
  Json list = Json::array();
  for (const v1::StepEvent& event : events) {
    const auto [entry, first] =
        pids.try_emplace(event.daemon(), static_cast<int>(pids.size()) + 1);
    const int pid = entry->second;
    if (first) list.push_back(Name("process_name", pid, 0, "muond " + event.daemon()));
    const auto line = [&](int tid, const std::string& name) {
      if (lines.emplace(pid, tid).second) list.push_back(Name("thread_name", pid, tid, name));
      return tid;
    };
    const v1::StepOutcome& outcome = event.outcome();
    const double begin = event.begin_seconds() > 0 ? event.begin_seconds() : event.end_seconds();
    list.push_back(Span(absl::StrFormat("step %d %s", outcome.step(),
                                        outcome.applied() ? "applied" : "skipped"),
                        "step", pid, line(kStepLine, "steps"), begin, event.end_seconds() - begin,
                        {{"run", event.run()},
                         {"loss_scale", outcome.loss_scale()},
                         {"grad_norm", outcome.grad_norm()},
                         {"newton_schulz_calls", outcome.newton_schulz_calls()}}));
    for (const v1::PhaseSpan& span : event.phases()) {
      const int device = static_cast<int>(span.device());
      const int tid = device < 0 ? line(kWaitLine, "waiting")
                                 : line(kDeviceLine + device, absl::StrFormat("device %d", device));
      list.push_back(Span(span.phase(), "phase", pid, tid, span.start_seconds(), span.seconds(),
                          {{"step", outcome.step()}}));
    }
  }
  return {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(list)}};
}

}  // namespace muond::cli
