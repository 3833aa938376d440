// What is used of NCCL's binary interface: the types that cross it and a table of functions.
//
// Declared here and found at run time (library.h), so that a build needs no NCCL and a daemon or a
// trainer starts where none is installed. Names and meanings are those of NCCL's own documentation;
// everything here has been part of the interface since 2.18. The fake in tests fills the same table
// (fake.h).
#pragma once

#include <climits>
#include <cstddef>

namespace muond::nccl {

enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

// Whoever has one can take the other rank's seat: a secret, never logged.
inline constexpr std::size_t kUniqueIdBytes = 128;
struct UniqueId {
  char bytes[kUniqueIdBytes];
};

struct Communicator;  // NCCL's own

// The part of ncclConfig_t that 2.18 knew: `size` and `version` tell a newer library that the rest
// is not there.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = INT_MIN;  // INT_MIN, null: the library's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

inline constexpr int kByte = 1;  // ncclUint8
using Stream = void*;            // cudaStream_t, which is CUstream

struct Api {
  Result (*get_version)(int* version);  // 22809 is 2.28.9
  Result (*get_unique_id)(UniqueId* id);
  Result (*comm_init_rank_config)(Communicator** comm, int ranks, UniqueId id, int rank,
                                  Config* config);
  Result (*comm_get_async_error)(Communicator* comm, Result* error);
  Result (*comm_abort)(Communicator* comm);
  const char* (*get_last_error)(Communicator* comm);
  Result (*group_start)();
  Result (*group_end)();
  Result (*send)(const void* data, std::size_t count, int type, int peer, Communicator* comm,
                 Stream stream);
  Result (*recv)(void* data, std::size_t count, int type, int peer, Communicator* comm,
                 Stream stream);
};

}  // namespace muond::nccl
