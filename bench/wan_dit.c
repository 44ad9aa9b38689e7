/* wan_dit.c - seconds per forward of a Wan transformer, split into self-attention, matrix products,
 * cross-attention and the rest.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     wan_dit FOLDER|1.3b:LAYERS T H W [--threads N] [--repeat N] [--block N]
 *             [--select NAME:BUDGET[:tail]] [--dtype f32|bf16]
 *
 * FOLDER is a model in diffusers' layout. 1.3b:LAYERS makes up weights of Wan2.1-T2V-1.3B's shape
 * with that many blocks. T H W is the size of the latent (wan-tiny's clip: 17 32 32). NAME is
 * dense, entropy, rf_v2 or ada_bsa. --dtype is the type of linear layers and attention (f32). The
 * first forward warms up; the fastest of the others counts.
 * bench/wan_dit.py runs diffusers beside it. */
#include "model/golden.h"
#include "model/dit_cases.h"

typedef struct options {
    const char *folder;
    int32_t latent[3], threads, repeat, block, selector, tail, dtype;
    double budget;
} options;

static int read_options(options *o, int argc, char **argv)
{
    static const char *const name[] = { "dense", "entropy", "rf_v2", "ada_bsa" };
    *o = (options){ .threads = 0, .repeat = 3, .budget = 1 };
    if (argc < 5) return 0;
    o->folder = argv[1];
    for (int i = 0; i < 3; i++) o->latent[i] = atoi(argv[2 + i]);
    for (int i = 5; i + 1 < argc; i += 2) {
        const char *v = argv[i + 1];
        if (strcmp(argv[i], "--threads") == 0)
            o->threads = atoi(v);
        else if (strcmp(argv[i], "--repeat") == 0)
            o->repeat = atoi(v);
        else if (strcmp(argv[i], "--block") == 0)
            o->block = atoi(v);
        else if (strcmp(argv[i], "--dtype") == 0)
            o->dtype = strcmp(v, "bf16") == 0 ? ESA_DTYPE_BF16 : ESA_DTYPE_F32;
        else if (strcmp(argv[i], "--select") == 0) {
            const size_t n = strcspn(v, ":");
            int32_t k = 0;
            while (k < 4 && (strlen(name[k]) != n || strncmp(name[k], v, n) != 0)) k++;
            if (k == 4) return 0;
            o->selector = k;
            if (v[n]) o->budget = atof(v + n + 1);
            o->tail = strstr(v, ":tail") != NULL;
        } else
            return 0;
    }
    return o->latent[0] > 0 && o->latent[1] > 0 && o->latent[2] > 0 && o->repeat > 0;
}

static void must(esa_ctx *ctx, esa_status status)
{
    if (status == ESA_OK) return;
    fprintf(stderr, "%s: %s\n", esa_status_name(status), esa_ctx_error(ctx));
    exit(1);
}

int main(int argc, char **argv)
{
    options o;
    if (!read_options(&o, argc, argv)) {
        fprintf(stderr, "usage: wan_dit FOLDER|1.3b:LAYERS T H W [--threads N] [--repeat N] "
                        "[--select NAME:BUDGET[:tail]] [--block N] [--dtype f32|bf16]\n");
        return 2;
    }
    esa_ctx *ctx = NULL;
    esa_ctx_params cp = esa_ctx_params_default();
    cp.threads = o.threads;
    if (esa_ctx_create(&ctx, &cp) != ESA_OK) return 1;
    esa_nn nn;
    esa_nn_init(&nn, ctx);
    must(ctx, esa_nn_use_dtype(&nn, o.dtype));
    esa_wan_config config = DIT_CONFIG(12, 128, 1, 8960, 16, 16, 4096, 256, 1024, 1, 1, 2, 2);
    const int32_t own = strncmp(o.folder, "1.3b:", 5) != 0;
    wan_folder made = { 0 };
    char path[700];
    if (own) {
        snprintf(path, sizeof path, "%s/transformer/config.json", o.folder);
        must(ctx, esa_config_wan(ctx, &config, path));
    } else {
        config.layers = atoi(o.folder + 5);
        made = wan_folder_make();
        wan_folder_fill(&made, ctx, &config);
    }
    const esa_part_env env = { .nn = &nn, .folder = own ? o.folder : made.top.dir };
    esa_dit *dit = NULL;
    must(ctx, open_dit(&env, &dit, &esa_wan_dit_kind, &config));
    const int64_t volume = (int64_t)o.latent[0] * o.latent[1] * o.latent[2];
    float *x = malloc((size_t)(volume * config.in_channels) * 4),
          *v = malloc((size_t)(volume * config.out_channels) * 4);
    float *text = calloc((size_t)(512 * config.text_dim), 4);
    if (!x || !v || !text) return 1;
    fill_tensor(x, volume * config.in_channels, "bench.latents", 1.7f, 0);
    fill_tensor(text, 20 * config.text_dim, "bench.text", 1.0f, 0);
    esa_session_params p = esa_session_params_default();
    p.mode = o.selector ? ESA_SESSION_ONLINE : ESA_SESSION_DENSE;
    p.select = esa_select_params_default(o.selector ? o.selector : ESA_SELECT_ENTROPY);
    p.select.budget = o.budget;
    p.select.block_q = p.select.block_k = o.block;
    p.attention.tail = o.tail ? ESA_TAIL_POOLED : ESA_TAIL_NONE;
    p.layers = config.layers;
    p.steps = o.repeat + 1;
    p.warmup_frac = 0;
    p.dense_first_layer = 0;
    must(ctx, esa_dit_begin(dit, o.latent, &p.select.layout, p.select.selector, p.select.mode, 1));
    must(ctx, set_text(dit, 0, text, 512));
    esa_session *s = NULL;
    must(ctx, esa_session_create(ctx, &s, &p));
    must(ctx, esa_session_begin(s));
    double best = INFINITY, part[ESA_NN_KINDS] = { 0 };
    for (int32_t i = 0; i <= o.repeat; i++) {
        must(ctx, esa_session_step(s, i, 0));
        memset(nn.seconds, 0, sizeof nn.seconds);
        const double start = esa_nn_now();
        must(ctx, forward(dit, s, 0, v, x, 900 - i));
        const double seconds = esa_nn_now() - start;
        if (i == 0 || seconds >= best) continue;
        best = seconds;
        memcpy(part, nn.seconds, sizeof part);
    }
    esa_session_stats stats = { .struct_size = sizeof stats };
    must(ctx, esa_session_get_stats(s, &stats, -1, -1));
    const int64_t N = volume / (config.patch[0] * config.patch[1] * config.patch[2]),
                  d = (int64_t)config.heads * config.head_dim;
    const double gflop = 2e-9 * (double)config.layers * (double)N * (double)d *
                         (double)(6 * d + 2 * config.ffn);
    printf("{\"tokens\": %lld, \"layers\": %d, \"threads\": %d, \"cpu\": \"%s\", \"density\": "
           "%.3f, \"seconds\": %.3f, \"self_attention\": %.3f, "
           "\"gemm\": %.3f, \"cross_attention\": %.3f, \"rest\": %.3f, \"gemm_gflops\": %.1f, "
           "\"attention_dense_gflops\": %.1f, \"peak_mb\": %.0f}\n",
           (long long)N, config.layers, esa_ctx_threads(ctx), esa_ctx_cpu(ctx),
           o.selector ? stats.density : 1.0, best, part[ESA_NN_SELF], part[ESA_NN_GEMM],
           part[ESA_NN_ATTENTION],
           best - part[ESA_NN_SELF] - part[ESA_NN_GEMM] - part[ESA_NN_ATTENTION],
           gflop / part[ESA_NN_GEMM],
           4e-9 * (double)config.layers * (double)N * (double)N * (double)d / part[ESA_NN_SELF],
           (double)nn.peak / 1e6);
    esa_session_free(s);
    esa_dit_free(dit);
    esa_nn_close(&nn);
    if (!own) wan_folder_remove(&made);
    esa_ctx_free(ctx);
    free(x);
    free(v);
    free(text);
    return 0;
}
