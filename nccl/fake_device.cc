// Host memory as a GPU, with streams that do their work when somebody looks.
#include <cstring>
#include <new>
#include <utility>

#include "nccl/fake_state.h"

namespace muond::nccl::fake {
namespace {

class FakeDevice final : public Device {
 public:
  explicit FakeDevice(std::string uuid) : uuid_(std::move(uuid)) {}

  std::string uuid() const override { return uuid_; }
  absl::Status MakeCurrent() override {
    CurrentDevice() = uuid_;
    return absl::OkStatus();
  }
  absl::StatusOr<void*> Allocate(std::size_t bytes) override {
    State& state = The();
    MutexLock lock(state.mutex);
    void* const memory = ::operator new(bytes);
    std::memset(memory, 0xff, bytes);  // NaN in every type: what is not written must show
    state.memory[memory] = bytes;
    state.counts.device_bytes += static_cast<std::int64_t>(bytes);
    return memory;
  }
  void Free(void* memory) override {
    State& state = The();
    MutexLock lock(state.mutex);
    const auto found = state.memory.find(memory);
    if (found == state.memory.end()) return Violated(state, "memory that was not allocated");
    state.counts.device_bytes -= static_cast<std::int64_t>(found->second);
    state.memory.erase(found);
    ::operator delete(memory);
  }
  absl::StatusOr<Stream> NewStream() override {
    State& state = The();
    MutexLock lock(state.mutex);
    ++state.counts.open_streams;
    auto* const stream = new FakeStream{.uuid = uuid_};
    state.streams.insert(stream);
    return stream;
  }
  void FreeStream(Stream stream) override {
    State& state = The();
    MutexLock lock(state.mutex);
    --state.counts.open_streams;
    state.streams.erase(static_cast<FakeStream*>(stream));
    delete static_cast<FakeStream*>(stream);
  }
  // Streams are looked at one by one, each to its end: an order between two is not modelled, what
  // tests give to `after` is there already.
  absl::Status Order(Stream, Stream) override { return absl::OkStatus(); }
  absl::Status Copy(void* to, const void* from, std::size_t bytes, Stream stream) override {
    State& state = The();
    MutexLock lock(state.mutex);
    auto* const on = static_cast<FakeStream*>(stream);
    on->queue.push_back({.to = to, .from = from, .bytes = bytes});
    ++on->given;
    return absl::OkStatus();
  }
  absl::Status ToHost(void* host, const void* from, std::size_t bytes) override {
    std::memcpy(host, from, bytes);
    return absl::OkStatus();
  }
  absl::Status FromHost(void* to, const void* host, std::size_t bytes) override {
    std::memcpy(to, host, bytes);
    return absl::OkStatus();
  }
  // Of what the stream has brought by then.
  absl::Status Sum(std::span<const SumJob> jobs, std::span<std::uint64_t> sums,
                   Stream stream) override {
    State& state = The();
    MutexLock lock(state.mutex);
    Pump(state);
    const auto* const on = static_cast<FakeStream*>(stream);
    if (on != nullptr && on->done < on->given) Violated(state, "a sum before its stream is there");
    for (std::size_t i = 0; i < jobs.size(); ++i) sums[i] = SumOnHost(jobs[i]);
    return absl::OkStatus();
  }
  absl::StatusOr<Event> Record(Stream stream) override {
    State& state = The();
    MutexLock lock(state.mutex);
    ++state.counts.open_events;
    auto* const on = static_cast<FakeStream*>(stream);
    return new FakeEvent{on, on->given};
  }
  absl::StatusOr<bool> Done(Event event) override {
    State& state = The();
    MutexLock lock(state.mutex);
    Pump(state);
    const auto* const at = static_cast<FakeEvent*>(event);
    return at->stream->done >= at->after;
  }
  void FreeEvent(Event event) override {
    State& state = The();
    MutexLock lock(state.mutex);
    --state.counts.open_events;
    delete static_cast<FakeEvent*>(event);
  }

 private:
  const std::string uuid_;
};

}  // namespace

std::shared_ptr<Device> MakeDevice(const std::string& uuid) {
  return std::make_shared<FakeDevice>(uuid);
}

}  // namespace muond::nccl::fake
