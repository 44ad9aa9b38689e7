/* start.h - the options of `esa serve`.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_SERVE_START_H
#define ESA_CLI_SERVE_START_H

#include "serve/serve.h"

typedef struct serve_options {
    const char *host, *folder, *key_file;
    int64_t port;
    int insecure;
    cli_texts models, loras, masks, plans;
} serve_options;

/* Reads the options into both. *done: 1 after --help. CLI_USAGE or CLI_FAILED after a message. */
int serve_options_read(serve_options *options, serve_rules *rules, int argc, char **argv,
                       int *done);
/* Finds the folders of the models, and reads what they say of themselves. CLI_FAILED after a
 * message. */
int serve_models_look(serve_rules *rules, const serve_options *options);
void serve_rules_free(serve_rules *rules);

#endif
