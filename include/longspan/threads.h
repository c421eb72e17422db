// The library's one thread pool, as callers see it.
#pragma once

#include "longspan/export.h"

namespace longspan {

/// Threads that one call may use, the calling thread included. The default is the smallest of OMP_NUM_THREADS, the
/// process's CPU affinity and its cgroup limit.
LONGSPAN_API int num_threads();

/// Changes that number for the whole process; 0 restores the default. Takes effect for calls that begin afterwards.
LONGSPAN_API void set_num_threads(int threads);

}  // namespace longspan
