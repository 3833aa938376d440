// Several daemons that share their runs, in this process, each on a unix socket of a directory that
// goes away with them.
//
//   Cluster cluster(3);
//   TestRun run(cluster.channel(0), spec);
//   cluster.Stop(1);      // its state is lost
//   cluster.Start(1);     // a daemon that knows nothing
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/service_fixture.h"

namespace muond::cluster {

class Cluster {
 public:
  // `options` of every daemon; listen and peers are filled in. With a state_dir (any text) each
  // daemon has one of its own, which outlives it. `adjust` changes what is one daemon's alone.
  using Adjust = std::function<void(int daemon, ServiceOptions&)>;
  explicit Cluster(int daemons, ServiceOptions options = {.threads = 1}, Adjust adjust = nullptr);
  ~Cluster();

  int count() const { return static_cast<int>(services_.size()); }
  std::string endpoint(int daemon) const;
  std::vector<std::string> endpoints() const;
  Service& service(int daemon) { return *services_[daemon]; }
  std::shared_ptr<grpc::Channel> channel(int daemon) { return services_[daemon]->channel(); }

  void Stop(int daemon);
  void Start(int daemon);

 private:
  std::string directory_;
  ServiceOptions options_;
  Adjust adjust_;
  std::vector<std::unique_ptr<Service>> services_;
};

}  // namespace muond::cluster
