# Compiles one file with what pkg-config says and runs it. The prefix is moved first: the .pc file must follow.
include(${CMAKE_CURRENT_LIST_DIR}/expect.cmake)
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
file(COPY ${PREFIX}/ DESTINATION ${WORK}/moved)
set(ENV{PKG_CONFIG_PATH} ${WORK}/moved/${LIBDIR}/pkgconfig)
expect("^${VERSION}" ${PKG_CONFIG} --modversion longspan)
execute_process(
  COMMAND ${PKG_CONFIG} --cflags --libs longspan
  OUTPUT_VARIABLE flags
  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
# As the README has it, with every warning that users may have on.
execute_process(COMMAND ${CXX} -std=c++20 -Wall -Wextra -Werror ${SOURCE}/main.cpp ${flags} -o ${WORK}/minimal
                COMMAND_ERROR_IS_FATAL ANY)
expect("${EXPECT}" ${WORK}/minimal)
