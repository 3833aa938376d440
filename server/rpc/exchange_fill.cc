#include "server/rpc/exchange_fill.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/crc32c.h"
#include "proto/mutex.h"

namespace muond {
namespace {

absl::StatusOr<Dtype> DtypeOf(const Run& run, const v1::Chunk& chunk) {
  if (chunk.dtype() == v1::DTYPE_UNSPECIFIED) {
    const ParameterSpec* spec = run.FindParameter(chunk.parameter());
    return spec == nullptr ? Dtype::kF32 : spec->dtype;
  }
  return FromProto(chunk.dtype());
}

// One slice that is being taken.
struct Taken {
  OpenSlice slice;
  ChunkHeader header;
  const std::byte* from = nullptr;
  std::int64_t bytes = 0;
  std::optional<std::uint64_t> sum;  // that it must have
};

absl::Status CheckSum(const Taken& taken, std::uint64_t got) {
  if (!taken.sum || *taken.sum == got) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat(
      "slice at element %d: what arrived has sum %016x, announced %016x", taken.header.offset, got,
      *taken.sum));
}

// Through private host memory: what is only compared, where the first time may have come by another
// path and was digested otherwise, and what no kernel could bring to where it belongs.
absl::Status TakeByHost(const Taken& taken, kernels::DeviceMemory& memory) {
  std::string payload(static_cast<std::size_t>(taken.bytes), '\0');
  if (auto error = memory.Read(payload.data(), taken.from, payload.size())) {
    return absl::InternalError(error.message());
  }
  const auto size = static_cast<std::uint32_t>(DtypeBytes(taken.header.dtype));
  MUOND_RETURN_IF_ERROR(CheckSum(
      taken, taken.sum ? kernels::SumOf(payload.data(), payload.size() / size, size, 0) : 0));
  ChunkHeader header = taken.header;
  header.crc32c = Crc32c(payload.data(), payload.size());
  return taken.slice.receiver->Receive(header, absl::string_view(payload));
}

class Taker {
 public:
  explicit Taker(ExchangeWindows& windows) : windows_(windows) {}

  absl::Status TakeAll(std::vector<Taken>& all) {
    // Opening takes the run's lock, moving the receivers': never one inside the other.
    std::map<kernels::DeviceMemory*, std::vector<Taken*>> by_memory;
    for (Taken& taken : all) {
      kernels::DeviceMemory& memory = windows_.MemoryOf(taken.from);
      const StagingBuffer* const target = taken.slice.memory.get();
      const bool host = memory.uuid().empty();
      if (target == nullptr || (host && target->place() == StagingPlace::kBackend)) {
        MUOND_RETURN_IF_ERROR(TakeByHost(taken, memory));
      } else {
        by_memory[&memory].push_back(&taken);
      }
    }
    for (auto& [memory, some] : by_memory) {
      for (std::size_t i = 0; i < some.size(); i += kAtOnce) {
        const std::size_t end = std::min(some.size(), i + kAtOnce);
        MUOND_RETURN_IF_ERROR(Move(*memory, {some.begin() + i, some.begin() + end}));
      }
    }
    return absl::OkStatus();
  }

 private:
  // Slices of one move, each of which is locked: ThreadSanitizer follows 64 locks of a thread.
  static constexpr std::size_t kAtOnce = 48;

  static absl::Status Move(kernels::DeviceMemory& memory, const std::vector<Taken*>& some) {
    std::vector<kernels::MoveJob> moves;
    std::vector<MovableLock> locks;
    for (const Taken* taken : some) {
      MUOND_ASSIGN_OR_RETURN(auto lock, taken->slice.receiver->BeginMoves(
                                            taken->header, taken->from, taken->bytes,
                                            static_cast<std::uint32_t>(locks.size()), moves));
      locks.push_back(std::move(lock));
    }
    std::vector<std::uint64_t> sums(some.size(), 0);
    if (auto error = memory.MoveAll(moves, sums)) return absl::InternalError(error.message());
    for (std::size_t i = 0; i < some.size(); ++i) {
      MUOND_RETURN_IF_ERROR(CheckSum(*some[i], sums[i]));
    }
    for (std::size_t i = 0; i < some.size(); ++i) some[i]->slice.receiver->EndMoves(sums[i]);
    return absl::OkStatus();
  }

  ExchangeWindows& windows_;
};

}  // namespace

absl::StatusOr<std::vector<OpenSlice>> TakeFill(
    Run& run, std::int64_t rank, const v1::ArenaFill& fill, ExchangeWindows& windows,
    const std::function<absl::StatusOr<OpenSlice>(const SliceAddress&, Dtype, StagingPlace)>&
        open) {
  MUOND_RETURN_IF_ERROR(windows.Fetch(fill));
  std::vector<Taken> all;
  const auto open_all = [&]() -> absl::Status {
    for (const v1::Chunk& chunk : fill.chunks()) {
      MUOND_ASSIGN_OR_RETURN(const Dtype dtype, DtypeOf(run, chunk));
      MUOND_ASSIGN_OR_RETURN(std::byte* const from,
                             windows.Region(fill.window(), chunk.region(), /*to_daemon=*/true));
      const bool host = windows.MemoryOf(from).uuid().empty();
      MUOND_ASSIGN_OR_RETURN(
          OpenSlice slice,
          open({rank, chunk.parameter(), chunk.slice(), chunk.micro_batch()}, dtype,
               host ? StagingPlace::kHost : StagingPlace::kBackend));
      all.push_back({std::move(slice), {chunk.offset(), dtype, 0}, from, chunk.region().bytes(),
                     windows.announced() ? std::optional(chunk.sum()) : std::nullopt});
    }
    return absl::OkStatus();
  };
  absl::Status status = open_all();
  if (status.ok()) status = Taker(windows).TakeAll(all);
  std::vector<OpenSlice> slices;
  for (Taken& taken : all) {
    if (!status.ok()) run.Abandon(taken.slice);
    slices.push_back(std::move(taken.slice));
  }
  MUOND_RETURN_IF_ERROR(status);
  windows.Release(fill);
  return slices;
}

std::int64_t BytesOf(const v1::ArenaFill& fill) {
  std::int64_t bytes = 0;
  for (const v1::Chunk& chunk : fill.chunks()) bytes += chunk.region().bytes();
  return bytes;
}

}  // namespace muond
