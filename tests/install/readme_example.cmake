# The program in the README is examples/minimal/main.cpp, letter for letter.
file(READ ${SOURCE}/README.md readme)
file(READ ${SOURCE}/examples/minimal/main.cpp program)
string(FIND "${readme}" "```cpp\n${program}```" place)
if(place EQUAL -1)
  message(FATAL_ERROR "README.md does not show examples/minimal/main.cpp as it is: copy it there")
endif()
