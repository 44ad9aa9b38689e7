/* bpe_read.h - what the two readers of tokenizer.json share (bpe_read.c: words and vocabulary,
 * bpe_open.c: added tokens and the frame).
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_BPE_READ_H
#define ESA_MODEL_BPE_READ_H

#include "model/config/json_file.h"
#include "model/text/bpe.h"

typedef struct esa_bpe_reader {
    esa_json_file *file;
    esa_bpe *bpe;
    const char *suffix; /* of the last symbol of a word */
    int64_t vocab;      /* entries of the vocabulary */
} esa_bpe_reader;

/* Reads model, pre_tokenizer and normalizer. Fails with ESA_ERR_FORMAT, ESA_ERR_UNSUPPORTED or
 * ESA_ERR_MEMORY; the message names the part. */
esa_status esa_bpe_read_model(esa_bpe_reader *r);

/* A member of an object that is a string, or "". */
const char *esa_bpe_text(const json_t *object, const char *key);
/* Fails unless the part of the file (where: its name) is an object of this type. */
esa_status esa_bpe_type(esa_bpe_reader *r, const json_t *part, const char *where, const char *type);
esa_status esa_bpe_no_memory(esa_bpe_reader *r);

#endif
