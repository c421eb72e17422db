# cmake --install: library, headers, CMake package, pkg-config file, the command and its completion.
if(NOT LONGSPAN_INSTALL)
  return()
endif()
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)
install(
  TARGETS longspan_library
  EXPORT longspanTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/longspan ${PROJECT_BINARY_DIR}/include/longspan
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/longspan)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/longspanConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/longspanConfig.cmake INSTALL_DESTINATION ${package_folder}
                              NO_SET_AND_CHECK_MACRO)
# Before 1.0 a new minor version may break callers.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/longspanConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(EXPORT longspanTargets NAMESPACE longspan:: DESTINATION ${package_folder})
install(FILES ${PROJECT_BINARY_DIR}/longspanConfig.cmake ${PROJECT_BINARY_DIR}/longspanConfigVersion.cmake
        DESTINATION ${package_folder})

# The prefix is found from the file's own place, so that an install tree may be moved.
file(RELATIVE_PATH pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")
if(BUILD_SHARED_LIBS)
  set(pc_rpath " -Wl,-rpath,\${libdir}") # programs run where they are, without LD_LIBRARY_PATH
else()
  set(pc_cflags " -DLONGSPAN_STATIC")
  set(pc_libraries " -pthread")
  if(LONGSPAN_WITH_MPI)
    list(JOIN MPI_CXX_LIBRARIES " " pc_mpi)
    string(APPEND pc_libraries " ${pc_mpi}")
  endif()
  if(LONGSPAN_WITH_CUDA)
    string(APPEND pc_libraries " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
  endif()
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/longspan.pc.in ${PROJECT_BINARY_DIR}/longspan.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/longspan.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(TARGET longspan_cli)
  install(TARGETS longspan_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(FILES ${PROJECT_SOURCE_DIR}/cli/completion/longspan.bash
          DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME longspan)
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
