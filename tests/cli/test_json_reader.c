/* test_json_reader.c - the command's JSON reader: values as written, every broken text refused,
 * nothing read behind the end.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "core/json_reader.h"

/* A copy of exactly these bytes and the zero behind them, so that a sanitizer sees a read behind
 * them. */
static cli_value *parse(const char *text, size_t bytes, char error[160])
{
    char *copy = malloc(bytes + 1);
    memcpy(copy, text, bytes);
    copy[bytes] = 0;
    cli_value *v = cli_value_parse(copy, bytes, error);
    free(copy);
    return v;
}

static const char sample[] =
    "{\"a\": [1, -2.5e3, 0, true, false, null], \"text\": "
    "\"q\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\ud83d\\ude00\",\n"
    " \"deep\": {\"er\": {\"number\": 7, \"none\": null}}, \"empty\": {}, \"list\": []}";

static void values(void **state)
{
    (void)state;
    char error[160];
    cli_value *v = parse(sample, sizeof sample - 1, error);
    assert_non_null(v);
    const cli_value *a = cli_value_at(v, "a");
    assert_int_equal(a->type, CLI_JSON_ARRAY);
    assert_int_equal(a->count, 6);
    static const double numbers[] = { 1, -2500, 0, 1, 0, 0 };
    static const int types[] = { CLI_JSON_NUMBER, CLI_JSON_NUMBER, CLI_JSON_NUMBER,
                                 CLI_JSON_BOOL,   CLI_JSON_BOOL,   CLI_JSON_NULL };
    int i = 0;
    for (const cli_value *e = a->child; e; e = e->next, i++) {
        assert_int_equal(e->type, types[i]);
        assert_true(e->number == numbers[i]);
    }
    assert_string_equal(cli_value_text(v, "text"), "q\"\\/\b\f\n\r\t\xc3\xa9\xf0\x9f\x98\x80");
    assert_true(cli_value_number(v, "deep.er.number") == 7);
    assert_true(isnan(cli_value_number(v, "deep.er.none")));
    assert_true(isnan(cli_value_number(v, "text")));
    assert_true(cli_value_number(v, "a.1") == -2500);
    assert_null(cli_value_text(v, "deep.er.number"));
    assert_null(cli_value_at(v, "deep.err"));
    assert_null(cli_value_at(v, "a.b"));
    assert_null(cli_value_at(NULL, "a"));
    assert_int_equal(cli_value_at(v, "empty")->count, 0);
    cli_value_free(v);
    cli_value_free(NULL);
}

static void broken(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        " ",
        "{",
        "[",
        "[1,]",
        "{\"a\":1,}",
        "{\"a\" 1}",
        "{a:1}",
        "[1 2]",
        "01",
        "+1",
        ".5",
        "1.",
        "1e",
        "-",
        "nul",
        "tru",
        "NaN",
        "Infinity",
        "\"",
        "\"\\",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\u12g4\"",
        "\"\\ud800\"",
        "\"\\ud800\\u0041\"",
        "\"\\udc00\"",
        "\"\\u0000\"",
        "\"a\nb\"",
        "1 2",
        "{} x",
        "{\"a\":1,\"a\":2}",
        "// x\n1",
        "'a'",
        "[1],",
        "}",
        "]",
    };
    char error[160];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        cli_value *v = parse(bad[i], strlen(bad[i]), error);
        if (v) fail_msg("'%s' was taken for JSON", bad[i]);
        assert_true(strncmp(error, "line ", 5) == 0);
    }
    assert_null(parse("1\0", 2, error));
    assert_null(parse("{\n\n\"a\": x}", 10, error));
    assert_true(strncmp(error, "line 3:", 7) == 0);
}

/* Every beginning of a document is refused, and never read past. */
static void cut(void **state)
{
    (void)state;
    char error[160];
    for (size_t n = 0; n < sizeof sample - 1; n++) assert_null(parse(sample, n, error));
}

static void deep(void **state)
{
    (void)state;
    char text[256], error[160];
    memset(text, '[', 64);
    memset(text + 64, ']', 64);
    cli_value *v = parse(text, 128, error);
    assert_non_null(v);
    cli_value_free(v);
    memset(text, '[', 65);
    memset(text + 65, ']', 65);
    assert_null(parse(text, 130, error));
    memset(text, '[', sizeof text);
    assert_null(parse(text, sizeof text, error));
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(values), cmocka_unit_test(broken),
                                        cmocka_unit_test(cut), cmocka_unit_test(deep) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
