"""Begin a transformer with heads of 128 from one of the same width with heads of 64.

Every weight has the same shape in both: two heads become one, whose scores are the sum of theirs. Only the rotation
differs. It turns channel pairs, each at a speed of its own, and a head of 128 has other speeds. So the channels of
queries and keys move to those of the nearest speed; each speed serves once. What finds no place is left out.

The result is no finished model. On four clips of 128 pixels the loss of wan-tiny (0.03, 0.02, 0.09, 0.24 from little
noise to much) becomes 0.32, 0.13, 0.67, 0.58; a new transformer begins at 2.
"""
import math

import torch

SCORE = 2 ** 0.25  # on queries and on keys: their scores are divided by the root of 128, no longer of 64


def rotation_speeds(head_dim):
    """For frames, rows and columns: how fast each channel pair turns, as Wan's rotary embedding has it."""
    side = 2 * (head_dim // 6)
    return [[10_000 ** (-2 * i / n) for i in range(n // 2)] for n in (head_dim - 2 * side, side, side)]


def places(head_dim):
    """(which of the two heads, its pair, the pair of the doubled head) for all pairs that find a place."""
    found, old_at, new_at = [], 0, 0
    for old, new in zip(rotation_speeds(head_dim), rotation_speeds(2 * head_dim)):
        free = set(range(len(new)))
        for which in (0, 1):
            for i, speed in enumerate(old):
                if free:
                    nearest = min(free, key=lambda j: abs(math.log(new[j] / speed)))
                    free.remove(nearest)
                    found.append((which, old_at + i, new_at + nearest))
        old_at, new_at = old_at + len(old), new_at + len(new)
    return found


def channel_map(heads, head_dim):
    """Old channel of each channel of queries and keys, -1 where there is none; `heads` and `head_dim` are the old."""
    source = torch.full((heads * head_dim,), -1, dtype=torch.long)
    for head in range(heads // 2):
        for which, old, new in places(head_dim):
            for half in (0, 1):
                source[(2 * head) * head_dim + 2 * new + half] = (2 * head + which) * head_dim + 2 * old + half
    return source


@torch.no_grad()
def adopt(net, donor):
    """Give `net` the weights of `donor`, whose heads are half as wide and twice as many."""
    ours, theirs = net.config, donor.config
    heads, head_dim = theirs.num_attention_heads, theirs.attention_head_dim
    if (2 * ours.num_attention_heads, ours.attention_head_dim) != (heads, 2 * head_dim):
        raise SystemExit(f"--adopt needs a transformer with {2 * ours.num_attention_heads} heads of "
                         f"{ours.attention_head_dim // 2}, this one has {heads} of {head_dim}")
    state, source = donor.state_dict(), channel_map(heads, head_dim)
    source = source.to(next(iter(state.values())).device)
    here = source >= 0
    for i in range(theirs.num_layers):
        for x in "qk":
            weight, bias, norm = (f"blocks.{i}.attn1.{part}" for part in
                                  (f"to_{x}.weight", f"to_{x}.bias", f"norm_{x}.weight"))
            state[weight] = state[weight][source] * here[:, None]
            state[bias] = state[bias][source] * here
            state[norm] = torch.where(here, state[norm][source] * SCORE, 1.0)
    net.load_state_dict(state)
    return net
