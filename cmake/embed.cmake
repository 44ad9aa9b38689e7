# SPDX-License-Identifier: Apache-2.0
# Writes OUTPUT, a C source that holds the bytes of FILES (separated by '+') as arrays:
#   const unsigned char esa_asset_<name>[];      the file's bytes and a zero; dots in the name become underscores
#   const unsigned long esa_asset_<name>_size;   without the zero
string(REPLACE "+" ";" FILES "${FILES}")
set(text "/* written by cmake/embed.cmake */\n")
foreach(file ${FILES})
  get_filename_component(name ${file} NAME)
  string(MAKE_C_IDENTIFIER ${name} name)
  file(READ ${file} bytes HEX)
  string(LENGTH "${bytes}" length)
  math(EXPR length "${length} / 2")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
  set(byte "0x[0-9a-f][0-9a-f],")
  string(REGEX REPLACE "(${byte}${byte}${byte}${byte})" "\\1\n" bytes "${bytes}")
  string(APPEND text
         "extern const unsigned char esa_asset_${name}[];\n"
         "extern const unsigned long esa_asset_${name}_size;\n"
         "const unsigned char esa_asset_${name}[] = {\n${bytes}0x00 };\n"
         "const unsigned long esa_asset_${name}_size = ${length};\n")
endforeach()
file(WRITE ${OUTPUT} "${text}")
