# SPDX-License-Identifier: Apache-2.0
# Writes OUTPUT, a C source with the bytes of FILES (with '+' between) as arrays, so that the command carries its page with it:
#   const unsigned char esa_asset_<name>[] (name: the file's, dots as underscores; a zero behind the last byte) and esa_asset_<name>_size.
string(REPLACE "+" ";" FILES "${FILES}")
set(text "/* written by cmake/embed.cmake */\n")
foreach(file ${FILES})
  get_filename_component(name ${file} NAME)
  string(MAKE_C_IDENTIFIER ${name} name)
  file(READ ${file} bytes HEX)
  string(LENGTH "${bytes}" length)
  math(EXPR length "${length} / 2")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
  string(REGEX REPLACE "((0x[0-9a-f][0-9a-f],)(0x[0-9a-f][0-9a-f],)(0x[0-9a-f][0-9a-f],)(0x[0-9a-f][0-9a-f],))" "\\1\n" bytes "${bytes}")
  string(APPEND text "extern const unsigned char esa_asset_${name}[];\nextern const unsigned long esa_asset_${name}_size;\n"
         "const unsigned char esa_asset_${name}[] = {\n${bytes}0x00 };\nconst unsigned long esa_asset_${name}_size = ${length};\n")
endforeach()
file(WRITE ${OUTPUT} "${text}")
