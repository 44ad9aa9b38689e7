# SPDX-License-Identifier: Apache-2.0
# Tests. Every tests/*/test_*.c is one cmocka program. It links the static library,
# tests/common/*.c and tests/cases/*.c, and may include headers of src/. Labels: unit, stand_in,
# example, tree (headers, symbols, rooms, documents, installation), cli, quality, bench.
#
# The programs of ESA_GPU_TESTS are also the tests of the CUDA backend (tests/common/on_gpu.h). Here
# they run that way on tests/cuda/stand_in.c, whose "GPU" is the processor; scripts/test-cuda.sh
# runs them on a real GPU.

# The one list of programs that also run on a GPU. It is written to tests/gpu_tests.txt in the build
# folder, where scripts/test-cuda.sh reads it.
set(ESA_GPU_TESTS
    test_attention test_eight_bit test_levels test_exact_rows test_carry test_plan
    test_plan_order test_threads
    test_properties test_reference test_golden test_clips test_mass test_mask test_mask_levels
    test_session_policy test_session_precision test_session_cached test_session_heads
    test_session_reuse test_session_carry test_carry_limits
    test_mask_file test_recording test_recorded_errors test_recorded_masks
    test_gpu_eight_bit test_gpu_sm80_8bit test_gpu_select test_gpu_order
    test_gpu_calls test_gpu_session test_gpu_rows test_gpu_products test_gpu_transfer
    test_gpu_latents test_gpu_biased test_gpu_planes
    test_gpu_error test_gpu_faults)

# What `make check` builds and runs: the rules, the kernels and the calls, with few cases.
set(ESA_CHECK_TESTS
    test_attention test_eight_bit test_levels test_exact_rows test_carry test_plan test_errors
    test_kernels test_mask test_mask_levels test_order test_properties test_reference test_golden
    test_session_policy test_session_cached test_session_reuse test_mask_code test_f8)

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
  # The command is no library: its sources are compiled again for the targets that read results and requests. The
  # first one keeps its messages instead of printing them. The HTTP side, which needs another library, is left out.
  if(TARGET esa_cli)
    set(command_sources ${ESA_CLI_SOURCES})
    list(FILTER command_sources EXCLUDE REGEX
         "/cli/(esa|cmd_[a-z_]*)\\.c$|/cli/experiment/|/cli/serve/(http[a-z_]*|mhd)\\.c$")
    foreach(source cli/fuzz_results cli/fuzz_request)
      get_filename_component(name ${source} NAME)
      add_executable(${name} tests/${source}.c ${command_sources})
      esa_brief_settings(${name})
      add_dependencies(${name} esa_commit)
      esa_uses_build_id(${name})
      target_include_directories(${name} PRIVATE tests cli bench ${CMAKE_CURRENT_BINARY_DIR}/generated)
      target_compile_options(${name} PRIVATE -fsanitize=fuzzer)
      target_link_options(${name} PRIVATE -fsanitize=fuzzer)
      target_link_libraries(${name} PRIVATE esa_static PkgConfig::ESA_JANSSON)
      add_dependencies(fuzzers ${name})
    endforeach()
    target_link_options(fuzz_results PRIVATE -Wl,--wrap=cli_fail)
  endif()
  # The library itself is instrumented for coverage too, or the fuzzer would be blind. The kernels are
  # left out: they read no files, and instrumenting them takes half of the build.
  target_compile_options(esa_objects PRIVATE -fsanitize=fuzzer-no-link)
  file(GLOB kernels src/cpu/kernels_*.c src/nn/*leaf_*.c)
  set_property(SOURCE ${kernels} APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=all)
  target_link_options(esa PRIVATE -fsanitize=fuzzer-no-link)
endif()

if(NOT ESA_TESTS)
  return()
endif()

# ---- cmocka, or a stand-in for the part we use: in cross builds, and where cmocka is missing
add_library(esa_cmocka INTERFACE)
if(CMAKE_CROSSCOMPILING)
  target_include_directories(esa_cmocka SYSTEM INTERFACE
                             ${CMAKE_CURRENT_SOURCE_DIR}/tests/common/cmocka_lite)
  # gcc 12 for aarch64 stops with an internal error while it vectorises loops of the tests.
  target_compile_options(esa_cmocka INTERFACE -fno-tree-vectorize)
else()
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(CMOCKA QUIET IMPORTED_TARGET cmocka)
  endif()
  if(TARGET PkgConfig::CMOCKA)
    target_link_libraries(esa_cmocka INTERFACE PkgConfig::CMOCKA)
  else()
    message(STATUS "cmocka not found: the tests use tests/common/cmocka_lite"
                   " (scripts/setup.sh test installs cmocka)")
    target_include_directories(esa_cmocka SYSTEM INTERFACE
                               ${CMAKE_CURRENT_SOURCE_DIR}/tests/common/cmocka_lite)
  endif()
endif()

enable_testing()
file(GLOB common CONFIGURE_DEPENDS tests/common/*.c tests/cases/*.c)
file(GLOB tests CONFIGURE_DEPENDS tests/*/test_*.c)
# Tests of libesa_video stand in EsaVideoTests.cmake.
list(FILTER tests EXCLUDE REGEX "/tests/(nn|model|media|metric)/")
list(FILTER tests EXCLUDE REGEX "/test_blas\\.c$") # below, with the libraries it opens
list(FILTER tests EXCLUDE REGEX "/test_gpu_rounding\\.c$") # below, with kernels
list(FILTER common EXCLUDE REGEX "/(on_gpu(_calls)?|in_locale)\\.c$")
esa_isa_flags(common)
if(ESA_SANITIZE)
  # The plain reference is not under test and would take most of a sanitizer run.
  set_property(SOURCE ${CMAKE_CURRENT_SOURCE_DIR}/tests/common/naive.c
               APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=all -O3)
  # One kernel set for machines without the real one: at -O2 it takes longer to compile than all others.
  set_property(SOURCE ${CMAKE_CURRENT_SOURCE_DIR}/tests/common/bf16_emulated_avx512.c
               APPEND PROPERTY COMPILE_OPTIONS -O1)
endif()
set(wrapped "")
foreach(call attention select select_qkv errors importance mask_mass plan_create plan_free plan_select
             plan_select_qkv plan_order plan_attention attention_carry plan_attention_carry
             session_begin session_set_kv_len session_attention session_free)
  list(APPEND wrapped -Wl,--wrap=esa_${call})
endforeach()
add_library(esa_on_gpu OBJECT tests/common/on_gpu.c tests/common/on_gpu_calls.c)
esa_brief_settings(esa_on_gpu)
target_include_directories(esa_on_gpu PRIVATE tests src include)
add_library(esa_in_locale OBJECT tests/common/in_locale.c)
esa_brief_settings(esa_in_locale)
if(common AND tests)
  add_library(esa_test_common STATIC ${common})
  esa_compile_settings(esa_test_common)
  target_include_directories(esa_test_common PUBLIC tests src)
  target_link_libraries(esa_test_common PUBLIC esa_static esa_cmocka m)
endif()
set(names "")
foreach(source ${tests})
  get_filename_component(name ${source} NAME_WE)
  list(APPEND names ${name})
  file(STRINGS ${source} asks REGEX "#include.*(on_gpu|gpu_kit|attention_loop)\\.h")
  if(asks AND NOT name IN_LIST ESA_GPU_TESTS)
    message(FATAL_ERROR "${source} runs on a GPU, too: add ${name} to ESA_GPU_TESTS")
  endif()
  get_filename_component(folder ${source} DIRECTORY)
  get_filename_component(folder ${folder} NAME)
  add_executable(${name} ${source} $<TARGET_OBJECTS:esa_on_gpu> $<TARGET_OBJECTS:esa_in_locale>)
  esa_brief_settings(${name})
  target_include_directories(${name} PRIVATE tests src bench)
  target_link_options(${name} PRIVATE ${wrapped})
  if(TARGET esa_test_common)
    target_link_libraries(${name} PRIVATE esa_test_common)
  endif()
  target_link_libraries(${name} PRIVATE esa_static esa_cmocka m)
  # `make bundle` puts cmocka into lib/.
  esa_runtime_path(${name} "$ORIGIN/../lib" CMOCKA)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
  if(name MATCHES "^test_gpu_")
    continue() # needs a GPU, or the stand-in
  endif()
  add_test(NAME ${folder}.${name} COMMAND ${name})
  set(labels unit)
  if(name IN_LIST ESA_CHECK_TESTS)
    list(APPEND labels check)
  endif()
  set_tests_properties(${folder}.${name} PROPERTIES LABELS "${labels}" TIMEOUT 1200)
endforeach()
add_custom_target(esa_check DEPENDS ${ESA_CHECK_TESTS})
# One step of 8-bit attention alone. It launches kernels of the plugin itself, so it runs on GPUs only.
set(gpu_tests ${ESA_GPU_TESTS})
if(TARGET esa_cuda)
  esa_cuda_objects(rounding_sm90 "90a-real" tests/cuda/rounding_sm90.cu)
  esa_cuda_objects(rounding_sm89 "89-real;90-real;89-virtual" tests/cuda/rounding_sm89.cu)
  esa_cuda_objects(rounding_any "80-real;90-real;80-virtual" tests/cuda/rounding_sm80.cu)
  foreach(part rounding_sm90 rounding_sm89 rounding_any)
    target_include_directories(${part} PRIVATE tests)
  endforeach()
  add_executable(test_gpu_rounding tests/cuda/test_gpu_rounding.c $<TARGET_OBJECTS:rounding_sm90>
                 $<TARGET_OBJECTS:rounding_sm89> $<TARGET_OBJECTS:rounding_any>)
  esa_brief_settings(test_gpu_rounding)
  target_include_directories(test_gpu_rounding PRIVATE tests src include)
  target_link_libraries(test_gpu_rounding PRIVATE esa_test_common esa_static esa_cmocka m)
  set_target_properties(test_gpu_rounding PROPERTIES LINKER_LANGUAGE CUDA CUDA_RUNTIME_LIBRARY Static
                        CUDA_ARCHITECTURES OFF
                        RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
  esa_runtime_path(test_gpu_rounding "$ORIGIN/../lib" CMOCKA)
  list(APPEND names test_gpu_rounding)
  list(APPEND gpu_tests test_gpu_rounding)
endif()
# Under emulation it takes longer than all others together.
set_tests_properties(api.test_attention PROPERTIES COST 100)
# What `make bundle` packs, and what also runs on a GPU.
string(REPLACE ";" "\n" lines "${names}")
file(CONFIGURE OUTPUT tests/core_tests.txt CONTENT "${lines}\n")
string(REPLACE ";" "\n" lines "${gpu_tests}")
file(CONFIGURE OUTPUT tests/gpu_tests.txt CONTENT "${lines}\n")

foreach(source ${ESA_EXAMPLES})
  get_filename_component(name ${source} NAME_WE)
  add_test(NAME example.${name} COMMAND example_${name})
  set_tests_properties(example.${name} PROPERTIES LABELS example TIMEOUT 300
                       WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/examples)
endforeach()

# ---- the tree itself, and the command as a user calls it; native builds only
if(CMAKE_CROSSCOMPILING)
  return()
endif()
# Programs that read and write numbers, in a locale with a decimal comma: as in a host program that
# called setlocale, and the command as its user has set the environment. The locale is made here,
# because a machine may lack it.
set(locale_folder ${CMAKE_CURRENT_BINARY_DIR}/tests/locale)
file(MAKE_DIRECTORY ${locale_folder})
add_test(NAME locale.make COMMAND localedef -i de_DE -f UTF-8 ${locale_folder}/de_DE.UTF-8)
set_tests_properties(locale.make PROPERTIES LABELS unit TIMEOUT 300 FIXTURES_SETUP locale)
function(esa_locale_test name)      # esa_locale_test(NAME COMMAND...)
  add_test(NAME locale.${name} COMMAND ${ARGN})
  set(variables ESA_TEST_LOCALE=de_DE.UTF-8 LC_ALL=de_DE.UTF-8 LOCPATH=${locale_folder}
      LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/base/locale_leaks.txt:print_suppressions=0
      ${locale_environment})
  set_tests_properties(locale.${name} PROPERTIES LABELS unit TIMEOUT 1200 FIXTURES_REQUIRED locale
                       ENVIRONMENT "${variables}")
endfunction()
foreach(name test_safetensors_read test_safetensors_write test_gguf test_mask_file test_mask_convert
             test_recording test_work_plan)
  esa_locale_test(${name} ${name})
endforeach()
# Plugins for tests: one whose GPU is the processor, one with another interface version.
set(ESA_PLUGIN_PARTS_stand_in tests/cuda/stand_in_engine.c tests/cuda/stand_in_rows.c
    tests/cuda/stand_in_products.c tests/cuda/stand_in_transfer.c tests/cuda/stand_in_latents.c
    tests/cuda/stand_in_biased.c tests/cuda/stand_in_planes.c)
# The bits of the scheduler, of latents and bytes, and of random weights do not depend on fused
# operations.
set_property(SOURCE tests/cuda/stand_in_latents.c tests/cuda/stand_in_planes.c
             tests/cuda/stand_in_transfer.c
             APPEND PROPERTY COMPILE_OPTIONS -ffp-contract=off)
foreach(plugin stand_in other_abi)
  add_library(esa_${plugin} MODULE tests/cuda/${plugin}.c ${ESA_PLUGIN_PARTS_${plugin}})
  esa_compile_settings(esa_${plugin})
  esa_uses_build_id(esa_${plugin})
  target_include_directories(esa_${plugin} PRIVATE src include)
  target_link_libraries(esa_${plugin} PRIVATE esa_static)
  target_link_options(esa_${plugin} PRIVATE
                      -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/cmake/esa_cuda.map)
  set_target_properties(esa_${plugin} PROPERTIES
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
endforeach()
foreach(name ${ESA_GPU_TESTS})
  add_test(NAME stand_in.${name} COMMAND ${name})
  set_tests_properties(stand_in.${name} PROPERTIES LABELS stand_in TIMEOUT 1200 ENVIRONMENT
                       "ESA_TEST_DEVICE=cuda;ESA_TEST_SMALL=1;ESA_CUDA_LIB=$<TARGET_FILE:esa_stand_in>")
endforeach()
# The levels of GPUs below sm_90a, where 8-bit attention has other stages or another arithmetic.
foreach(name test_eight_bit test_gpu_eight_bit)
  foreach(level sm80 sm89)
    set(test stand_in.${name}_${level})
    add_test(NAME ${test} COMMAND ${name})
    set_tests_properties(${test} PROPERTIES LABELS stand_in TIMEOUT 1200 ENVIRONMENT
      "ESA_TEST_DEVICE=cuda;ESA_CUDA=${level};ESA_TEST_SMALL=1;ESA_CUDA_LIB=$<TARGET_FILE:esa_stand_in>")
  endforeach()
endforeach()
# How the plugin finds cuBLASLt: the search needs no GPU, and the libraries are made up.
add_executable(test_blas tests/cuda/test_blas.c src/cuda/runtime/blas.c)
esa_compile_settings(test_blas)
target_include_directories(test_blas PRIVATE src include)
target_link_libraries(test_blas PRIVATE esa_cmocka ${CMAKE_DL_LIBS})
set_target_properties(test_blas PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
foreach(fake 12:120902 13:130102 98:980000 99:990000 old:110800 short:130102)
  string(REPLACE ":" ";" fake ${fake})
  list(GET fake 0 name)
  list(GET fake 1 version)
  add_library(fake_blas_${name} MODULE tests/cuda/fake_blas.c)
  esa_compile_settings(fake_blas_${name})
  target_compile_definitions(fake_blas_${name} PRIVATE FAKE_VERSION=${version}
                             $<$<STREQUAL:${name},short>:FAKE_WITHOUT_MATMUL>)
  set_target_properties(fake_blas_${name} PROPERTIES PREFIX ""
                        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
  add_dependencies(test_blas fake_blas_${name})
endforeach()
add_test(NAME cuda.test_blas COMMAND test_blas)
set_tests_properties(cuda.test_blas PROPERTIES LABELS unit TIMEOUT 60)
set(checks ${CMAKE_CURRENT_SOURCE_DIR}/tests)
if(NOT TARGET esa_cli)
  return()
endif()
if(NOT ESA_SANITIZE)
  add_test(NAME tree.headers COMMAND ${checks}/headers/check_headers.sh ${CMAKE_CURRENT_SOURCE_DIR})
  add_test(NAME tree.symbols COMMAND ${checks}/headers/check_symbols.sh ${CMAKE_CURRENT_SOURCE_DIR}
           $<TARGET_FILE:esa> $<TARGET_FILE:esa_cli>)
  add_test(NAME tree.install COMMAND ${checks}/install/check_install.sh ${CMAKE_CURRENT_SOURCE_DIR}
           ${CMAKE_CURRENT_BINARY_DIR})
  set_tests_properties(tree.headers tree.symbols tree.install PROPERTIES LABELS tree TIMEOUT 300)
  set(engine "")
  if(TARGET esa_video)
    set(engine $<TARGET_FILE:esa_video>)
  endif()
  add_test(NAME tree.elf COMMAND python3 ${checks}/install/check_elf.py ${CMAKE_CURRENT_BINARY_DIR})
  add_test(NAME tree.loading COMMAND python3 ${checks}/install/check_loading.py $<TARGET_FILE:esa_cli>
           $<TARGET_FILE:esa> ${engine})
  set_tests_properties(tree.elf tree.loading PROPERTIES LABELS tree TIMEOUT 300)
  foreach(name rooms counting corpus)
    add_test(NAME tree.${name}
             COMMAND python3 ${checks}/tree/check_${name}.py ${CMAKE_CURRENT_SOURCE_DIR})
    set_tests_properties(tree.${name} PROPERTIES LABELS tree TIMEOUT 300)
  endforeach()
  add_test(NAME tree.new_selector COMMAND python3 ${checks}/tree/check_new_selector.py
           ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_BINARY_DIR} ${CMAKE_C_COMPILER})
  set_tests_properties(tree.new_selector PROPERTIES LABELS tree TIMEOUT 300)
  add_test(NAME tree.documents COMMAND python3 ${checks}/docs/check_documents.py
           ${CMAKE_CURRENT_SOURCE_DIR} $<TARGET_FILE:esa_cli>)
  add_test(NAME tree.claims COMMAND python3 ${checks}/docs/check_claims.py ${CMAKE_CURRENT_SOURCE_DIR})
  set_tests_properties(tree.documents tree.claims PROPERTIES LABELS tree TIMEOUT 300)
  # The ggml example with a real ggml, which is fetched.
  add_test(NAME long.ggml COMMAND python3 ${checks}/install/check_ggml.py ${CMAKE_CURRENT_SOURCE_DIR}
           ${CMAKE_CURRENT_BINARY_DIR})
  set_tests_properties(long.ggml PROPERTIES LABELS long TIMEOUT 1800 SKIP_RETURN_CODE 77)
  if(TARGET esa_cuda)
    add_test(NAME tree.plugin COMMAND ${checks}/cuda/check_plugin.sh ${CMAKE_CURRENT_SOURCE_DIR}
             $<TARGET_FILE:esa_cuda>)
    set_tests_properties(tree.plugin PROPERTIES LABELS tree TIMEOUT 300)
  endif()
  add_test(NAME quality.results COMMAND python3 ${checks}/quality/check_quality.py
           $<TARGET_FILE:esa_cli> ${checks}/quality/results.csv)
  set_tests_properties(quality.results PROPERTIES LABELS quality TIMEOUT 600)
endif()
if(NOT ESA_SANITIZE) # the loader of a Python process cannot open a sanitised libesa
  add_test(NAME cli.plugin_path COMMAND python3 ${checks}/cuda/check_plugin_path.py
           $<TARGET_FILE:esa> $<TARGET_FILE:esa_stand_in> ${CMAKE_CURRENT_SOURCE_DIR}/python)
  set_tests_properties(cli.plugin_path PROPERTIES LABELS cli TIMEOUT 300)
endif()
add_executable(make_recording tests/cli/make_recording.c)
esa_compile_settings(make_recording)
target_link_libraries(make_recording PRIVATE esa_static)
set(only "")
if(ESA_SANITIZE)
  set(only --command)
endif()
add_test(NAME cli.esa COMMAND python3 ${checks}/cli/check_cli.py $<TARGET_FILE:esa_cli>
         $<TARGET_FILE:make_recording> $<TARGET_FILE:esa_stand_in> ${only})
set_tests_properties(cli.esa PROPERTIES LABELS cli TIMEOUT 900 COST 40)
add_test(NAME cli.schemas COMMAND python3 ${checks}/cli/check_schemas.py $<TARGET_FILE:esa_cli>
         $<TARGET_FILE:make_recording> $<TARGET_FILE:esa_stand_in>
         ${CMAKE_CURRENT_SOURCE_DIR}/models $<$<BOOL:${ESA_VIDEO_FOUND}>:--video>)
set_tests_properties(cli.schemas PROPERTIES LABELS cli TIMEOUT 300)
esa_locale_test(cli_schemas python3 ${checks}/cli/check_schemas.py $<TARGET_FILE:esa_cli>
                $<TARGET_FILE:make_recording> $<TARGET_FILE:esa_stand_in> ${CMAKE_CURRENT_SOURCE_DIR}/models
                $<$<BOOL:${ESA_VIDEO_FOUND}>:--video>)
# Videos in the page come through the engine and FFmpeg.
if(ESA_VIDEO_FFMPEG)
  add_test(NAME cli.report COMMAND python3 ${checks}/cli/check_report.py $<TARGET_FILE:esa_cli>
           $<TARGET_FILE:make_recording>)
  set_tests_properties(cli.report PROPERTIES LABELS cli TIMEOUT 300)
endif()
