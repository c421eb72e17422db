# What the sources include, found on the machine or, if LONGSPAN_FETCH_DEPENDENCIES is on, downloaded at a fixed commit.
# Of fmt and Highway only headers are used, and only privately: neither an installed longspan nor a wheel asks for them.
include(FetchContent)

# longspan_dependency(package target apt-package repository commit [alias-of])
# Makes sure that `target` exists. `alias-of` is what the package calls it inside its own build, where that differs.
macro(longspan_dependency package target apt repository commit)
  find_package(${package} QUIET)
  if(NOT TARGET ${target})
    if(NOT LONGSPAN_FETCH_DEPENDENCIES)
      message(FATAL_ERROR "${package} was not found: install ${apt} (apt-get install ${apt}), "
                          "or configure with -DLONGSPAN_FETCH_DEPENDENCIES=ON to download it")
    endif()
    message(STATUS "${package}: downloading ${repository} at ${commit}")
    FetchContent_Declare(longspan_${package} GIT_REPOSITORY https://github.com/${repository}.git GIT_TAG ${commit})
    FetchContent_MakeAvailable(longspan_${package})
    set(longspan_fetched_${package} ON)
    if(NOT TARGET ${target})
      add_library(${target} ALIAS ${ARGN})
    endif()
  endif()
endmacro()

find_package(Threads REQUIRED)

# Switches of the packages that may be downloaded: none of their tests and none of their install rules.
set(INSTALL_GTEST OFF)
set(HWY_ENABLE_TESTS OFF)
set(HWY_ENABLE_EXAMPLES OFF)
set(HWY_ENABLE_CONTRIB OFF)
set(HWY_ENABLE_INSTALL OFF)
set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
set(CMAKE_POLICY_DEFAULT_CMP0126 NEW)

longspan_dependency(fmt fmt::fmt-header-only libfmt-dev fmtlib/fmt e69e5f977d458f2650bb346dadf2ad30c5320281)
longspan_dependency(hwy hwy::hwy libhwy-dev google/highway 457c891775a7397bdb0376bb1031e6e027af1c48 hwy)
# Not hwy::hwy itself, which would link Highway's library. Its debug assertions would call that library, too.
add_library(longspan_highway INTERFACE)
target_include_directories(longspan_highway SYSTEM
                           INTERFACE $<TARGET_PROPERTY:hwy::hwy,INTERFACE_INCLUDE_DIRECTORIES>)
target_compile_definitions(longspan_highway INTERFACE HWY_IS_DEBUG_BUILD=0)
if(LONGSPAN_BUILD_CLI)
  longspan_dependency(CLI11 CLI11::CLI11 libcli11-dev CLIUtils/CLI11 6c7b07a878ad834957b98d0f9ce1dbe0cb204fc9)
  longspan_dependency(nlohmann_json nlohmann_json::nlohmann_json nlohmann-json3-dev nlohmann/json
                      9cca280a4d0ccf0c08f47a99aa71d1b0e52f8d03)
endif()
if(LONGSPAN_BUILD_TESTS)
  longspan_dependency(GTest GTest::gtest libgtest-dev google/googletest f8d7d77c06936315286eb55f8de22cd23c188571 gtest)
endif()
if(LONGSPAN_BUILD_BENCH)
  find_package(benchmark QUIET)
endif()
