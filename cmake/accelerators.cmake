# Optional engines: looks for CUDA and MPI as LONGSPAN_CUDA and LONGSPAN_MPI say, and sets LONGSPAN_WITH_CUDA and
# LONGSPAN_WITH_MPI, by which src/ chooses source files and
# scripts/test.sh says what was left out.
set(LONGSPAN_WITH_CUDA OFF CACHE INTERNAL "")
if(NOT LONGSPAN_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit 12.4 QUIET)
  if(CUDAToolkit_FOUND)
    set(LONGSPAN_WITH_CUDA ON CACHE INTERNAL "")
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
