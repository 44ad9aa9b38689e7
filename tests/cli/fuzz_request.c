/* fuzz_request.c - reads any body as a request of `esa serve`: JSON and forms, their fields,
 * options and pictures. It is refused with a status and a sentence, or it becomes settings that
 * name no file but those of the server.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Input: 8 bytes length n, n bytes of the body, then the content type. The command is no library:
 * the build compiles its sources for this program, without main and without the HTTP side. */
#include "fuzz/fuzz_common.h"
#include "serve/fields.h"

static const char lora_file[] = "/srv/loras/a.safetensors", masks_file[] = "/srv/masks",
                  plan_file[] = "/srv/plan.json", image_file[] = "/srv/out/ID-input";

static const serve_rules *rules_of(void)
{
    static serve_rules rules;
    if (rules.models) return &rules;
    rules.usual = clip_request_default();
    rules.usual.method = METHOD_ERROR;
    rules.max_body = 1 << 20;
    rules.max_prompt = 200;
    rules.max_pixels = 1000000;
    rules.models = 2;
    for (int i = 0; i < 2; i++) {
        serve_model *m = &rules.model[i];
        snprintf(m->name, sizeof m->name, "%s", i ? "other" : "wan-tiny");
        snprintf(m->folder, sizeof m->folder, "/srv/models/%d", i);
        m->known = 1;
        m->image = i;
        m->info = (esa_model_info){ .patch = { 1, 2, 2 },
                                    .factor = { 4, 8, 8 },
                                    .frames = 17,
                                    .height = 128,
                                    .width = 128,
                                    .steps = 8,
                                    .fps = 16 };
    }
    static const char *const files[] = { lora_file, masks_file, plan_file };
    for (int i = 0; i < 3; i++) {
        serve_name *n = &rules.name[rules.names++];
        *n = (serve_name){ .kind = i, .scale = 0.5 };
        snprintf(n->name, sizeof n->name, "good");
        snprintf(n->file, sizeof n->file, "%s", files[i]);
    }
    return &rules;
}

static void check_refusal(const serve_refusal *r, int code)
{
    must(r->code == code && code >= 400 && code < 600, "a refusal has a status");
    must(memchr(r->message, 0, sizeof r->message) && r->message[0], "and a sentence");
    must(memchr(r->param, 0, sizeof r->param) != NULL, "and its field ends");
    size_t bytes;
    char *text = cli_json_take(serve_refusal_json(r), &bytes);
    must(text && bytes > 0, "and can be sent");
    free(text);
}

static void check_loras(const cli_texts *loras)
{
    for (int i = 0; i < loras->count; i++)
        must(strncmp(loras->text[i], lora_file, sizeof lora_file - 1) == 0 &&
                 loras->text[i][sizeof lora_file - 1] == ':',
             "a LoRA is one of the server's");
}

static void check_settings(const serve_settings *s, const serve_rules *rules, int image)
{
    const esa_generate_params *p = &s->clip.p;
    must(s->model >= 0 && s->model < rules->models, "the model is one of the server's");
    must(s->clip.open.model == rules->model[s->model].folder, "and so is its folder");
    must(!p->masks || strcmp(p->masks, masks_file) == 0, "masks are the server's");
    must(!p->plan || strcmp(p->plan, plan_file) == 0, "a plan is the server's");
    must(!p->image == !image && (!image || p->image == image_file), "the picture is the job's");
    must(!p->prompt_embeds && !p->save_embeds && !p->latents && !p->save_latents && !p->record &&
             !s->clip.open.transformer && !s->clip.open.transformer_2 && !s->clip.open.lpips,
         "no other file is named");
    check_loras(&s->clip.open.lora);
    check_loras(&s->clip.open.lora_2);
    must(p->prompt && p->prompt[0] && strlen(p->prompt) <= 200, "there is a prompt");
    must(p->width >= 0 && p->width <= 16384 && p->height >= 0 && p->height <= 16384 &&
             p->frames >= 0 && p->frames <= 100000 && p->steps >= 0 && p->steps <= 10000,
         "sizes are in their ranges");
    must(s->seed >= 0 && s->quality >= 0 && s->quality <= 100 && s->fps >= 0 && s->fps <= 1000,
         "numbers are in their ranges");
}

/* What is kept of a job gives the same job again. */
static void check_record(json_t *fields, const serve_rules *rules)
{
    serve_job *job = serve_job_new(), *again;
    size_t bytes, more;
    must(job != NULL, "memory");
    snprintf(job->id, sizeof job->id, "video_gen_1");
    job->fields = json_incref(fields);
    snprintf(job->model_name, sizeof job->model_name, "other");
    char *text = cli_json_take(serve_record_make(job), &bytes);
    must(text != NULL, "a record is written");
    json_t *record = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, NULL);
    must(record != NULL, "and can be read");
    again = serve_record_read(record, job->id, rules);
    must(again && again->model == 1, "as a job");
    char *second = cli_json_take(serve_record_make(again), &more);
    must(second && more == bytes && memcmp(text, second, bytes) == 0, "which is the same");
    free(text);
    free(second);
    json_decref(record);
    serve_job_drop(again);
    serve_job_drop(job);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t n = 0;
    if (size < 8) return 0;
    memcpy(&n, data, 8);
    if (n > size - 8 || size - 8 - n > 200) return 0;
    char type[208] = "";
    memcpy(type, data + 8 + n, size - 8 - n);
    char *body = malloc(n + 1); /* of its own, so that a byte too many is found */
    must(body != NULL, "memory");
    memcpy(body, data + 8, n);
    const serve_rules *rules = rules_of();
    serve_wish wish;
    serve_refusal refusal;
    serve_settings settings;
    const int code = serve_wish_read(&wish, &refusal, rules, type, body, n);
    free(body);
    if (code) {
        check_refusal(&refusal, code);
        must(!wish.fields && !wish.image, "a refused request keeps nothing");
        return 0;
    }
    const int image = wish.image != NULL;
    must(json_is_object(json_object_get(wish.fields, "esa")), "there are options");
    must(image == json_is_true(json_object_get(wish.fields, "image")), "a picture is noted");
    const int wrong = serve_settings_read(&settings, &refusal, rules, wish.fields,
                                          image ? image_file : NULL);
    if (wrong)
        check_refusal(&refusal, wrong);
    else {
        check_settings(&settings, rules, image);
        serve_settings_free(&settings);
    }
    check_record(wish.fields, rules);
    serve_wish_free(&wish);
    return 0;
}

/* ---------------------------------------------------------------- seeds */

#define JSON_TYPE "application/json"
#define FORM_TYPE "multipart/form-data; boundary=\"x-1\""
#define PART(name, value)                                                                          \
    "--x-1\r\nContent-Disposition: form-data; name=\"" name "\"\r\n\r\n" value "\r\n"
#define PIXEL                                                                                      \
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgABc3UBGAAAAABJRU5ErkJggg=="

static const char *const bodies[][2] = {
    { "{\"prompt\":\"a red ball\",\"size\":\"64x48\",\"seconds\":\"1\",\"seed\":7,\"fps\":8,"
      "\"num_inference_steps\":4,\"guidance_scale\":2.5,\"esa\":{\"preset\":\"fast\","
      "\"compare\":true,\"carry\":\"auto\",\"cache\":0.03,\"precision\":8,\"layers16\":[0,1]}}",
      JSON_TYPE },
    { "{\"prompt\":\"x\",\"model\":\"other\",\"image_reference\":{\"image_url\":"
      "\"data:image/png;base64," PIXEL "\"},\"extra_body\":{\"flow_shift\":3}}",
      JSON_TYPE "; charset=utf-8" },
    { "{\"prompt\":\"x\",\"esa\":{\"method\":\"cached\",\"masks\":\"good\",\"lora\":"
      "[\"good:0.5\",\"good\"],\"refresh\":\"early\",\"sigmas\":[1,0.5]}}",
      JSON_TYPE },
    { PART("prompt", "a red ball") PART("size", "64x64") PART("esa.steps", "4")
          PART("esa", "{\"work\":0.3,\"plan\":\"good\",\"quality\":30}") "--x-1--\r\n",
      FORM_TYPE },
    { PART("prompt", "") "--x-1\r\ncontent-disposition: form-data; name=\"input_reference\"; "
                         "filename=\"a.jpg\"\r\nContent-Type: image/jpeg\r\n\r\n"
                         "\xff\xd8\xff\xe0\x01\x04 a\xff\xc0\x01\x11\x08\x01\x10\x01\x10\r\n"
                         "--x-1--",
      FORM_TYPE },
    { "[[[[[[[[[]]]]]]]]]", JSON_TYPE },
};

static int make_seeds(const char *folder)
{
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/seed%zu", folder, i);
        FILE *f = fopen(path, "wb");
        if (!f) return 1;
        const uint64_t n = strlen(bodies[i][0]);
        const size_t type = strlen(bodies[i][1]);
        const int bad = fwrite(&n, 1, 8, f) != 8 || fwrite(bodies[i][0], 1, n, f) != n ||
                        fwrite(bodies[i][1], 1, type, f) != type;
        if (fclose(f) != 0 || bad) return 1;
    }
    return 0;
}
