# SPDX-License-Identifier: Apache-2.0
# Writes OUTPUT, a C source that holds the bytes of FILES (separated by '+') as arrays:
#   const unsigned char esa_asset_<name>[];      the file's bytes and a zero; dots in the name become underscores
#   const unsigned long esa_asset_<name>_size;   without the zero
# and a table of them all, which ends with a name that is NULL:
#   const struct esa_asset { const char *name; const unsigned char *bytes; unsigned long size; } esa_assets[];
string(REPLACE "+" ";" FILES "${FILES}")
set(text "/* written by cmake/embed.cmake */\n#include <stddef.h>\n")
set(table "")
foreach(file ${FILES})
  get_filename_component(title ${file} NAME)
  set(name ${title})
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
  string(APPEND table "  { \"${title}\", esa_asset_${name}, ${length} },\n")
endforeach()
string(APPEND text
       "struct esa_asset { const char *name; const unsigned char *bytes; unsigned long size; };\n"
       "extern const struct esa_asset esa_assets[];\n"
       "const struct esa_asset esa_assets[] = {\n${table}  { NULL, NULL, 0 } };\n")
file(WRITE ${OUTPUT} "${text}")
