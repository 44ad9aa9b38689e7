# SPDX-License-Identifier: Apache-2.0
# Programs that measure, into build/bench. Benchmarks live in bench/ or behind `esa bench`, nowhere
# else. Every build compiles them, and label bench runs each once, briefly, so that they keep working.
if(CMAKE_CROSSCOMPILING OR NOT ESA_TESTS)
  return()
endif()

# Microseconds per session call; public headers only.
add_executable(session_overhead bench/session_overhead.c)
esa_compile_settings(session_overhead)
target_link_libraries(session_overhead PRIVATE esa)
esa_runtime_path(session_overhead "$ORIGIN/..")
set_target_properties(session_overhead PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/bench)
add_test(NAME bench.session_overhead COMMAND session_overhead --rounds 1)
set_tests_properties(bench.session_overhead PROPERTIES LABELS bench TIMEOUT 120)
if(TARGET esa_stand_in)
  add_test(NAME bench.session_overhead_cuda COMMAND session_overhead --rounds 1 --device cuda)
  set_tests_properties(bench.session_overhead_cuda PROPERTIES LABELS bench TIMEOUT 120
                       ENVIRONMENT "ESA_CUDA_LIB=$<TARGET_FILE:esa_stand_in>")
endif()

# Seconds per forward of the transformer. bench/wan_dit.py puts diffusers beside it.
if(ESA_VIDEO_FOUND)
  add_executable(bench_wan_dit bench/wan_dit.c)
  esa_compile_settings(bench_wan_dit)
  target_include_directories(bench_wan_dit PRIVATE tests src)
  target_link_libraries(bench_wan_dit PRIVATE esa_video_static esa_test_common esa_cmocka m)
  set_target_properties(bench_wan_dit PROPERTIES OUTPUT_NAME wan_dit
                        RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/bench)
  add_test(NAME bench.wan_dit COMMAND bench_wan_dit ${CMAKE_CURRENT_SOURCE_DIR}/models/wan-tiny 3 8 8
           --repeat 1 --block 64 --select entropy:0.5:tail)
  set_tests_properties(bench.wan_dit PROPERTIES LABELS bench TIMEOUT 300)

  # Seconds of linear layers. bench/products.py puts torch beside it.
  add_executable(bench_products bench/products.c)
  esa_compile_settings(bench_products)
  target_include_directories(bench_products PRIVATE src)
  target_link_libraries(bench_products PRIVATE esa_video_static)
  set_target_properties(bench_products PROPERTIES OUTPUT_NAME products
                        RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/bench)
  add_test(NAME bench.products COMMAND sh -c "printf 'shape 40 64 48 f32\\nrun\\n' | $<TARGET_FILE:bench_products>")
  set_tests_properties(bench.products PROPERTIES LABELS bench TIMEOUT 60 PASS_REGULAR_EXPRESSION "^ok\n0\\.[0-9]+")
endif()
