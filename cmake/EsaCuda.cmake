# SPDX-License-Identifier: Apache-2.0
# libesa_cuda, the plugin that libesa opens at run time. ESA_CUDA=AUTO builds it if nvcc is found; everything else works
# without it.
# Which architectures a file of src/cuda is built for follows from its name:
#   sm90*.cu   sm_90a alone (wgmma, TMA)
#   sm89*.cu   sm_89 and sm_90 (E4M3 in mma.sync), and PTX for newer GPUs
#   the rest   sm_80 and sm_90, and PTX from which the driver serves every newer GPU
# ESA_CUDA_MORE adds machine code to the last two, which saves newer GPUs the driver's compiling at the first start.
# Its C files are code of the host that needs no CUDA header.
set(ESA_CUDA AUTO CACHE STRING "build the CUDA plugin: AUTO, ON or OFF")
set(ESA_CUDA_MORE "" CACHE STRING "more GPUs to compile for, for example 100;120; nvcc need not know all of them")
set(ESA_CUDA_LINKER "" CACHE FILEPATH "what links the plugin, if not the compiler of the host code")
if(ESA_CUDA STREQUAL "OFF" OR CMAKE_CROSSCOMPILING OR ESA_SANITIZE)
  return()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(ESA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ESA_CUDA=ON, but no nvcc was found: put it on PATH or set CUDACXX")
  endif()
  message(STATUS "nvcc not found: libesa_cuda is not built")
  return()
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old, libesa_cuda needs 12.4 or newer"
                      " (or configure with -DESA_CUDA=OFF)")
endif()
if(ESA_CUDA_LINKER)
  set(CMAKE_CUDA_HOST_LINK_LAUNCHER ${ESA_CUDA_LINKER})
endif()

set(ESA_CUDA_REAL "")
execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE ESA_CUDA_KNOWN)
foreach(number ${ESA_CUDA_MORE})
  if(ESA_CUDA_KNOWN MATCHES "sm_${number}[^0-9]")
    list(APPEND ESA_CUDA_REAL ${number}-real)
  else()
    message(STATUS "nvcc ${CMAKE_CUDA_COMPILER_VERSION} does not know sm_${number}: such GPUs get PTX")
  endif()
endforeach()

file(GLOB ESA_CUDA_SM90 CONFIGURE_DEPENDS src/cuda/*/sm90*.cu)
file(GLOB ESA_CUDA_SM89 CONFIGURE_DEPENDS src/cuda/*/sm89*.cu)
file(GLOB ESA_CUDA_ANY CONFIGURE_DEPENDS src/cuda/*/*.cu)
list(REMOVE_ITEM ESA_CUDA_ANY ${ESA_CUDA_SM90} ${ESA_CUDA_SM89})
set(ESA_CUDA_OBJECTS)
function(esa_cuda_objects name architectures)
  add_library(${name} OBJECT ${ARGN})
  target_include_directories(${name} PRIVATE src include)
  esa_uses_build_id(${name})
  target_compile_features(${name} PRIVATE cuda_std_17)
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-fvisibility=hidden>)
  list(REMOVE_ITEM architectures "")
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}" POSITION_INDEPENDENT_CODE ON
                        CUDA_RUNTIME_LIBRARY Static)
endfunction()
esa_cuda_objects(esa_cuda_sm90 "90a-real" ${ESA_CUDA_SM90})
esa_cuda_objects(esa_cuda_sm89 "89-real;90-real;${ESA_CUDA_REAL};89-virtual" ${ESA_CUDA_SM89})
esa_cuda_objects(esa_cuda_any "80-real;90-real;${ESA_CUDA_REAL};80-virtual" ${ESA_CUDA_ANY})
file(GLOB ESA_CUDA_HOST CONFIGURE_DEPENDS src/cuda/*/*.c)
add_library(esa_cuda_host OBJECT ${ESA_CUDA_HOST})
esa_compile_settings(esa_cuda_host)
target_include_directories(esa_cuda_host PRIVATE src include)
set_target_properties(esa_cuda_host PROPERTIES POSITION_INDEPENDENT_CODE ON)

add_library(esa_cuda MODULE $<TARGET_OBJECTS:esa_cuda_sm90> $<TARGET_OBJECTS:esa_cuda_sm89>
            $<TARGET_OBJECTS:esa_cuda_any> $<TARGET_OBJECTS:esa_cuda_host>)
target_link_libraries(esa_cuda PRIVATE ${CMAKE_DL_LIBS})
# One exported symbol; nothing of the C++ or CUDA runtime is looked up outside.
target_link_options(esa_cuda PRIVATE -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/cmake/esa_cuda.map
                    -Wl,--no-undefined -static-libstdc++ -static-libgcc)
set_target_properties(esa_cuda PROPERTIES LINKER_LANGUAGE CUDA CUDA_RUNTIME_LIBRARY Static CUDA_ARCHITECTURES OFF
                      LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cmake/esa_cuda.map)
