/* run.h - the state of one call of esa_generate, and its stages.
 * SPDX-License-Identifier: Apache-2.0
 *
 * pipeline.c has the call itself, prepare.c checks the settings and makes what a run needs, begin.c
 * finds its memory, carry.c that of carried differences, denoise.c has the loop over the steps. */
#ifndef ESA_MODEL_RUN_H
#define ESA_MODEL_RUN_H

#include "model/run/model.h"
#include "model/run/random.h"
#include "model/sched/sched.h"
#include "rules/step_cache.h"
#include "workplan/work_plan.h"

/* pipeline.c frees it. */
typedef struct esa_run {
    esa_generate_params p; /* sizes filled in */
    int32_t latent[3];     /* t, h, w */
    int32_t branches;
    int32_t apart;  /* 1: the session counts the branches of a second transformer as others */
    int64_t count;  /* elements of the latents */
    int64_t tokens; /* tokens of a self-attention call, with text where it has some */
    int32_t text;   /* of these, rows of text */
    /* how the session orders tokens, as the transformer's begin takes it */
    esa_layout layout;
    int32_t selector, mode;
    int64_t scratch, mask_bytes; /* device memory of the session: of its calls, and kept */
    /* carried differences: all, the least that they take on the device, what they take there, and
     * those in host memory */
    int64_t carry_bytes, carry_least, carry_device, carry_host;
    int64_t host_left; /* host memory before the video began; INT64_MAX: not known */
    int32_t tile;      /* of the decoder; 0: whole frames */
    int64_t decoder;   /* device memory of the decoder; 0: none is needed */
    /* on the device: [C][T][H][W] sample, velocities of the branches; sums over a step */
    float *x, *v[2];
    esa_step_figures *figures;
    float *noise;      /* on the device, for schedulers that draw some; else NULL */
    float *draw;       /* the same in host memory, twice: as drawn, and as [C][T][H][W] */
    esa_torch_rng rng; /* of the call: the first latents, then the scheduler's noise */
    int64_t bytes;     /* size of x and of each v */
    /* with a step cache: velocities of the last computed step, the sample before this step, and the
     * guided velocity */
    float *kept[2], *before, *guided;
    esa_step_cache cache;
    esa_embeds embeds;
    esa_image image; /* of the picture; empty without one */
    esa_mask_file *masks;
    esa_work_plan *plan;
    double *sigma;    /* [steps] noise levels, for the plan */
    int32_t *anchors; /* [steps] of the session, with two transformers; else NULL */
    esa_sched *sched;
    esa_frames *frames;
    esa_generate_stats stats;
    int64_t steps_peak; /* most memory of nn and the session on the device during the steps */
    double work_before[ESA_WORK_KINDS]; /* seconds of the model before this call */
} esa_run;

#define ESA_FIGURES_BYTES ((1 + ESA_STEP_PARTS) * (int64_t)sizeof(esa_step_figures))

/* Copies params and checks them; fills in what they leave open. */
esa_status esa_run_settings(esa_model *m, esa_run *r, const esa_generate_params *params);
/* Checks which inputs were given. */
esa_status esa_run_inputs(const esa_model *m, const esa_generate_params *p);
/* Sets the grid and the counts of text in the layout of this run's self-attention. */
void esa_run_layout(const esa_model *m, const esa_run *r, esa_layout *layout);
/* Fills r->draw with the next latents of the call's generator, in the engine's order. */
void esa_run_draw(esa_model *m, esa_run *r);
/* 1 if step i belongs to the second of two transformers. (carry.c) */
int32_t esa_run_is_second(const esa_model *m, const esa_run *r, int32_t i);
/* carry.c: with two transformers, makes the first step of the second an anchor of a session that
 * carries. The scheduler is there; r keeps the list. */
esa_status esa_run_anchors(esa_model *m, esa_run *r, esa_session_params *s);
/* Makes scheduler, session and latents: all that can be wrong with the settings shows here, before
 * the text encoder works. */
esa_status esa_run_prepare(esa_model *m, esa_run *r);
/* image.c: fills in height and width from the picture's, if they were left open; makes what the
 * transformer needs from the picture. Both do nothing for models without an image. */
esa_status esa_run_image_size(esa_model *m, esa_generate_params *p);
esa_status esa_run_image(esa_model *m, esa_run *r);
/* Makes the transformer ready for this video and sees that there is memory for the decoder; the
 * embeddings are there. */
esa_status esa_run_begin(esa_model *m, esa_run *r);
/* carry.c: finds memory for the session's carried differences, when all else that the steps need is
 * there. On a device they take what is left, and the rest of them host memory. ESA_ERR_MEMORY if
 * they fit nowhere and the session is strict. */
esa_status esa_run_carry(esa_model *m, esa_run *r);
/* carry.c: says where they are, if there are any. */
void esa_run_say_carry(const esa_model *m, const esa_run *r);
/* Says where the memory of a device goes, when all of it is known. What stays of the weights was
 * said when the transformer began. */
void esa_run_say(const esa_model *m, const esa_run *r);
/* preview.c: checks the settings of previews; makes room for them (bytes on the device) before the
 * transformer begins; shows one after step i, whose guided velocity is v, if it is time. */
esa_status esa_run_preview_check(const esa_model *m, const esa_generate_params *p);
int64_t esa_run_preview_bytes(const esa_model *m, const esa_run *r);
esa_status esa_run_preview(esa_model *m, esa_run *r, int32_t i, const float *v);
/* Runs all steps. */
esa_status esa_run_denoise(esa_model *m, esa_run *r);

#endif
