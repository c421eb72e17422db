# Language, warnings, sanitizers and ccache. longspan_build_flags carries what our own targets compile with; none of it
# reaches those who link longspan.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
endif()

if(PROJECT_IS_TOP_LEVEL AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(LONGSPAN_CCACHE ccache)
  mark_as_advanced(LONGSPAN_CCACHE)
  if(LONGSPAN_CCACHE)
    # Builds in other folders, such as pip's, find the objects of this one: paths count from the sources.
    set(longspan_ccache ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${LONGSPAN_CCACHE})
    set(CMAKE_CXX_COMPILER_LAUNCHER ${longspan_ccache})
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${longspan_ccache})
  endif()
endif()

add_library(longspan_build_flags INTERFACE)
# -ffp-contract=off: a row's bits must not depend on where the compiler happens to fuse; kernels ask for fma by name.
# -Wshadow=local: GCC's plain -Wshadow objects to a constructor that names its parameters like its members.
# Off: what GCC's flow analysis believes about inlined library code (fmt, std::sort) changes with every release.
target_compile_options(
  longspan_build_flags
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -ffp-contract=off>
            $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wshadow=local -Wno-psabi -Wno-array-bounds -Wno-stringop-overflow
            -Wno-stringop-overread -Wno-maybe-uninitialized> $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wshadow>)
if(LONGSPAN_WARNINGS_AS_ERRORS)
  target_compile_options(longspan_build_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()

if(LONGSPAN_SANITIZE)
  target_compile_options(longspan_build_flags INTERFACE -fsanitize=${LONGSPAN_SANITIZE} -fno-omit-frame-pointer
                                                        -fno-sanitize-recover=all)
  target_link_options(longspan_build_flags INTERFACE -fsanitize=${LONGSPAN_SANITIZE})
endif()
