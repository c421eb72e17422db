# Optional engines: looks for CUDA and MPI as LONGSPAN_CUDA and LONGSPAN_MPI say, and sets LONGSPAN_WITH_CUDA and
# LONGSPAN_WITH_MPI, by which src/ chooses source files and
# scripts/test.sh says what was left out.
set(LONGSPAN_WITH_CUDA OFF CACHE INTERNAL "")
set(LONGSPAN_WITH_HOPPER OFF)
if(NOT LONGSPAN_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit 12.4 QUIET)
  if(CUDAToolkit_FOUND AND NOT CMAKE_CUDA_COMPILER)
    find_program(CMAKE_CUDA_COMPILER nvcc HINTS ${CUDAToolkit_BIN_DIR})
  endif()
  if(CUDAToolkit_FOUND AND CMAKE_CUDA_COMPILER)
    set(LONGSPAN_WITH_CUDA ON CACHE INTERNAL "")
    # Machine code for Ampere and Hopper; PTX of the latter, which drivers compile for everything newer.
    set(LONGSPAN_CUDA_ARCHITECTURES "80-real;90" CACHE STRING "GPU architectures, as CMAKE_CUDA_ARCHITECTURES")
    set(CMAKE_CUDA_ARCHITECTURES ${LONGSPAN_CUDA_ARCHITECTURES})
    if(LONGSPAN_CUDA_ARCHITECTURES MATCHES "(^|;)90")
      set(LONGSPAN_WITH_HOPPER ON)
    endif()
    # The run time is linked statically and loads the driver itself: one binary for machines with and without a GPU.
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    enable_language(CUDA)
    # CMake 3.25 does not know that nvcc has C++20, which it has since 12.0.
    foreach(form STANDARD EXTENSION)
      if(NOT CMAKE_CUDA20_${form}_COMPILE_OPTION)
        set(CMAKE_CUDA20_${form}_COMPILE_OPTION "-std=c++20")
      endif()
    endforeach()
    # Kernels are the same in every optimised build, so that ccache compiles them once.
    set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "${CMAKE_CUDA_FLAGS_RELEASE}")
    set(longspan_cuda_runtime CUDA::cudart_static)
    # 554: nvcc objects to a conversion that only applies to the other instantiation of a template.
    target_compile_options(longspan_build_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -diag-suppress=554>)
  elseif(LONGSPAN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LONGSPAN_CUDA=ON, but no CUDA toolkit 12.4 or newer was found: put nvcc on PATH, "
                        "set CUDAToolkit_ROOT, or configure with -DLONGSPAN_CUDA=OFF")
  endif()
endif()

set(LONGSPAN_WITH_MPI OFF CACHE INTERNAL "")
if(NOT LONGSPAN_MPI STREQUAL "OFF")
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(LONGSPAN_WITH_MPI ON CACHE INTERNAL "")
  elseif(LONGSPAN_MPI STREQUAL "ON")
    message(FATAL_ERROR "LONGSPAN_MPI=ON, but no MPI was found: install libopenmpi-dev, set MPI_HOME, "
                        "or configure with -DLONGSPAN_MPI=OFF")
  endif()
endif()
