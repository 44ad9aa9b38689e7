# SPDX-License-Identifier: Apache-2.0
# Tests of the engine: every tests/{nn,model,media,metric}/test_*.c is one cmocka program linked with libesa_video's objects; it may include
# headers of src/ and of tests/. Goldens lie in tests/golden; ESA_TEST_GOLDEN tells the programs where. Label: video.
if(NOT ESA_VIDEO_FOUND)
  return()
endif()
if(ESA_FUZZ)
  foreach(name model media)
    add_executable(fuzz_${name} tests/${name}/fuzz_${name}.c)
    esa_compile_settings(fuzz_${name})
    target_include_directories(fuzz_${name} PRIVATE tests src)
    target_compile_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
    target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
    target_link_libraries(fuzz_${name} PRIVATE esa_video_static)
    add_dependencies(fuzzers fuzz_${name})
  endforeach()
  target_link_libraries(fuzz_media PRIVATE z) # it makes PNG files; libpng brings zlib
  target_compile_options(esa_video_objects PRIVATE -fsanitize=fuzzer-no-link)
  target_link_options(esa_video PRIVATE -fsanitize=fuzzer-no-link)
endif()
if(NOT TARGET esa_test_common)
  return()
endif()
file(GLOB video_tests CONFIGURE_DEPENDS tests/nn/test_*.c tests/model/test_*.c tests/media/test_*.c tests/metric/test_*.c)
foreach(source ${video_tests})
  get_filename_component(name ${source} NAME_WE)
  get_filename_component(folder ${source} DIRECTORY)
  get_filename_component(folder ${folder} NAME)
  add_executable(${name} ${source})
  esa_compile_settings(${name})
  target_include_directories(${name} PRIVATE tests src)
  # What the engine was built with must work: tests may skip only what it was built without.
  target_compile_definitions(${name} PRIVATE $<$<BOOL:${ESA_VIDEO_SENTENCEPIECE}>:ESA_HAVE_SENTENCEPIECE>
                             $<$<BOOL:${ESA_VIDEO_FFMPEG}>:ESA_HAVE_FFMPEG>)
  target_link_libraries(${name} PRIVATE esa_video_static esa_test_common esa_cmocka m)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
  add_test(NAME ${folder}.${name} COMMAND ${name})
  set_tests_properties(${folder}.${name} PROPERTIES LABELS video TIMEOUT 1200 ENVIRONMENT
                       "ESA_TEST_GOLDEN=${CMAKE_CURRENT_SOURCE_DIR}/tests/golden;ESA_TEST_MODELS=${CMAKE_CURRENT_SOURCE_DIR}/models")
endforeach()

# What the writers leave on disk, read back by other code.
add_executable(make_media tests/media/make_media.c)
esa_compile_settings(make_media)
target_link_libraries(make_media PRIVATE esa_video_static)
set_target_properties(make_media PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
add_test(NAME media.files COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/media/check_media.py $<TARGET_FILE:make_media>)
set_tests_properties(media.files PROPERTIES LABELS video TIMEOUT 300)

# The same tests with goldens made now, where torch and diffusers are installed ($ESA_PYTHON: an interpreter that has them).
if(TARGET test_wan_sparse)
  add_test(NAME live.diffusers COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/model/check_live.py ${CMAKE_CURRENT_SOURCE_DIR}
           ${CMAKE_CURRENT_BINARY_DIR}/tests)
  set_tests_properties(live.diffusers PROPERTIES LABELS live TIMEOUT 1800 SKIP_RETURN_CODE 77)
endif()

# check_NAME.py ESA MODELS [CLASS ...]: the command as a stranger uses it. Classes of tests behind the limit are those that run under sanitizers. The cost lets the
# longest start first where no earlier run tells ctest.
function(esa_cli_test name timeout cost)
  set(classes "")
  if(ESA_SANITIZE)
    set(classes ${ARGN})
  endif()
  add_test(NAME cli.${name} COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/cli/check_${name}.py $<TARGET_FILE:esa_cli>
           ${CMAKE_CURRENT_SOURCE_DIR}/models ${classes})
  set_tests_properties(cli.${name} PROPERTIES LABELS video TIMEOUT ${timeout} COST ${cost})
endfunction()
if(TARGET esa_cli)
  # Under sanitizers only what reads files and refuses: whole videos are slow there, and test_pipeline makes some.
  esa_cli_test(generate 1200 60 Words Models Refusals)
  esa_cli_test(calibrate 1200 60 Words Refusals)
  # Whole experiments. Under sanitizers only what reads options and writes scripts.
  esa_cli_test(experiment 1200 50 Words Submit)
  # Videos in and out. Decoding latents needs a whole model: not under sanitizers, test_pipeline decodes there.
  esa_cli_test(export 600 20 Pictures Raw Export)
endif()
set_tests_properties(model.test_pipeline PROPERTIES COST 30)
# Every writer killed at moments of chance.
if(TARGET esa_cli AND TARGET make_recording AND NOT ESA_SANITIZE)
  add_test(NAME cli.killed COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/cli/check_killed.py $<TARGET_FILE:esa_cli>
           ${CMAKE_CURRENT_SOURCE_DIR}/models $<TARGET_FILE:make_recording>)
  set_tests_properties(cli.killed PROPERTIES LABELS video TIMEOUT 1200 COST 40)
endif()
# Long tests run in `make test-all` only: the page of `esa report` in a browser; the tutorial, command by command, from its `make` on.
if(TARGET esa_cli AND TARGET make_recording AND NOT ESA_SANITIZE)
  add_test(NAME long.report COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/cli/check_report_browser.py $<TARGET_FILE:esa_cli>
           $<TARGET_FILE:make_recording> ${CMAKE_CURRENT_SOURCE_DIR}/models)
  set_tests_properties(long.report PROPERTIES LABELS long TIMEOUT 600 SKIP_RETURN_CODE 77)
  add_test(NAME long.tutorial COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/cli/check_tutorial.py ${CMAKE_CURRENT_SOURCE_DIR})
  set_tests_properties(long.tutorial PROPERTIES LABELS long TIMEOUT 1800 RUN_SERIAL ON)
endif()
# Videos held against one another.
if(TARGET esa_cli)
  add_test(NAME cli.evaluate COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/cli/check_evaluate.py $<TARGET_FILE:esa_cli>)
  set_tests_properties(cli.evaluate PROPERTIES LABELS video TIMEOUT 600)
  # The metrics against scikit-image and lpips themselves, where they are installed ($ESA_PYTHON as above).
  add_test(NAME live.metrics COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/metric/check_live_metrics.py ${CMAKE_CURRENT_SOURCE_DIR}
           $<TARGET_FILE:esa_cli>)
  set_tests_properties(live.metrics PROPERTIES LABELS live TIMEOUT 900 SKIP_RETURN_CODE 77)
endif()
if(TARGET esa_cli)
  # On a Slurm that the test starts; skipped, with a line that says why, only where that cannot be.
  add_test(NAME long.slurm COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/slurm/check_slurm.py $<TARGET_FILE:esa_cli>
           ${CMAKE_CURRENT_SOURCE_DIR}/models)
  set_tests_properties(long.slurm PROPERTIES LABELS long TIMEOUT 1800 SKIP_RETURN_CODE 77)
endif()
if(NOT ESA_SANITIZE)
  add_test(NAME tree.video_symbols COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/headers/check_video_symbols.sh ${CMAKE_CURRENT_SOURCE_DIR}
           $<TARGET_FILE:esa_video>)
  set_tests_properties(tree.video_symbols PROPERTIES LABELS tree TIMEOUT 120)
endif()
