// The few functions of NCCL that a ring needs, declared here and found at run time: nothing of NCCL is needed to build.
#pragma once

#include <cstddef>
#include <memory>

#include "longspan/communicator.h"

namespace longspan::nccl {

using Handle = struct HandleTag*;  // ncclComm_t
using Stream = void*;              // cudaStream_t

/// ncclResult_t
inline constexpr int kSuccess = 0, kSystemError = 2, kRemoteError = 6, kInProgress = 7;
inline constexpr int kBytes = 1;  // ncclUint8

/// ncclConfig_t as of 2.14, which later versions read by its size and version.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};
struct UniqueId {
  char internal[128];
};

/// A table, so that tests can put something that fails in a function's place.
struct Api {
  int (*get_version)(int*) = nullptr;
  int (*get_unique_id)(UniqueId*) = nullptr;
  int (*init_rank)(Handle*, int size, UniqueId, int rank, Config*) = nullptr;
  int (*async_error)(Handle, int*) = nullptr;
  int (*finalize)(Handle) = nullptr;
  int (*destroy)(Handle) = nullptr;
  int (*abort)(Handle) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send)(const void*, std::size_t, int type, int peer, Handle, Stream) = nullptr;
  int (*receive)(void*, std::size_t, int type, int peer, Handle, Stream) = nullptr;
  const char* (*error_string)(int) = nullptr;
};

/// NCCL as the system finds it. Throws Unsupported, saying why, where it does not or finds one too old.
const Api& api();

std::shared_ptr<Communicator> make_ring(const Api& api, const NcclId& id, int rank, int size, int device,
                                        std::chrono::milliseconds deadline);

}  // namespace longspan::nccl
