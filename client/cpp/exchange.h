// Slices on their way through memory that the daemon reaches itself: one attempt of an Exchange,
// whose parts (gradients, the end of a step, parameters) are put together here.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/cpp/gpu_arena.h"
#include "client/cpp/pair.h"
#include "client/cpp/pull_stream.h"
#include "client/cpp/push_stream.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"
#include "muond/v1/optimizer.pb.h"

namespace muond::client {

// How an exchange reaches one daemon's memory: an arena, a pair's windows, or the process that both
// live in.
struct ExchangePath {
  std::shared_ptr<GpuLink> link;     // null: a pair, or pointers
  std::shared_ptr<PairLink> pair;    // null: an arena, or pointers
  GpuLayout layout;                  // of a pair: what the daemon owns of each slice
  std::shared_ptr<GpuDriver> driver;  // may be null where buffers are the host's
  int device = -1;         // where links lie; buffers' kind that the path takes

  // Whether what lies at `place` goes this way: a GPU's where the trainer has one, else the host's.
  bool Takes(const GpuPlace& place) const { return place.on_gpu() == (device >= 0); }
  bool pointers() const { return link == nullptr && pair == nullptr; }
};

// Puts parts into one message: those from the front on that fit into one window, as many as it
// returns. They must pass ExchangePath::Takes and, where it is pointers, be one range each.
// Returns when the windows hold them; a pair's may be on their way until `deadline`
// (PairLink::AwaitSent). INVALID_ARGUMENT for a gradient wider than its place.
absl::StatusOr<std::size_t> PutFill(const ExchangePath& path, std::span<const SlicePart> parts,
                                    absl::Time deadline, v1::ArenaFill* fill);

// Whether a part can go this way at all: one range where it is pointers. Initial values that are
// wider than their place in the window go another way; such gradients are refused by PutFill.
bool FillFits(const ExchangePath& path, const SlicePart& part, bool initial);

// Asks for the sinks' slices; TakePull then brings them where they belong. `*used` as
// PairLink::Place; of no meaning elsewhere.
absl::Status PutPull(const ExchangePath& path, std::span<const SinkPart> sinks, bool master,
                     std::int64_t* used, v1::ExchangePull* pull);
// INTERNAL when the window's fence says that the daemon wrote something else; through a pair,
// errors as PairLink::Settle, by the deadline.
absl::Status TakePull(const ExchangePath& path, std::span<const SinkPart> sinks,
                      const v1::ExchangePull& pull, const v1::ExchangeReply& reply,
                      absl::Time deadline);
// The first half of it, through a pair: PairLink::Settle is the other.
absl::StatusOr<PairLink::Arrival> BeginPull(const ExchangePath& path,
                                            std::span<const SinkPart> sinks,
                                            const v1::ExchangePull& pull,
                                            const v1::ExchangeReply& reply, absl::Time deadline);

// Whether the sink's elements can come this way: fp32 master weights of bf16 parameters have no
// place in a window.
bool PullFits(const ExchangePath& path, const SinkPart& sink);

}  // namespace muond::client
