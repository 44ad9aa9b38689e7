# SPDX-License-Identifier: Apache-2.0
"""Writes src/model/text/html_entities.c: the named character references of the HTML standard, as Python's html module
lists them.

    python3 tools/tables/html_entities.py > src/model/text/html_entities.c
"""
import html.entities

WIDTH = 138


def c_string(data):
    """Bytes as the inside of a C string. Neither names nor texts begin with a digit, so \\0 can be short."""
    return "".join(chr(b) if 32 <= b < 127 and chr(b) not in '"\\?' else f"\\{b:03o}" if b else "\\0" for b in data)


def main():
    # Strings of at most 4,095 bytes, all that C promises to take; an offset is 4096 * string + position.
    strings, offsets, at = [[]], [], 0
    for name in sorted(html.entities.html5, key=lambda n: n.encode()):
        assert html.entities.html5[name][0] not in "01234567"
        record = name.encode() + b"\0" + html.entities.html5[name].encode() + b"\0"
        if at + len(record) > 4094:
            strings.append([])
            at = 0
        offsets.append(4096 * (len(strings) - 1) + at)
        strings[-1].append(c_string(record))
        at += len(record)
    print("/* html_entities.c - named character references of HTML; made by tools/tables/html_entities.py.")
    print(" * SPDX-License-Identifier: Apache-2.0 */")
    print('#include "model/text/prompt.h"\n')
    print(f"const int32_t esa_html_entity_count = {len(offsets)};\n")
    print(f"const char *const esa_html_entity_text[{len(strings)}] = {{")
    for records in strings:
        line = ""
        for record in records:
            if len(line) + len(record) > WIDTH - 6:
                print(f'    "{line}"')
                line = ""
            line += record
        print(f'    "{line}",')
    print("};\n")
    print(f"const uint16_t esa_html_entity_at[{len(offsets)}] = {{")
    line = "   "
    for o in offsets:
        if len(line) + 7 > WIDTH:
            print(line)
            line = "   "
        line += f" {o},"
    print(line + "\n};")


if __name__ == "__main__":
    main()
