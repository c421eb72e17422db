# Configures, builds and runs an example that is a CMake project of its own.
include(${CMAKE_CURRENT_LIST_DIR}/expect.cmake)
# Without CUDA where the library is built again: it takes minutes to compile and changes nothing here.
execute_process(
  COMMAND ${CMAKE_COMMAND} -G Ninja -S ${SOURCE} -B ${WORK} -DCMAKE_BUILD_TYPE=${BUILD_TYPE} -DCMAKE_PREFIX_PATH=${PREFIX}
          -DCMAKE_CXX_COMPILER=${CXX} "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}" -DLONGSPAN_CUDA=OFF ${OPTIONS}
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK} COMMAND_ERROR_IS_FATAL ANY)
expect("${EXPECT}" ${WORK}/${PROGRAM})
