# Install rules.
if(NOT LONGSPAN_INSTALL)
  return()
endif()
