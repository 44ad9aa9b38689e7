# SPDX-License-Identifier: Apache-2.0
# Tests. Every tests/*/test_*.c is one cmocka program linked with the static library (it may include headers of src/) and
# with tests/common/*.c. Labels: unit, example, tree (headers, symbols, installation), cli, quality.

if(ESA_FUZZ)
  if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "ESA_FUZZ needs clang (libFuzzer); use the preset 'fuzz'")
  endif()
  add_custom_target(fuzzers)
  file(GLOB fuzzers CONFIGURE_DEPENDS tests/fuzz/fuzz_*.c)
  foreach(source ${fuzzers})
    get_filename_component(name ${source} NAME_WE)
    add_executable(${name} ${source})
    esa_compile_settings(${name})
    target_include_directories(${name} PRIVATE src)
    target_compile_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_libraries(${name} PRIVATE esa_static)
    add_dependencies(fuzzers ${name})
  endforeach()
  # The library itself is instrumented for coverage too, or the fuzzer would be blind.
  target_compile_options(esa_objects PRIVATE -fsanitize=fuzzer-no-link)
  target_link_options(esa PRIVATE -fsanitize=fuzzer-no-link)
endif()

if(NOT ESA_TESTS)
  return()
endif()

# ---- cmocka: the real one, or for cross builds (where distributions have no package) a stand-in of the part we use
add_library(esa_cmocka INTERFACE)
if(CMAKE_CROSSCOMPILING)
  target_include_directories(esa_cmocka SYSTEM INTERFACE ${CMAKE_CURRENT_SOURCE_DIR}/tests/common/cmocka_lite)
  # The vectoriser of gcc 12 for aarch64 stops with an internal error on loops of the tests (not of the library).
  target_compile_options(esa_cmocka INTERFACE -fno-tree-vectorize)
else()
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(CMOCKA QUIET IMPORTED_TARGET cmocka)
  endif()
  if(NOT TARGET PkgConfig::CMOCKA)
    message(STATUS "cmocka not found: tests are off (scripts/setup.sh test installs what they need)")
    return()
  endif()
  target_link_libraries(esa_cmocka INTERFACE PkgConfig::CMOCKA)
endif()

enable_testing()
file(GLOB common CONFIGURE_DEPENDS tests/common/*.c)
file(GLOB tests CONFIGURE_DEPENDS tests/*/test_*.c)
list(FILTER tests EXCLUDE REGEX "/tests/(nn|model|media|metric)/")     # of libesa_video: EsaVideoTests.cmake
esa_isa_flags(common)
if(common AND tests)
  add_library(esa_test_common STATIC ${common})
  esa_compile_settings(esa_test_common)
  target_include_directories(esa_test_common PUBLIC tests src)
  target_link_libraries(esa_test_common PUBLIC esa_static esa_cmocka m)
endif()
foreach(source ${tests})
  get_filename_component(name ${source} NAME_WE)
  get_filename_component(folder ${source} DIRECTORY)
  get_filename_component(folder ${folder} NAME)
  add_executable(${name} ${source})
  esa_compile_settings(${name})
  target_include_directories(${name} PRIVATE tests src)
  if(TARGET esa_test_common)
    target_link_libraries(${name} PRIVATE esa_test_common)
  endif()
  target_link_libraries(${name} PRIVATE esa_static esa_cmocka m)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests
                        BUILD_RPATH "$ORIGIN/../lib")      # where `make bundle` puts cmocka
  add_test(NAME ${folder}.${name} COMMAND ${name})
  set_tests_properties(${folder}.${name} PROPERTIES LABELS unit TIMEOUT 1200)
endforeach()

foreach(source ${ESA_EXAMPLES})
  get_filename_component(name ${source} NAME_WE)
  add_test(NAME example.${name} COMMAND example_${name})
  set_tests_properties(example.${name} PROPERTIES LABELS example TIMEOUT 300
                       WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/examples)
endforeach()

# ---- the tree: headers, symbols, installation; and the command as a stranger uses it. Native builds only.
if(CMAKE_CROSSCOMPILING)
  return()
endif()
if(NOT ESA_SANITIZE)
  add_test(NAME tree.headers COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/headers/check_headers.sh ${CMAKE_CURRENT_SOURCE_DIR})
  add_test(NAME tree.symbols COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/headers/check_symbols.sh ${CMAKE_CURRENT_SOURCE_DIR}
           $<TARGET_FILE:esa> $<TARGET_FILE:esa_cli>)
  add_test(NAME tree.install COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/install/check_install.sh ${CMAKE_CURRENT_SOURCE_DIR}
           ${CMAKE_CURRENT_BINARY_DIR})
  set_tests_properties(tree.headers tree.symbols tree.install PROPERTIES LABELS tree TIMEOUT 300)
  if(TARGET esa_cuda)
    add_test(NAME tree.plugin COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/cuda/check_plugin.sh ${CMAKE_CURRENT_SOURCE_DIR} $<TARGET_FILE:esa_cuda>)
    set_tests_properties(tree.plugin PROPERTIES LABELS tree TIMEOUT 300)
  endif()
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/tests/quality/results.csv)
    add_test(NAME quality.results COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/quality/check_quality.py $<TARGET_FILE:esa_cli>
             ${CMAKE_CURRENT_SOURCE_DIR}/tests/quality/results.csv)
    set_tests_properties(quality.results PROPERTIES LABELS quality TIMEOUT 600)
  endif()
endif()
add_executable(make_recording tests/cli/make_recording.c)
esa_compile_settings(make_recording)
target_link_libraries(make_recording PRIVATE esa_static)
add_test(NAME cli.esa COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/cli/check_cli.py $<TARGET_FILE:esa_cli>
         $<TARGET_FILE:make_recording>)
set_tests_properties(cli.esa PROPERTIES LABELS cli TIMEOUT 900)
