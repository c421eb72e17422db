# longspan_portable: what the module and the command of a wheel are linked with, so that they run on systems older than
# the one that builds them. LONGSPAN_GLIBC_STUBS is a folder that scripts/glibc_stubs.py made; without it this is empty.
set(LONGSPAN_GLIBC_STUBS "" CACHE PATH "Link the Python module and the command against the glibc of these stubs")
add_library(longspan_portable INTERFACE)
if(LONGSPAN_GLIBC_STUBS)
  add_library(longspan_glibc_additions OBJECT cmake/glibc_additions.cpp)
  set_target_properties(longspan_glibc_additions PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(longspan_glibc_additions PRIVATE longspan_build_flags)
  target_sources(longspan_portable INTERFACE $<TARGET_OBJECTS:longspan_glibc_additions>)
  # Before 2.34 threads were a library of their own. libgcc_s is on every system, but the arithmetic that older ones lack comes
  # from libgcc.a; it also asks for the newer glibc of this system.
  target_link_libraries(longspan_portable INTERFACE -lpthread -lgcc)
  target_link_options(longspan_portable INTERFACE -B${LONGSPAN_GLIBC_STUBS} -static-libstdc++
                      -Wl,--allow-shlib-undefined -Wl,--exclude-libs,ALL)
endif()
