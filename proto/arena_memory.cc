#include "proto/arena_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/steady_time.h"

namespace muond {
namespace {

static_assert(std::endian::native == std::endian::little, "a futex is a slot's lower half");

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// Beyond these a reason is cut.
constexpr std::size_t kReasonBytesMax = 512;

std::string Errno() { return std::strerror(errno); }

absl::StatusOr<std::byte*> MapShared(int fd, std::int64_t bytes) {
  void* data = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_POPULATE, fd, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("arena: map %d bytes: %s", bytes, Errno()));
  }
  return static_cast<std::byte*>(data);
}

long Futex(void* word, int operation, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

absl::Status WaitReadable(int fd, absl::Duration timeout) {
  pollfd poll_fd{.fd = fd, .events = POLLIN, .revents = 0};
  const absl::Time deadline = SteadyNow() + timeout;
  for (;;) {
    const std::int64_t left = absl::ToInt64Milliseconds(deadline - SteadyNow());
    const auto wait = static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
    const int ready = poll(&poll_fd, 1, wait);
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return absl::UnavailableError(Errno());
    if (ready == 0 && left <= 0) return absl::DeadlineExceededError("no answer in time");
  }
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) close(fd_);
    fd_ = other.Release();
  }
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

int Descriptor::Release() { return std::exchange(fd_, -1); }

// ---- Memory -----------------------------------------------------------------------------------

absl::StatusOr<ArenaMemory> ArenaMemory::Create(std::int64_t bytes) {
  Descriptor fd(memfd_create("muond-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const auto fail = [bytes](const char* what) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("arena: %s of %d bytes: %s", what, bytes, Errno()));
  };
  if (!fd.valid()) return fail("memfd");
  if (ftruncate(fd.get(), bytes) != 0) return fail("size");
  // Pages that can't be had must fail here: a page fault has no error but SIGBUS.
  if (fallocate(fd.get(), 0, 0, bytes) != 0) return fail("memory");
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return fail("seals");
  MUOND_ASSIGN_OR_RETURN(std::byte * data, MapShared(fd.get(), bytes));
  return ArenaMemory(std::move(fd), data, bytes);
}

absl::StatusOr<ArenaMemory> ArenaMemory::Map(Descriptor descriptor, std::int64_t bytes) {
  struct stat info;
  if (fstat(descriptor.get(), &info) != 0 || info.st_size != bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("arena: expected memory of %d bytes, got another", bytes));
  }
  const int seals = fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError("arena: expected memory that can't be shrunk");
  }
  MUOND_ASSIGN_OR_RETURN(std::byte * data, MapShared(descriptor.get(), bytes));
  return ArenaMemory(std::move(descriptor), data, bytes);
}

ArenaMemory::ArenaMemory(ArenaMemory&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_) {}

ArenaMemory::~ArenaMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(bytes_));
}

std::uint64_t ArenaMemory::Get(std::int64_t slot) const {
  auto* word = reinterpret_cast<std::uint64_t*>(data_ + slot);
  return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_acquire);
}

void ArenaMemory::Set(std::int64_t slot, std::uint64_t value) const {
  auto* word = reinterpret_cast<std::uint64_t*>(data_ + slot);
  std::atomic_ref<std::uint64_t>(*word).store(value, std::memory_order_release);
  Wake(slot);
}

void ArenaMemory::WaitWhile(std::int64_t slot, std::uint64_t seen, absl::Duration timeout) const {
  if (Get(slot) != seen) return;
  const timespec wait = absl::ToTimespec(std::max(timeout, absl::ZeroDuration()));
  Futex(data_ + slot, FUTEX_WAIT, static_cast<std::uint32_t>(seen), &wait);
}

void ArenaMemory::Wake(std::int64_t slot) const {
  Futex(data_ + slot, FUTEX_WAKE, INT_MAX, nullptr);
}

// ---- Handing over -----------------------------------------------------------------------------

absl::StatusOr<ReceivedArena> ReceiveArena(const std::string& socket, const std::string& handle,
                                           absl::Duration timeout) {
  const auto fail = [&socket](absl::StatusCode code, const std::string& why) {
    return absl::Status(code, absl::StrFormat("arena: socket \"%s\": %s", socket, why));
  };
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket.empty() || socket.size() >= sizeof(address.sun_path)) {
    return fail(absl::StatusCode::kInvalidArgument, "not the path of a unix socket");
  }
  std::memcpy(address.sun_path, socket.c_str(), socket.size() + 1);
  ReceivedArena arena{.connection =
                          Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)),
                      .memory = Descriptor()};
  const int fd = arena.connection.get();
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return fail(absl::StatusCode::kUnavailable, "cannot connect: " + Errno());
  }
  const std::string greeting = std::string(kArenaGreeting, 8) + handle;
  // A daemon that refuses at once has closed already: what it said can be read all the same.
  (void)!send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL);
  if (absl::Status ready = WaitReadable(fd, timeout); !ready.ok()) {
    return fail(ready.code(), std::string(ready.message()));
  }
  char text[kReasonBytesMax];
  iovec part{.iov_base = text, .iov_len = sizeof(text)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  // Told once, before what was sent earlier.
  if (got < 0 && errno == ECONNRESET) got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  if (got <= 0) return fail(absl::StatusCode::kUnavailable, "the daemon hung up");
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int memory = -1;
    std::memcpy(&memory, CMSG_DATA(header), sizeof(memory));
    arena.memory = Descriptor(memory);
    return arena;
  }
  return fail(absl::StatusCode::kPermissionDenied,
              "refused: " + std::string(text, static_cast<std::size_t>(got)));
}

bool ArenaHungUp(int connection) {
  pollfd poll_fd{.fd = connection, .events = POLLIN | POLLRDHUP, .revents = 0};
  return poll(&poll_fd, 1, 0) > 0;  // the daemon sends nothing more: whatever it is, it is the end
}

absl::Status SendArena(int connection, int memory, const std::string& refusal) {
  std::string text = memory >= 0 ? "ok" : refusal.substr(0, kReasonBytesMax);
  iovec part{.iov_base = text.data(), .iov_len = text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (memory >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &memory, sizeof(memory));
  }
  if (sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    return absl::UnavailableError("arena: hand over: " + Errno());
  }
  return absl::OkStatus();
}

std::string PidNamespace() {
  char name[64];
  const ssize_t length = readlink("/proc/self/ns/pid", name, sizeof(name));
  return length > 0 ? std::string(name, static_cast<std::size_t>(length)) : "";
}

std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

}  // namespace muond
