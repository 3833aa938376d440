// Puts what a pull brings where it belongs, whichever way it comes: every piece must be the one
// that is due, and must have its checksum.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/pull_stream.h"
#include "muond/v1/optimizer.pb.h"

namespace muond::client {

// The sinks as the request names them, each with the element that must come next. Not thread-safe.
class PullAssembly {
 public:
  // Fills in the request. The job must outlive this.
  PullAssembly(const PullJob& job, v1::PullRequest& request);

  bool empty() const { return progress_.empty(); }

  // Copies a piece's elements to its sink. DATA_LOSS for a wrong CRC, a hole, an overlap or a wrong
  // element type; INTERNAL for another version or what was not asked for.
  absl::Status Take(std::int64_t version, const v1::Chunk& header,
                    std::span<const std::string_view> payload);
  // DATA_LOSS naming the first slice that is not whole.
  absl::Status CheckComplete() const;

 private:
  struct Progress {
    explicit Progress(const SinkPart& p) : part(&p), next(p.ranges[0].first) {}
    bool complete() const { return range == part->ranges.size(); }
    // Elements that may still come before the next hole.
    std::int64_t room() const {
      return complete() ? 0 : part->ranges[range].first + part->ranges[range].count - next;
    }
    void Advance(std::int64_t count) {
      next += count;
      if (room() == 0 && ++range < part->ranges.size()) next = part->ranges[range].first;
    }

    const SinkPart* part;
    std::size_t range = 0;  // the one that is coming in
    std::int64_t next;      // element of the slice that must come next
  };
  // The elements of a chunk that fits where its sink stands.
  absl::StatusOr<std::int64_t> CountOf(const v1::Chunk& header, std::int64_t bytes,
                                       const Progress& progress) const;

  const PullJob& job_;
  std::map<std::pair<std::string, std::int64_t>, Progress> progress_;
};

}  // namespace muond::client
