// NCCL and GPUs for tests, in one process: the same function table over host memory.
//
// It keeps the rules that the real one has and that are easily broken: calls about a device from
// one thread, none while another is in progress, groups closed, sizes of both ends alike, two ranks
// never on one GPU, an abort on another thread, since it may block. What is done against them is
// counted (violations). Tests spoil it in the ways in which peers and links fail.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nccl/api.h"
#include "nccl/device.h"
#include "nccl/library.h"

namespace muond::nccl::fake {

// The table, as of version 2.28.9.
const Library& TheLibrary();

// A device over host memory. Two with one uuid are one GPU.
std::shared_ptr<Device> MakeDevice(const std::string& uuid);

// What goes wrong, from now on until Reset.
struct Faults {
  std::string silent;         // this GPU's ends take part in nothing any more: a killed process
  bool move_nothing = false;  // exchanges end well, and no byte has gone anywhere
  bool flip_bit = false;      // the first byte of the next transfer arrives changed; then false
  bool remote_error = false;  // communicators report ncclRemoteError
  bool stuck_abort = false;   // ncclCommAbort does not return until this is false again
  int polls = 2;              // ncclInProgress, that often, after each call that may say so
};
void SetFaults(const Faults& faults);
// No faults, nothing counted; what is still open stays as it is.
void Reset();

struct Counts {
  std::int64_t aborts = 0;
  std::int64_t sends = 0;  // and as many receives
  std::int64_t bytes = 0;
  std::int64_t open_communicators = 0;
  std::int64_t open_streams = 0;
  std::int64_t open_events = 0;
  std::int64_t device_bytes = 0;  // allocated and not freed
};
Counts Count();
// In words, each once.
std::vector<std::string> Violations();

}  // namespace muond::nccl::fake
