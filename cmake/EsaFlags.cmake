# SPDX-License-Identifier: Apache-2.0
# Compiler settings shared by all targets, and the instruction-set flags of single files.

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
# Plain -O3: no fast-math anywhere, because -inf and NaN must work.
set(CMAKE_C_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O2 -g")
set(CMAKE_C_FLAGS_DEBUG "-O1 -g")

if(ESA_SANITIZE)
  # Line numbers are all that a report needs; full debug information takes a fifth of the build.
  set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O2 -g1")
  add_compile_options(-fsanitize=${ESA_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${ESA_SANITIZE})
  if(ESA_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize-recover=all)
  endif()
endif()

# Warnings, visibility and the POSIX level for one target.
function(esa_compile_settings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic $<$<BOOL:${ESA_WERROR}>:-Werror>
                         -fvisibility=hidden
                         -fno-semantic-interposition)
  target_compile_definitions(${target} PRIVATE _POSIX_C_SOURCE=200809L)
endfunction()

# The same for code that runs once, which takes longer to optimise than to run: test programs, and the command under
# sanitizers.
function(esa_brief_settings target)
  esa_compile_settings(${target})
  target_compile_options(${target} PRIVATE -O1)
endfunction()

# Only files whose names end in an instruction set get its flags, and files of another architecture are left out.
# Contraction of a*b+c is off outside src/cpu, so that reference code gives the same bits with every compiler; kernels
# need fma.
function(esa_isa_flags list_name)
  set(kept "")
  set(x86 OFF)
  set(arm OFF)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
    set(x86 ON)
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    set(arm ON)
  endif()
  set(avx2 -mavx2 -mfma -mf16c)
  set(avx512 -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
  foreach(source ${${list_name}})
    if(source MATCHES "/src/cpu/")
      set(flags -ffp-contract=fast)
    else()
      set(flags -ffp-contract=off)
    endif()
    if(source MATCHES "_(avx2|avx512|avx512bf16)\\.c$")
      if(NOT x86)
        continue()
      endif()
      if(CMAKE_MATCH_1 STREQUAL "avx2")
        list(APPEND flags ${avx2})
      else()
        list(APPEND flags ${avx512})
      endif()
      if(CMAKE_MATCH_1 STREQUAL "avx512bf16")
        list(APPEND flags -mavx512bf16)
      endif()
    elseif(source MATCHES "_neon\\.c$" AND NOT arm)
      continue()
    endif()
    set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${flags}")
    list(APPEND kept ${source})
  endforeach()
  if(NOT kept)
    # A tree without sources still configures.
    file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/generated/empty.c "typedef int esa_empty_unit;\n")
    set(kept ${CMAKE_CURRENT_BINARY_DIR}/generated/empty.c)
  endif()
  set(${list_name} ${kept} PARENT_SCOPE)
endfunction()
