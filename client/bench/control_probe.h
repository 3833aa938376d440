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
  // While bytes flow: only calls that begin meanwhile count. Not until told.
  void SetFlowing(bool flowing) { flowing_ = flowing; }
  // Seconds of each call so far. Calls that failed are left out.
  std::vector<double> Stop();

 private:
  void Ask();
  client::Admin admin_;
  std::atomic<bool> stop_{false}, flowing_{false};
  std::vector<double> seconds_;
  std::thread thread_;
};

}  // namespace muond::bench
