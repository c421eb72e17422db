# Run at build time: writes version.cpp with the commit of the source tree. configure_file leaves an unchanged file
# alone, so nothing recompiles until the commit changes.
set(LONGSPAN_COMMIT unknown)
find_program(GIT git)
if(SOURCE_COMMIT) # of a source distribution, which is no checkout
  set(LONGSPAN_COMMIT ${SOURCE_COMMIT})
elseif(GIT)
  execute_process(
    COMMAND ${GIT} -C ${SOURCE_DIR} rev-parse --show-toplevel
    OUTPUT_VARIABLE top
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  file(REAL_PATH "${SOURCE_DIR}" source)
  # A copy of the sources inside somebody else's repository must not report that repository's commit.
  if(top STREQUAL source)
    execute_process(
      COMMAND ${GIT} -C ${SOURCE_DIR} rev-parse --short=12 HEAD
      OUTPUT_VARIABLE head
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
      RESULT_VARIABLE failed)
    if(NOT failed)
      set(LONGSPAN_COMMIT ${head})
    endif()
  endif()
endif()
configure_file(${SOURCE_DIR}/src/util/version.cpp.in ${OUTPUT} @ONLY)
