# SPDX-License-Identifier: Apache-2.0
# Label faults: the command while its memory or its files fail, and while it is ended by signals. These
# checks take a minute or two each and run once, in `make test-all` (scripts/test.sh).
if(NOT ESA_VIDEO_FFMPEG OR NOT TARGET make_recording OR ESA_SANITIZE)
  return()
endif()
# Not "libesa...": calls from such a library count (tests/faults/faults.c).
add_library(faults MODULE tests/faults/faults.c)
esa_brief_settings(faults)
target_link_libraries(faults PRIVATE ${CMAKE_DL_LIBS})
target_compile_options(faults PRIVATE -fvisibility=default) # or nothing stands in for libc's
set_target_properties(faults PROPERTIES PREFIX ""
                      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
set(words $<TARGET_FILE:esa_cli> ${CMAKE_CURRENT_SOURCE_DIR}/models)
set(checks ${CMAKE_CURRENT_SOURCE_DIR}/tests/faults)
foreach(kind alloc files)
  add_test(NAME faults.${kind} COMMAND python3 ${checks}/check_faults.py ${words}
           $<TARGET_FILE:make_recording> $<TARGET_FILE:faults> ${kind})
endforeach()
add_test(NAME faults.signals COMMAND python3 ${checks}/check_kills.py ${words})
# What the two judge by: wrong commands are planted.
add_test(NAME faults.judge COMMAND python3 ${checks}/judge.py)
set_tests_properties(faults.alloc faults.files faults.signals faults.judge PROPERTIES LABELS faults
                     TIMEOUT 1200 COST 60)
