# SPDX-License-Identifier: Apache-2.0
# Writes the version script OUTPUT: what HEADERS (separated by +) mark with ESA_API has version NODE, what they mark
# with ESA_ENGINE has version PRIVATE, and everything else stays inside. NODE changes with the API version. PRIVATE
# needs no number: libraries that use it compare their build ids, and that message names both builds. The mark and the
# name stand on one line, at its beginning.
string(REPLACE "+" ";" HEADERS "${HEADERS}")
function(esa_node out name mark rest)
  set(list "")
  foreach(header ${HEADERS})
    file(STRINGS ${header} lines REGEX "^${mark} ")
    foreach(line IN LISTS lines)
      if(line MATCHES "[ *](esa_[a-z0-9_]+)\\(")
        list(APPEND list ${CMAKE_MATCH_1})
      endif()
    endforeach()
  endforeach()
  if(NOT list)
    return()
  endif()
  list(SORT list)
  list(JOIN list ";\n    " list)
  set(${out} "${${out}}${name} {\n  global:\n    ${list};\n${rest}};\n" PARENT_SCOPE)
endfunction()
set(text "/* written by cmake/exports.cmake */\n")
esa_node(text ${NODE} ESA_API "  local: *;\n")
esa_node(text ${PRIVATE} ESA_ENGINE "")
file(WRITE ${OUTPUT} "${text}")
