#include "client/cpp/exchange.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert.h"

namespace muond::client {
namespace {

std::int64_t ElementsOf(std::span<const ElementRange> ranges) {
  std::int64_t elements = 0;
  for (const ElementRange& range : ranges) elements += range.count;
  return elements;
}

// The streams whose work must be done before somebody else may look, and what is to be copied
// behind that work: together, since a call for each slice would take longer than the bytes.
class Places {
 public:
  explicit Places(const ExchangePath& path) : path_(path) {}
  void Add(const GpuPlace& place) {
    if (place.on_gpu()) Of(place);
  }
  void Copy(const GpuPlace& place, void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) Of(place).push_back({to, from, bytes});
  }
  // Copies, and returns when all is done.
  absl::Status WaitForAll() const {
    for (const auto& [place, copies] : places_) {
      // A program on one device can't be relied on to reach what lies on another.
      MUOND_RETURN_IF_ERROR(place.device == path_.device
                                ? path_.driver->CopyAll(place, copies)
                                : path_.driver->GpuDriver::CopyAll(place, copies));
    }
    for (const auto& [place, copies] : places_) {
      if (place.on_gpu()) MUOND_RETURN_IF_ERROR(path_.driver->Wait(place));
    }
    return absl::OkStatus();
  }

 private:
  using Copies = std::vector<GpuDriver::CopyJob>;
  Copies& Of(const GpuPlace& place) {
    for (auto& [known, copies] : places_) {
      if (known == place) return copies;
    }
    return places_.emplace_back(place, Copies()).second;
  }

  const ExchangePath& path_;
  std::vector<std::pair<GpuPlace, Copies>> places_;
};

// The window that holds this address at the slice's place; null: none does.
GpuLink::Window* WindowOf(GpuLink& link, const void* data, std::int64_t gradient) {
  for (GpuLink::Window& window : link.outgoing()) {
    if (link.At(window, gradient) == data) return &window;
  }
  return nullptr;
}

// Copies a part to its place in the window, unless that is where it was made.
void CopyIn(const SlicePart& part, std::byte* to, Places& places) {
  const SliceSource& source = *part.source;
  const auto size = static_cast<std::int64_t>(DtypeBytes(source.dtype));
  if (source.data == to) return;
  for (const ElementRange& range : part.ranges) {
    const auto bytes = static_cast<std::size_t>(range.count * size);
    places.Copy(source.place, to, static_cast<const std::byte*>(source.data) + range.first * size,
                bytes);
    to += bytes;
  }
}

v1::Chunk* AddChunk(const SlicePart& part, std::int64_t bytes, v1::ArenaFill* fill) {
  const SliceSource& source = *part.source;
  v1::Chunk* chunk = fill->add_chunks();
  chunk->set_parameter(source.parameter);
  chunk->set_slice(source.slice);
  chunk->set_micro_batch(source.micro_batch);
  chunk->set_dtype(ToProto(source.dtype));
  chunk->set_offset(part.ranges[0].first);
  chunk->mutable_region()->set_bytes(bytes);
  return chunk;
}

}  // namespace

absl::StatusOr<std::size_t> PutFill(const ExchangePath& path, std::span<const SlicePart> parts,
                                    absl::Time deadline, v1::ArenaFill* fill) {
  fill->Clear();
  Places places(path);
  if (path.pair != nullptr) {
    for (const SlicePart& part : parts) places.Add(part.source->place);
    MUOND_RETURN_IF_ERROR(places.WaitForAll());
    return path.pair->Send(parts, deadline, fill);
  }
  GpuLink::Window* window = nullptr;
  std::set<std::pair<std::string, std::int64_t>> used;
  std::size_t taken = 0;
  for (const SlicePart& part : parts) {
    const SliceSource& source = *part.source;
    const auto size = static_cast<std::int64_t>(DtypeBytes(source.dtype));
    const std::int64_t bytes = ElementsOf(part.ranges) * size;
    std::int64_t at = 0;
    if (path.link == nullptr) {
      at = reinterpret_cast<std::int64_t>(source.data) + part.ranges[0].first * size;
    } else {
      const GpuLayout::Place* const place =
          path.link->layout().Find(source.parameter, source.slice);
      if (place == nullptr || bytes > place->gradient_bytes) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "parameter \"%s\": slice %d: its %d bytes of %s are more than its place in the GPU's "
            "window: set gpu_gradient_dtype",
            source.parameter, source.slice, bytes,
            std::string(kernels::DtypeName(source.dtype))));
      }
      GpuLink::Window* const own = WindowOf(*path.link, source.data, place->gradient);
      // A window of views is taken as it is; others go along with it, each slice once.
      if (own != nullptr && window != nullptr && own != window) break;
      if (!used.insert({source.parameter, source.slice}).second) break;
      if (window == nullptr) {
        auto& all = path.link->outgoing();
        window = own != nullptr
                     ? own
                     : &*std::min_element(all.begin(), all.end(), [](const auto& a, const auto& b) {
                         return a.sequence < b.sequence;
                       });
      }
      at = window->place.offset() + place->gradient;
      CopyIn(part, path.link->base() + at, places);
    }
    places.Add(source.place);
    AddChunk(part, bytes, fill)->mutable_region()->set_offset(at);
    ++taken;
  }
  MUOND_RETURN_IF_ERROR(places.WaitForAll());
  if (window != nullptr) {
    fill->set_arena(path.link->handle());
    fill->set_window(window->index);
    fill->set_sequence(path.link->Fill(*window));
  }
  return taken;
}

bool FillFits(const ExchangePath& path, const SlicePart& part, bool initial) {
  if (path.pointers()) return part.ranges.size() == 1;
  if (path.pair != nullptr) {
    return !initial ||
           ElementsOf(part.ranges) * static_cast<std::int64_t>(DtypeBytes(part.source->dtype)) <=
               path.pair->window_bytes();
  }
  if (!initial) return true;
  const GpuLayout::Place* const place =
      path.link->layout().Find(part.source->parameter, part.source->slice);
  return place != nullptr &&
         ElementsOf(part.ranges) * static_cast<std::int64_t>(DtypeBytes(part.source->dtype)) <=
             place->gradient_bytes;
}

bool PullFits(const ExchangePath& path, const SinkPart& part) {
  const SliceSink& sink = *part.sink;
  if (!path.Takes(sink.place)) return false;
  if (path.pointers()) return part.ranges.size() == 1;
  if (path.pair != nullptr) {
    const GpuLayout::Place* const place = path.layout.Find(sink.parameter, sink.slice);
    return place != nullptr &&
           ElementsOf(part.ranges) * static_cast<std::int64_t>(DtypeBytes(sink.dtype)) <=
               place->parameter_bytes;
  }
  const GpuLayout::Place* const place = path.link->layout().Find(sink.parameter, sink.slice);
  const std::int64_t bytes =
      ElementsOf(part.ranges) * static_cast<std::int64_t>(DtypeBytes(sink.dtype));
  return place != nullptr && bytes <= place->parameter_bytes;
}

absl::Status PutPull(const ExchangePath& path, std::span<const SinkPart> sinks, bool master,
                     std::int64_t* used, v1::ExchangePull* pull) {
  pull->Clear();
  pull->mutable_pull()->set_master(master);
  // The daemon's order: by name, then as they are listed.
  std::map<std::string, std::vector<const SinkPart*>> by_name;
  for (const SinkPart& part : sinks) by_name[part.sink->parameter].push_back(&part);
  for (const auto& [name, parts] : by_name) {
    v1::ParameterSlices* slices = pull->mutable_pull()->add_slices();
    slices->set_parameter(name);
    for (const SinkPart* part : parts) {
      *slices->add_boxes() = ToProto(*part->box);
      const SliceSink& sink = *part->sink;
      const auto size = static_cast<std::int64_t>(DtypeBytes(sink.dtype));
      v1::ArenaRegion* region = pull->add_regions();
      region->set_bytes(ElementsOf(part->ranges) * size);
      if (path.pair != nullptr) continue;  // placed together
      if (path.link == nullptr) {
        region->set_offset(reinterpret_cast<std::int64_t>(sink.data) +
                           part->ranges[0].first * size);
      } else {
        region->set_offset(path.link->incoming().place.offset() +
                           path.link->layout().Find(name, sink.slice)->parameter);
      }
    }
  }
  if (path.pair != nullptr) return path.pair->Place(sinks, used, pull);
  if (path.link == nullptr) return absl::OkStatus();  // the caller adds the lease
  pull->set_arena(path.link->handle());
  pull->set_window(path.link->incoming().index);
  pull->set_sequence(++path.link->incoming().sequence);
  return absl::OkStatus();
}

absl::StatusOr<PairLink::Arrival> BeginPull(const ExchangePath& path,
                                            std::span<const SinkPart> sinks,
                                            const v1::ExchangePull& pull,
                                            const v1::ExchangeReply& reply, absl::Time deadline) {
  // What is still read there must not be written over.
  Places places(path);
  for (const SinkPart& part : sinks) places.Add(part.sink->place);
  MUOND_RETURN_IF_ERROR(places.WaitForAll());
  return path.pair->Receive(sinks, pull, reply, deadline);
}

absl::Status TakePull(const ExchangePath& path, std::span<const SinkPart> sinks,
                      const v1::ExchangePull& pull, const v1::ExchangeReply& reply,
                      absl::Time deadline) {
  if (path.pair != nullptr) {
    const auto arrival = BeginPull(path, sinks, pull, reply, deadline);
    if (!arrival.ok()) {
      path.pair->Abandon(arrival.status());  // the daemon sends what nobody receives
      return arrival.status();
    }
    return path.pair->Settle(*arrival);
  }
  if (path.link == nullptr) return absl::OkStatus();  // they were written where they belong
  GpuLink& link = *path.link;
  if (!link.Filled(link.incoming(), pull.sequence())) {
    return absl::InternalError(absl::StrFormat(
        "pull: the arena's window does not stand at fill %d", pull.sequence()));
  }
  Places places(path);
  for (const SinkPart& part : sinks) {
    const SliceSink& sink = *part.sink;
    const auto size = static_cast<std::int64_t>(DtypeBytes(sink.dtype));
    const std::byte* from =
        link.At(link.incoming(), link.layout().Find(sink.parameter, sink.slice)->parameter);
    if (from == sink.data) continue;
    for (const ElementRange& range : part.ranges) {
      const auto bytes = static_cast<std::size_t>(range.count * size);
      places.Copy(sink.place, static_cast<std::byte*>(sink.data) + range.first * size, from, bytes);
      from += bytes;
    }
    places.Add(sink.place);
  }
  // The next pull may overwrite the window.
  return places.WaitForAll();
}

}  // namespace muond::client
