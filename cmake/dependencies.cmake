# What the sources include. The library itself needs fmt (header-only, private) and threads, so an installed longspan
# asks nothing of those who use it.
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
if(LONGSPAN_BUILD_CLI)
  find_package(CLI11 REQUIRED)
  find_package(nlohmann_json REQUIRED)
endif()
if(LONGSPAN_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()
if(LONGSPAN_BUILD_BENCH)
  find_package(benchmark QUIET)
endif()
