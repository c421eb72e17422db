# Everything a builder may choose. As a subproject of somebody else's build only the library is built, static unless that
# build says otherwise; by pip only the module and the command.
set(longspan_whole ${PROJECT_IS_TOP_LEVEL})
if(SKBUILD) # pip wants the module and the command, nothing else
  set(longspan_whole OFF)
endif()
if(PROJECT_IS_TOP_LEVEL)
  option(BUILD_SHARED_LIBS "Build longspan as a shared library" ON)
endif()
option(LONGSPAN_BUILD_TESTS "Build the tests" ${longspan_whole})
option(LONGSPAN_BUILD_CLI "Build the longspan command" ${PROJECT_IS_TOP_LEVEL})
option(LONGSPAN_BUILD_BENCH "Build the benchmarks (needs Google Benchmark; skipped aloud without it)" ${longspan_whole})
option(LONGSPAN_BUILD_PYTHON "Build the Python module (pip install . turns this on)" OFF)
set(LONGSPAN_LIBTORCH "" CACHE PATH "Folder of libtorch: builds longspan_torch, the operator for programs without Python")
option(LONGSPAN_INSTALL "Make install rules" ${longspan_whole})
option(LONGSPAN_WARNINGS_AS_ERRORS "Warnings stop the build" OFF)
option(LONGSPAN_FETCH_DEPENDENCIES "Download dependencies that find_package does not find" OFF)
set(LONGSPAN_SOURCE_COMMIT "" CACHE STRING "Commit to report; empty: that of the git checkout")
mark_as_advanced(LONGSPAN_SOURCE_COMMIT)
set(LONGSPAN_SANITIZE "" CACHE STRING "Sanitizers: empty, address,undefined or thread")
set_property(CACHE LONGSPAN_SANITIZE PROPERTY STRINGS "" "address,undefined" "thread")

# AUTO: picked up when found. ON: required. OFF: not even looked for.
foreach(part CUDA MPI)
  set(LONGSPAN_${part} AUTO CACHE STRING "Build with ${part}: AUTO, ON or OFF")
  set_property(CACHE LONGSPAN_${part} PROPERTY STRINGS AUTO ON OFF)
  if(NOT LONGSPAN_${part} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "LONGSPAN_${part} is '${LONGSPAN_${part}}': give AUTO, ON or OFF")
  endif()
endforeach()

# Kernels that are not optimised are 60 times slower, so that is what a build gets only if it asks for it.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  if(PROJECT_IS_TOP_LEVEL)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  else() # a variable of this folder: the rest of that build stays as it is
    set(CMAKE_BUILD_TYPE Release)
  endif()
  message(STATUS "longspan: no CMAKE_BUILD_TYPE is given, so longspan is built as Release")
endif()
