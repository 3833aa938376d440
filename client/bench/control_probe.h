// How long small calls take while bytes flow: a thread that asks a daemon for its status again and
// again, on a connection of its own.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "client/cpp/admin.h"

namespace muond::bench {

class ControlProbe {
 public:
  explicit ControlProbe(client::Admin admin);
  ~ControlProbe();
  // Seconds of each call so far. Calls that failed are left out.
  std::vector<double> Stop();

 private:
  void Ask();
  client::Admin admin_;
  std::atomic<bool> stop_{false};
  std::vector<double> seconds_;
  std::thread thread_;
};

}  // namespace muond::bench
