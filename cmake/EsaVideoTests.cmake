# SPDX-License-Identifier: Apache-2.0
# Tests of the engine. Every tests/{nn,model,media,metric}/test_*.c is one cmocka program linked with
# libesa_video's objects; it may include headers of src/ and tests/. Goldens lie in tests/golden.
# Labels: video, live (needs torch), long (only in `make test-all`).
if(NOT ESA_VIDEO_FOUND)
  return()
endif()
if(ESA_FUZZ)
  set(fuzzed model/fuzz_model model/fuzz_lora model/fuzz_tokenizer media/fuzz_media)
  if(ESA_VIDEO_FFMPEG)
    list(APPEND fuzzed media/fuzz_movie)
  endif()
  foreach(source ${fuzzed})
    get_filename_component(name ${source} NAME)
    string(REPLACE fuzz_ "" name ${name})
    add_executable(fuzz_${name} tests/${source}.c)
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
set(top ${CMAKE_CURRENT_SOURCE_DIR})
file(GLOB video_tests CONFIGURE_DEPENDS tests/nn/test_*.c tests/model/test_*.c tests/media/test_*.c
     tests/metric/test_*.c)
foreach(source ${video_tests})
  get_filename_component(name ${source} NAME_WE)
  get_filename_component(folder ${source} DIRECTORY)
  get_filename_component(folder ${folder} NAME)
  add_executable(${name} ${source} $<TARGET_OBJECTS:esa_in_locale>)
  esa_brief_settings(${name})
  target_include_directories(${name} PRIVATE tests src)
  # Tests may skip only what the engine was built without.
  target_compile_definitions(${name} PRIVATE
                             $<$<BOOL:${ESA_VIDEO_SENTENCEPIECE}>:ESA_HAVE_SENTENCEPIECE>
                             $<$<BOOL:${ESA_VIDEO_FFMPEG}>:ESA_HAVE_FFMPEG>)
  target_link_libraries(${name} PRIVATE esa_video_static esa_test_common esa_cmocka m)
  set_target_properties(${name} PROPERTIES
                        RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
  set(environment "ESA_TEST_GOLDEN=${top}/tests/golden;ESA_TEST_MODELS=${top}/models")
  if(NOT name MATCHES "_gpu$")
    add_test(NAME ${folder}.${name} COMMAND ${name})
    set_tests_properties(${folder}.${name} PROPERTIES LABELS video TIMEOUT 1200 ENVIRONMENT
                         "${environment}")
  elseif(TARGET esa_stand_in) # scripts/test-cuda.sh runs them on a GPU
    add_test(NAME stand_in.${name} COMMAND ${name})
    set_tests_properties(stand_in.${name} PROPERTIES LABELS stand_in TIMEOUT 1200 ENVIRONMENT
                         "${environment};ESA_CUDA_LIB=$<TARGET_FILE:esa_stand_in>")
  endif()
endforeach()
set_tests_properties(model.test_pipeline PROPERTIES COST 30)
set(locale_environment "${environment}")
foreach(name test_frames test_load test_movie test_config)
  esa_locale_test(${name} ${name})
endforeach()

# Files that the writers leave on disk, read back by other code.
add_executable(make_media tests/media/make_media.c)
esa_compile_settings(make_media)
target_link_libraries(make_media PRIVATE esa_video_static)
set_target_properties(make_media PROPERTIES
                      RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
add_test(NAME media.files COMMAND python3 ${top}/tests/media/check_media.py $<TARGET_FILE:make_media>)
set_tests_properties(media.files PROPERTIES LABELS video TIMEOUT 300)

# The same tests with goldens made now. $ESA_PYTHON may name an interpreter with torch and diffusers.
add_test(NAME live.diffusers COMMAND python3 ${top}/tests/model/check_live.py ${top}
         ${CMAKE_CURRENT_BINARY_DIR}/tests)
set_tests_properties(live.diffusers PROPERTIES LABELS live TIMEOUT 1800 SKIP_RETURN_CODE 77)
if(NOT ESA_SANITIZE)
  add_test(NAME tree.builds COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/tests/tree/check_builds.py
           $<TARGET_FILE:esa_cli> $<TARGET_FILE:esa> $<TARGET_FILE:esa_video> $<TARGET_FILE:esa_stand_in>
           ${CMAKE_CURRENT_SOURCE_DIR})
  set_tests_properties(tree.builds PROPERTIES LABELS tree TIMEOUT 300)
  add_test(NAME tree.video_symbols COMMAND ${top}/tests/headers/check_video_symbols.sh ${top}
           $<TARGET_FILE:esa_video>)
  set_tests_properties(tree.video_symbols PROPERTIES LABELS tree TIMEOUT 120)
endif()
if(NOT TARGET esa_cli OR NOT TARGET make_recording)
  return()
endif()

# The command as a user calls it: esa_cli_test(NAME TIMEOUT COST [CLASS...]) runs
# check_NAME.py ESA MODELS. Under sanitizers only the named classes run. COST lets ctest start the
# longest first when it knows no earlier run.
function(esa_cli_test name timeout cost)
  set(classes "")
  if(ESA_SANITIZE)
    set(classes ${ARGN})
  endif()
  add_test(NAME cli.${name} COMMAND python3 ${top}/tests/cli/check_${name}.py $<TARGET_FILE:esa_cli>
           ${top}/models ${classes})
  set_tests_properties(cli.${name} PROPERTIES LABELS video TIMEOUT ${timeout} COST ${cost})
endfunction()
# Whole videos are slow under sanitizers, and test_pipeline makes some there.
esa_cli_test(generate 1200 60 Words Models Refusals)
set_tests_properties(cli.generate PROPERTIES ENVIRONMENT
                     "ESA_TEST_STAND_IN=$<TARGET_FILE:esa_stand_in>")
esa_cli_test(calibrate 1200 60 Words Refusals)
esa_cli_test(plan 1200 60 Words Refusals)
esa_cli_test(carry 1200 50 Words)
esa_cli_test(experiment 1200 50 Words Submit)
esa_cli_test(export 600 20 Pictures Raw Export)
# The server. Its tests measure times and load the machine, so they run alone.
if(ESA_MICROHTTPD_FOUND)
  esa_cli_test(serve 1800 50 Api Names)
  esa_cli_test(serve_refusals 1200 40)
  esa_cli_test(serve_life 1200 40)
  esa_cli_test(serve_load 1200 30)
  add_test(NAME long.serve_load COMMAND python3 ${top}/tests/cli/check_serve_load.py $<TARGET_FILE:esa_cli>
           ${top}/models 1000)
  add_test(NAME long.serve_kills COMMAND python3 ${top}/tests/cli/check_serve_life.py $<TARGET_FILE:esa_cli>
           ${top}/models Life.test_kill)
  set_tests_properties(long.serve_load long.serve_kills PROPERTIES LABELS long TIMEOUT 1800 RUN_SERIAL ON)
  set_tests_properties(long.serve_kills PROPERTIES ENVIRONMENT ESA_TEST_KILLS=10)
  set_tests_properties(cli.serve cli.serve_refusals cli.serve_life cli.serve_load PROPERTIES RUN_SERIAL ON)
endif()
add_test(NAME cli.evaluate COMMAND python3 ${top}/tests/cli/check_evaluate.py $<TARGET_FILE:esa_cli>)
set_tests_properties(cli.evaluate PROPERTIES LABELS video TIMEOUT 600)
# The metrics beside scikit-image and lpips, in the interpreter $ESA_PYTHON.
add_test(NAME live.metrics COMMAND python3 ${top}/tests/metric/check_live_metrics.py ${top}
         $<TARGET_FILE:esa_cli>)
set_tests_properties(live.metrics PROPERTIES LABELS live TIMEOUT 900 SKIP_RETURN_CODE 77)
# A Slurm that the test starts itself.
add_test(NAME long.slurm COMMAND python3 ${top}/tests/slurm/check_slurm.py $<TARGET_FILE:esa_cli>
         ${top}/models)
set_tests_properties(long.slurm PROPERTIES LABELS long TIMEOUT 1800 SKIP_RETURN_CODE 77)
if(NOT ESA_SANITIZE)
  # Sanitizers reserve terabytes of address space.
  esa_cli_test(limits 1200 10)
  # Every writer, killed at random moments.
  add_test(NAME cli.killed COMMAND python3 ${top}/tests/cli/check_killed.py $<TARGET_FILE:esa_cli>
           ${top}/models $<TARGET_FILE:make_recording>)
  set_tests_properties(cli.killed PROPERTIES LABELS video TIMEOUT 1200 COST 40)
  # The pages of the command in a browser, and every command of the tutorial.
  add_test(NAME long.report COMMAND python3 ${top}/tests/cli/check_report_browser.py
           $<TARGET_FILE:esa_cli> $<TARGET_FILE:make_recording> ${top}/models)
  set_tests_properties(long.report PROPERTIES LABELS long TIMEOUT 600 SKIP_RETURN_CODE 77)
  if(ESA_MICROHTTPD_FOUND)
    # The page of `esa serve` in a browser. It measures seconds to the first video.
    add_test(NAME long.serve_page COMMAND python3 ${top}/tests/cli/check_serve_browser.py
             $<TARGET_FILE:esa_cli> ${top}/models)
    set_tests_properties(long.serve_page PROPERTIES LABELS long TIMEOUT 3600 SKIP_RETURN_CODE 77
                         RUN_SERIAL ON)
  endif()
  add_test(NAME long.tutorial COMMAND python3 ${top}/tests/cli/check_tutorial.py ${top})
  set_tests_properties(long.tutorial PROPERTIES LABELS long TIMEOUT 1800 RUN_SERIAL ON)
endif()
