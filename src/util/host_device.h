// Marks functions that CUDA kernels and the host share.
#pragma once

#if defined(__CUDACC__)
#define LONGSPAN_DEVICE __host__ __device__ __forceinline__
#else
#define LONGSPAN_DEVICE inline
#endif
