#include "tests/support/cluster_fixture.h"

#include <stdlib.h>

#include <filesystem>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace muond::cluster {

Cluster::Cluster(int daemons, ServiceOptions options, Adjust adjust)
    : options_(std::move(options)), adjust_(std::move(adjust)) {
  std::string pattern =
      (std::filesystem::temp_directory_path() / "muond-cluster-XXXXXX").string();
  MUOND_CHECK(mkdtemp(pattern.data()) != nullptr, "a directory for the sockets");
  directory_ = pattern;
  services_.resize(daemons);
  if (daemons > 1) options_.peers = absl::StrJoin(endpoints(), ",");
  for (int daemon = 0; daemon < daemons; ++daemon) Start(daemon);
}

Cluster::~Cluster() {
  services_.clear();
  std::filesystem::remove_all(directory_);
}

std::string Cluster::endpoint(int daemon) const {
  return absl::StrFormat("unix://%s/%d.sock", directory_, daemon);
}

std::vector<std::string> Cluster::endpoints() const {
  std::vector<std::string> all;
  for (int daemon = 0; daemon < count(); ++daemon) all.push_back(endpoint(daemon));
  return all;
}

void Cluster::Stop(int daemon) { services_[daemon].reset(); }

void Cluster::Start(int daemon) {
  ServiceOptions options = options_;
  options.listen = {endpoint(daemon)};
  if (!options.state_dir.empty()) {
    options.state_dir = absl::StrFormat("%s/state-%d", directory_, daemon);
  }
  if (adjust_ != nullptr) adjust_(daemon, options);
  services_[daemon] = StartService(options);
}

}  // namespace muond::cluster
