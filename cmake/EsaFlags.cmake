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

# Hardening of everything that is built: canaries on the stack, checked calls of libc (not under sanitizers, which check
# them too), programs that load anywhere, tables of functions that are read-only once the program runs, and no
# executable stack. tests/install/check_elf.py reads the result. -U comes first because some compilers define it.
include(CheckPIESupported)
check_pie_supported(LANGUAGES C)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(ESA_HARDENING -fstack-protector-strong)
if(NOT ESA_SANITIZE)
  include(CheckCSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS "-O2 -Werror -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3")
  check_c_source_compiles("#include <string.h>\nint main(void) { return 0; }" ESA_FORTIFY_3)
  unset(CMAKE_REQUIRED_FLAGS)
  list(APPEND ESA_HARDENING -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$<IF:$<BOOL:${ESA_FORTIFY_3}>,3,2>)
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:${ESA_HARDENING}>"
                    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fstack-protector-strong>")
add_link_options(-Wl,-z,relro,-z,now,-z,noexecstack)

# esa_runtime_path(TARGET FOLDERS [PACKAGE...]): where a file that is installed or packed looks for its libraries.
# FOLDERS are relative to the file; a folder of a pkg-config package outside the system is added. The path is the same
# in the build folder and installed: otherwise CMake fills that of the build folder with colons to the length of the
# other, and the loader takes the empty parts for the current folder.
function(esa_runtime_path target folders)
  set(path ${folders})
  foreach(package ${ARGN})
    foreach(folder ${${package}_LIBRARY_DIRS})
      if(NOT folder MATCHES "^/(usr|lib)")
        list(APPEND path ${folder})
      endif()
    endforeach()
  endforeach()
  list(REMOVE_DUPLICATES path)
  set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "${path}")
endfunction()

# esa_exports(TARGET NODE PRIVATE SOURCE...): a shared library exports the functions that the headers SOURCE mark with
# ESA_API, as symbol version NODE, those they mark with ESA_ENGINE as PRIVATE, and nothing else.
function(esa_exports target node private)
  set(map ${CMAKE_CURRENT_BINARY_DIR}/generated/${target}.map)
  list(JOIN ARGN "+" headers)
  add_custom_command(OUTPUT ${map}
    COMMAND ${CMAKE_COMMAND} -DHEADERS=${headers} -DNODE=${node} -DPRIVATE=${private} -DOUTPUT=${map}
            -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/exports.cmake
    DEPENDS ${ARGN} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/exports.cmake VERBATIM)
  target_sources(${target} PRIVATE ${map})
  target_link_options(${target} PRIVATE -Wl,--version-script=${map})
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${map})
endfunction()

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
    if(source MATCHES "_(avx2|avx512|avx512bf16|amx)\\.c$")
      if(NOT x86)
        continue()
      endif()
      if(CMAKE_MATCH_1 STREQUAL "avx2")
        list(APPEND flags ${avx2})
      else()
        list(APPEND flags ${avx512})
      endif()
      if(CMAKE_MATCH_1 MATCHES "^(avx512bf16|amx)$")
        list(APPEND flags -mavx512bf16)
      endif()
      if(CMAKE_MATCH_1 STREQUAL "amx")
        list(APPEND flags -mamx-tile -mamx-bf16 -mamx-int8)
      endif()
    elseif(source MATCHES "_neon(bf16)?\\.c$")
      if(NOT arm)
        continue()
      endif()
      if(CMAKE_MATCH_1)
        list(APPEND flags -march=armv8.2-a+bf16)
      endif()
    endif()
    # No code relies on floating-point traps. Without this option gcc does not vectorise loops that clamp a value or
    # choose between two. NaN and infinities are not affected.
    if(source MATCHES "/src/nn/leaf_|/attn_cpu_carry\\.c$")
      list(APPEND flags -fno-trapping-math)
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
