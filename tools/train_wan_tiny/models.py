"""What differs between the models that this folder trains.

`wan-tiny` is the model of the release. `judge` only judges: methods are tuned on wan-tiny and then measured on it. It
has the shape that people run, other clips, and real ones beside those that are drawn. It shares wan-tiny's autoencoder,
tokenizer and text encoder, so only its transformer is trained.
"""
from dataclasses import dataclass

from clips import WORLD_A, WORLD_B, World

PARTS = {"vae": "config.json", "transformer": "config.json", "text_encoder": "config.json",
         "tokenizer": "tokenizer_config.json"}


def _transformer(layers, heads, head_dim, ffn):
    return dict(patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=head_dim, in_channels=16,
                out_channels=16, text_dim=192, freq_dim=256, ffn_dim=ffn, num_layers=layers, cross_attn_norm=True,
                qk_norm="rms_norm_across_heads", eps=1e-6, rope_max_seq_len=1024)


@dataclass(frozen=True)
class Model:
    transformer: dict     # configuration of WanTransformer3DModel
    world: World          # what its clips are drawn from
    trains_text: bool     # whether the text encoder is trained along
    exports: tuple        # the parts its folder holds


MODELS = {
    "wan-tiny": Model(_transformer(layers=8, heads=4, head_dim=64, ffn=512), WORLD_A, True, tuple(PARTS)),
    # The shape that people run: heads of 128, and 17 x 44 x 44 = 32,912 tokens in a clip of 352 pixels.
    "judge": Model(_transformer(layers=8, heads=2, head_dim=128, ffn=512), WORLD_B, False, ("transformer",)),
}
