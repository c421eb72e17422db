# A project that gives no build type and has Longspan as a part of it: Longspan is optimised, the project stays as it is.
file(REMOVE_RECURSE ${WORK})
execute_process(
  COMMAND ${CMAKE_COMMAND} -G Ninja -S ${SOURCE} -B ${WORK} -DFETCHCONTENT_SOURCE_DIR_LONGSPAN=${LONGSPAN}
          -DCMAKE_CXX_COMPILER=${CXX} -DLONGSPAN_CUDA=OFF -DLONGSPAN_MPI=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
  OUTPUT_VARIABLE said COMMAND_ERROR_IS_FATAL ANY)
if(NOT said MATCHES "no CMAKE_BUILD_TYPE is given, so longspan is built as Release")
  message(FATAL_ERROR "the choice of a build type is not said:\n${said}")
endif()
file(READ ${WORK}/compile_commands.json commands)
string(JSON count LENGTH "${commands}")
math(EXPR last "${count} - 1")
foreach(index RANGE ${last})
  string(JSON file GET "${commands}" ${index} file)
  string(JSON command GET "${commands}" ${index} command)
  if(file STREQUAL "${SOURCE}/main.cpp")
    if(command MATCHES " -O[0-9]")
      message(FATAL_ERROR "the project's own file has flags that it did not ask for: ${command}")
    endif()
  elseif(NOT command MATCHES " -O[23] ")
    message(FATAL_ERROR "not optimised: ${command}")
  endif()
endforeach()
