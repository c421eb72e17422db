# expect(regex command...): runs the command, which must exit with 0 and print a match.
function(expect regex)
  execute_process(
    COMMAND ${ARGN}
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
    RESULT_VARIABLE status)
  message("${output}")
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${ARGN}: exit status ${status}")
  endif()
  if(NOT output MATCHES "${regex}")
    message(FATAL_ERROR "${ARGN}: no match for '${regex}'")
  endif()
endfunction()
