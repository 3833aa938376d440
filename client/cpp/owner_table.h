// Which daemon of a run owns which elements of a slice: how a client routes what it sends and asks
// for. Made from the answer to Register; immutable.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "muond/v1/optimizer.pb.h"
#include "proto/shard.h"
#include "proto/values.h"

namespace muond::client {

class OwnerTable {
 public:
  // INTERNAL when the answer's shards do not cover every parameter that has a state, each element
  // once, or name what does not exist: nothing could be sent right then.
  static absl::StatusOr<OwnerTable> Make(const RunSpec& spec, const v1::RegisterReply& registered);

  int daemons() const { return daemons_; }

  // The elements of the box, counted in its own row-major order, that the daemon owns: ascending,
  // none adjacent, empty when it owns none. The box must be valid for the parameter.
  std::vector<ElementRange> Owned(int daemon, const std::string& parameter, const Box& box) const;

 private:
  struct Parameter {
    Dims shape;
    std::vector<std::vector<Shard>> shards;  // by daemon; unread where there is one
  };
  int daemons_ = 1;
  std::unordered_map<std::string, Parameter> parameters_;
};

}  // namespace muond::client
