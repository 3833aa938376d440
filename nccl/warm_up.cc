#include "nccl/warm_up.h"

#include <algorithm>
#include <utility>

namespace muond::nccl {
namespace {

std::string Pattern(const std::string& secret, int rank, std::size_t bytes) {
  std::string pattern(bytes, '\0');
  unsigned state = 2166136261u + static_cast<unsigned>(rank);
  for (std::size_t i = 0; i < bytes; ++i) {
    state = (state ^ static_cast<unsigned char>(secret[i % secret.size()])) * 16777619u;
    pattern[i] = static_cast<char>(state >> 24);
  }
  return pattern;
}

}  // namespace

void WarmUp(const std::shared_ptr<Device>& device, Link& link, const std::string& secret, int rank,
            Piece out, Piece in, std::shared_ptr<const void> keep, absl::Time deadline,
            const Done& done) {
  out.bytes = std::min(out.bytes, kWarmUpBytes);
  in.bytes = std::min(in.bytes, kWarmUpBytes);
  // What does not arrive must not look as if it had.
  const std::string poison(in.bytes, '\xff');
  absl::Status status = device->FromHost(in.data, poison.data(), in.bytes);
  const std::string sent = Pattern(secret, rank, out.bytes);
  if (status.ok()) status = device->FromHost(out.data, sent.data(), out.bytes);
  if (!status.ok()) return done(status);
  Exchange exchange;
  exchange.sends = {out};
  exchange.receives = {in};
  exchange.keep = std::move(keep);
  exchange.deadline = deadline;
  exchange.done = [device, secret, rank, in, done](absl::Status ended) {
    std::string got(in.bytes, '\0');
    if (ended.ok()) ended = device->ToHost(got.data(), in.data, in.bytes);
    if (ended.ok() && got != Pattern(secret, 1 - rank, in.bytes)) {
      ended = absl::DataLossError("NCCL: warm-up: what arrived is not what was sent");
    }
    done(ended);
  };
  status = link.Post(std::move(exchange));
  if (!status.ok()) done(status);
}

}  // namespace muond::nccl
