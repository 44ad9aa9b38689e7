"""Procedural captioned clips: the training data of wan-tiny and of the judge.

A clip is one or two flat shapes that move over a background; its caption comes from the same draw
through a small grammar, so caption and picture always agree. Clip number `index` of seed `seed` is
always the same clip. A whole batch is rendered at once from a table of numbers, on any torch device.

A `World` says what is drawn: sizes, mix of scenes, backgrounds, how things move. Both worlds have the
same words, so both models share one tokenizer and one text encoder, but their clips look different.

Pictures are in [-1, 1], layout (batch, 3, frames, height, width). Scene coordinates run from -1 to 1
with y pointing down, so the same clip can be drawn at any size.
"""
import math
import random
from dataclasses import dataclass

import torch

FRAMES = 33
SIZE = 128

# One palette for both worlds: the autoencoder draws these colours well and no others.
COLOURS = {
    "red": (0.88, 0.12, 0.10),
    "green": (0.15, 0.68, 0.22),
    "blue": (0.14, 0.30, 0.90),
    "yellow": (0.96, 0.84, 0.14),
    "white": (0.95, 0.95, 0.95),
    "black": (0.07, 0.07, 0.07),
    "purple": (0.58, 0.20, 0.78),
    "orange": (0.97, 0.52, 0.08),
}
COLOUR_NAMES = list(COLOURS)
WALL = (0.64, 0.68, 0.74)  # above a floor
SHAPES = ["ball", "square", "triangle", "star", "ring", "cross"]
SIZES = ["small", "", "large"]
BACKGROUNDS = ["plain", "striped", "checkered", "dotted", "gradient", "floor"]

# Several wordings of one motion: the text encoder then learns meanings rather than one fixed sentence.
MOTIONS = {
    "right": ["moves to the right", "slides to the right", "moves right"],
    "left": ["moves to the left", "slides to the left", "moves left"],
    "roll_right": ["rolls to the right", "rolls right"],
    "roll_left": ["rolls to the left", "rolls left"],
    "up": ["moves up", "rises", "floats up"],
    "down": ["moves down", "falls", "falls down"],
    "spin": ["spins in place", "spins", "rotates"],
    "grow": ["grows", "gets bigger"],
    "shrink": ["shrinks", "gets smaller"],
    "circle": ["moves in a circle", "circles around"],
    "bounce": ["bounces up and down", "bounces"],
    "swing": ["swings from side to side", "moves left and right"],
    "still": ["stays still", "does not move"],
}
MOTION_NAMES = list(MOTIONS)
# "still" says little about motion, so it is drawn only for the standing object of a pair.
ACTIVE_MOTIONS = [m for m in MOTION_NAMES if m != "still"]
# On a floor these stand on the ground; the others fly.
GROUNDED = {"right", "left", "roll_right", "roll_left", "spin", "grow", "shrink", "bounce", "swing", "still"}


@dataclass(frozen=True)
class World:
    """What the clips of one model are drawn from. `name` is part of the seed of every clip."""
    name: str
    sizes: dict          # radius by word
    layouts: tuple       # shares of clips with one object, and with one or two that keep apart; the rest pass
    backgrounds: tuple   # drawn evenly: a kind named twice comes twice as often
    angles: tuple        # few: a free angle would be one more thing to learn that no caption names
    frequencies: tuple
    horizon: float       # where a floor begins
    ground: float        # where an object on it stands
    drift: float         # how far stripes, checks and dots travel during a clip
    gradient_across: bool  # a gradient runs from left to right, not from top to bottom
    spin: float          # turns of a spinning object during a clip; negative is the other way round
    circle: float        # rounds of a circling object
    bounce: float        # half the number of hops
    swing: float         # swings to and fro


WORLD_A = World(
    name="wan-tiny",
    sizes={"small": 0.22, "": 0.30, "large": 0.40}, layouts=(0.62, 0.82), backgrounds=tuple(BACKGROUNDS),
    angles=(0.0, math.pi / 4, math.pi / 2), frequencies=(2.5, 3.0), horizon=0.22, ground=0.66,
    drift=0.0, gradient_across=False, spin=1.0, circle=1.0, bounce=1.0, swing=1.0)

# Mostly two objects, sizes further apart, other patterns that slide, other paths.
WORLD_B = World(
    name="wan-tiny-b",     # a former model's; as a part of the seed it stays
    sizes={"small": 0.19, "": 0.28, "large": 0.45}, layouts=(0.30, 0.70),
    backgrounds=("plain", "gradient", "floor", "floor", "striped", "striped", "checkered", "checkered", "dotted",
                 "dotted"),
    angles=(math.pi / 6, math.pi / 3, 2 * math.pi / 3), frequencies=(1.75, 3.75), horizon=0.02, ground=0.52,
    drift=0.5, gradient_across=True, spin=-1.5, circle=-1.0, bounce=1.5, swing=1.5)

# Columns of the number table: 4 for the background, then OBJECT_COLUMNS for each of two objects.
BG_COLOUR, BG_KIND, BG_ANGLE, BG_FREQUENCY = range(4)
OBJECT_COLUMNS = 11
(O_ON, O_RADIUS, O_COLOUR, O_SHAPE, O_MOTION, O_X, O_Y, O_PHASE, O_SPEED, O_SPAN, O_GROUNDED) = range(OBJECT_COLUMNS)


@dataclass
class Clip:
    caption: str
    row: list  # numbers for render()


def _article(words):
    return ("an " if words[0] in "aeiou" else "a ") + words


def _object_words(size, colour, shape):
    return _article(f"{size} {colour} {shape}".strip())


def _background_words(rng, colour, kind):
    """The phrase that names the background, with a small choice of wordings."""
    choices = {
        "plain": [f"a plain {colour} background", f"a {colour} background"],
        "striped": [f"a {colour} striped background", f"{colour} stripes"],
        "checkered": [f"a {colour} checkered background", f"a {colour} checkerboard"],
        "dotted": [f"a {colour} dotted background", f"{colour} with {'grey' if colour == 'white' else 'white'} dots"],
        "gradient": [f"a {colour} gradient background", f"a {colour} gradient"],
        "floor": [f"a {colour} floor"],
    }[kind]
    words = rng.choice(choices).replace("a orange", "an orange")
    return f"{rng.choice(['over', 'over', 'on'])} {words}"


def _object_row(rng, world, size, colour, shape, motion, x, y, span, grounded):
    return [1.0, world.sizes[size] * rng.uniform(0.93, 1.07), COLOUR_NAMES.index(colour), SHAPES.index(shape),
            MOTION_NAMES.index(motion), x, y, rng.uniform(0, 2 * math.pi), rng.uniform(0.9, 1.1), span,
            float(grounded)]


def make_clip(seed, index, world=WORLD_A):
    """Clip `index` of the endless list that `seed` names in a world."""
    rng = random.Random(f"{world.name}/{seed}/{index}")
    bg_colour, bg_kind = rng.choice(COLOUR_NAMES), rng.choice(world.backgrounds)
    bg_row = [COLOUR_NAMES.index(bg_colour), BACKGROUNDS.index(bg_kind), rng.choice(world.angles),
              rng.choice(world.frequencies)]
    free = [c for c in COLOUR_NAMES if c != bg_colour]
    # White dots behind a white object (and the light tone behind it) would hide the shape.
    if bg_kind == "dotted":
        free = [c for c in free if c != "white"]
    first, second = rng.sample(free, 2)
    floor = bg_kind == "floor"
    layout = rng.random()

    if layout < world.layouts[0]:  # one object
        size, shape, motion = rng.choice(SIZES), rng.choice(SHAPES), rng.choice(ACTIVE_MOTIONS)
        grounded = floor and motion in GROUNDED
        objects = [_object_row(rng, world, size, first, shape, motion, rng.uniform(-0.3, 0.3),
                               rng.uniform(-0.3, 0.3), 0.85 - 0.6 * world.sizes[size], grounded)]
        text = f"{_object_words(size, first, shape)} {rng.choice(MOTIONS[motion])}"
    elif layout < world.layouts[1]:  # two objects that keep to their own corners
        sx, sy = rng.choice([-1, 1]), rng.choice([-1, 1])
        objects, parts = [], []
        for colour, (x, y) in ((first, (0.42 * sx, 0.42 * sy)), (second, (-0.42 * sx, -0.42 * sy))):
            size, shape, motion = rng.choice(["small", ""]), rng.choice(SHAPES), rng.choice(ACTIVE_MOTIONS)
            objects.append(_object_row(rng, world, size, colour, shape, motion, x, y, 0.6, False))
            parts.append(f"{_object_words(size, colour, shape)} {rng.choice(MOTIONS[motion])}")
        text = " and ".join(parts)
    else:  # one object passes behind or before a standing one
        motion = rng.choice(["right", "left", "roll_right", "roll_left"])
        size, shape, other = rng.choice(["small", ""]), rng.choice(SHAPES), rng.choice(SHAPES)
        x, y, front = rng.uniform(-0.15, 0.15), rng.uniform(-0.2, 0.2), rng.random() < 0.5
        mover = _object_row(rng, world, size, first, shape, motion, x, y, 0.75, floor)
        stander = _object_row(rng, world, "large", second, other, "still", x, y, 0.7, floor)
        objects = [mover, stander] if front else [stander, mover]
        text = (f"{_object_words(size, first, shape)} {rng.choice(MOTIONS[motion])} "
                f"{'in front of' if front else 'behind'} {_object_words('large', second, other)}")

    row = bg_row + objects[0] + (objects[1] if len(objects) > 1 else [0.0] * OBJECT_COLUMNS)
    return Clip(f"{text} {_background_words(rng, bg_colour, bg_kind)}", row)


def swap_colours(caption):
    """The caption with its first and last colour exchanged: wrong for the clip, though all words are the same."""
    words = caption.split()
    at = [i for i, w in enumerate(words) if w in COLOURS and words[i + 1:i + 2] != ["dots"]]
    words[at[0]], words[at[-1]] = words[at[-1]], words[at[0]]
    return " ".join(words)


def _coverage(distance, size):
    """Soft edge about two pixels wide: clean to look at, and easy for a small autoencoder."""
    return (0.5 - distance * (size / 4)).clamp(0, 1)


def _second_tone(colours):
    """The other tone of a pattern: darker, or lighter where the colour is nearly black."""
    dark = colours.mean(-1, keepdim=True) < 0.2
    return torch.where(dark, colours + 0.26, colours * 0.6)


def _background(world, table, x, y, t, palette, size):
    def col(i):
        return table[:, i].view(-1, 1, 1, 1)

    kind, angle, frequency = col(BG_KIND), col(BG_ANGLE), col(BG_FREQUENCY)
    slide = world.drift * t
    u = x * torch.cos(angle) + y * torch.sin(angle) - slide
    w = -x * torch.sin(angle) + y * torch.cos(angle)
    # `edge` turns a wave into a two-tone pattern with an edge about two pixels wide.
    edge = size / (2 * math.pi * frequency)
    wave_u, wave_w = torch.sin(math.pi * frequency * u), torch.sin(math.pi * frequency * w)
    stripes = (0.5 + wave_u * edge).clamp(0, 1)
    checks = (0.5 + wave_u * wave_w * edge).clamp(0, 1)
    cell = 0.5
    du = torch.remainder(x - slide, cell) - cell / 2
    dw = torch.remainder(y, cell) - cell / 2
    dots = _coverage(torch.sqrt(du * du + dw * dw) - 0.1, size)
    ramp = (0.5 + 0.5 * x) + 0 * y if world.gradient_across else (0.5 + 0.5 * y) + 0 * x
    floor_part = _coverage(world.horizon - y, size) + 0 * x
    floor_ramp = ((y - world.horizon) / (1 - world.horizon)).clamp(0, 1) + 0 * x

    colour = palette[table[:, BG_COLOUR].long()].view(-1, 3, 1, 1, 1)
    tone = _second_tone(palette)[table[:, BG_COLOUR].long()].view(-1, 3, 1, 1, 1)
    white = torch.ones(3, device=table.device).view(1, 3, 1, 1, 1) * 0.95
    dot_colour = torch.where(colour.mean(1, keepdim=True) > 0.9, 0.5 * white, white)
    wall = torch.tensor(WALL, device=table.device).view(1, 3, 1, 1, 1)

    def blend(a, b, m):
        return a + (b - a) * m.unsqueeze(1)

    kind = kind.unsqueeze(1)
    picture = colour + 0 * blend(colour, tone, ramp)
    picture = torch.where(kind == 1, blend(colour, tone, stripes), picture)
    picture = torch.where(kind == 2, blend(colour, tone, checks), picture)
    picture = torch.where(kind == 3, blend(colour, dot_colour, dots), picture)
    picture = torch.where(kind == 4, blend(colour, tone * 0.6, ramp), picture)
    on_floor = blend(wall + 0 * picture, blend(colour * 0.8, colour, floor_ramp), floor_part)
    return torch.where(kind == 5, on_floor, picture)


def _path(world, motion, o, t):
    """Centre, radius and turn of one object over time t in [0, 1], for every clip of the batch."""
    def is_(name):
        return motion == MOTION_NAMES.index(name)

    radius, phase, speed, span = o(O_RADIUS), o(O_PHASE), o(O_SPEED), o(O_SPAN)
    zero = torch.zeros_like(t)
    cx, cy, r, turn = o(O_X) + zero, o(O_Y) + zero, radius + zero, zero + 0 * radius
    travel = span * speed * (2 * t - 1)
    to_right, to_left = is_("right") | is_("roll_right"), is_("left") | is_("roll_left")
    cx = torch.where(to_right, travel, torch.where(to_left, -travel, cx))
    cy = torch.where(is_("down"), travel, torch.where(is_("up"), -travel, cy))
    # Rolling without slipping: the angle is the way divided by the radius.
    turn = torch.where(is_("roll_right") | is_("roll_left"), cx / radius.clamp_min(1e-3) + phase, turn)
    turn = torch.where(is_("spin"), 2 * math.pi * world.spin * speed * t + phase, turn)
    r = torch.where(is_("grow"), radius * (0.55 + 0.9 * t), r)
    r = torch.where(is_("shrink"), radius * (1.45 - 0.9 * t), r)
    angle = 2 * math.pi * world.circle * t + phase
    cx = torch.where(is_("circle"), o(O_X) * 0.5 + 0.65 * span * torch.cos(angle), cx)
    cy = torch.where(is_("circle"), o(O_Y) * 0.5 + 0.65 * span * torch.sin(angle), cy)
    cx = torch.where(is_("swing"), 0.85 * span * torch.sin(2 * math.pi * world.swing * t + phase), cx)
    hop = torch.sin(2 * math.pi * world.bounce * t + phase).abs()
    cy = torch.where(is_("bounce"), 0.6 - 1.4 * span * hop, cy)
    lift = torch.where(is_("bounce"), 1.4 * span * hop, zero)
    cy = torch.where(o(O_GROUNDED) > 0, world.ground - r - lift, cy)
    return cx, cy, r.clamp_min(1e-3), turn


def _distance(shape, x, y, r):
    """Signed distance (negative inside) to each object's outline; x, y are in the object's own frame."""
    d0 = torch.sqrt(x * x + y * y + 1e-9)
    d = d0 - r
    d = torch.where(shape == 1, torch.maximum(x.abs(), y.abs()) - 0.84 * r, d)
    q = math.sqrt(3) / 2
    below = y - 0.12 * r  # a triangle looks centred a little above its centroid
    d = torch.where(shape == 2, torch.maximum(torch.maximum(q * x - 0.5 * below, -q * x - 0.5 * below), below)
                    - 0.56 * r, d)
    # Five-pointed star: fold the plane into one tenth and measure to the line from tip to notch.
    outer, inner, tenth = 1.18, 0.52, math.pi / 5
    phi = torch.remainder(torch.atan2(x, -y) + tenth, 2 * tenth) - tenth
    fx, fy = d0 * torch.cos(phi), d0 * torch.sin(phi).abs()
    ex, ey = inner * math.cos(tenth) - outer, inner * math.sin(tenth)
    length = math.hypot(ex, ey)
    d = torch.where(shape == 3, ((fx - outer * r) * ey - fy * ex) / length, d)
    d = torch.where(shape == 4, (d0 - 0.76 * r).abs() - 0.26 * r, d)
    ax, ay = x.abs(), y.abs()
    bar = torch.minimum(torch.maximum(ax - r, ay - 0.34 * r), torch.maximum(ay - r, ax - 0.34 * r))
    return torch.where(shape == 5, bar, d)


@torch.no_grad()
def render(rows, frames=FRAMES, size=SIZE, crop=None, window=None, device="cpu", rng=None, world=WORLD_A):
    """Draw a batch of clips of one world. `crop` cuts a random square of that many pixels out of each picture
    and `window` a random stretch of that many frames out of the `frames` (both need `rng`, a random.Random)."""
    table = torch.tensor(rows, dtype=torch.float32, device=device)
    batch, n, steps = len(rows), crop or size, window or frames
    cuts = torch.zeros(batch, 3, device=device)
    if rng is not None:
        cuts = torch.tensor([[rng.randrange(size - n + 1), rng.randrange(size - n + 1),
                              rng.randrange(frames - steps + 1)] for _ in rows], dtype=torch.float32, device=device)
    top, left, start = (cuts[:, i].view(-1, 1, 1, 1) for i in range(3))
    pixel = torch.arange(n, device=device, dtype=torch.float32) + 0.5
    y = (pixel.view(1, 1, n, 1) + top) / size * 2 - 1
    x = (pixel.view(1, 1, 1, n) + left) / size * 2 - 1
    t = (torch.arange(steps, device=device, dtype=torch.float32).view(1, -1, 1, 1) + start) / max(frames - 1, 1)
    palette = torch.tensor([COLOURS[c] for c in COLOUR_NAMES], device=device)

    # A background that stands still is drawn once, not for every frame.
    when = t if world.drift else torch.zeros_like(t[:, :1])
    picture = _background(world, table, x, y, when, palette, size).expand(batch, 3, steps, n, n)
    for j in (1, 0):  # the second object lies behind the first
        base = 4 + OBJECT_COLUMNS * j

        def o(i, base=base):
            return table[:, base + i].view(-1, 1, 1, 1)

        cx, cy, r, turn = _path(world, o(O_MOTION), o, t)
        dx, dy = x - cx, y - cy
        c, s = torch.cos(turn), torch.sin(turn)
        ox, oy = dx * c + dy * s, -dx * s + dy * c
        d = _distance(o(O_SHAPE), ox, oy, r)
        # Balls and rings carry a band, so that one can see them turn. The rim is a little darker for all.
        round_shape = (o(O_SHAPE) == 0) | (o(O_SHAPE) == 4)
        band = torch.where(round_shape, _coverage(ox.abs() - 0.2 * r, size), torch.zeros_like(d))
        rim = (1 + d / (0.35 * r)).clamp(0, 1)
        colour_index = table[:, base + O_COLOUR].long()
        colour = palette[colour_index].view(-1, 3, 1, 1, 1)
        tone = _second_tone(palette)[colour_index].view(-1, 3, 1, 1, 1)
        paint = (colour + (tone - colour) * band.unsqueeze(1)) * (1 - 0.18 * rim).unsqueeze(1)
        alpha = (_coverage(d, size) * o(O_ON)).unsqueeze(1)
        picture = picture + (paint - picture) * alpha
    return picture * 2 - 1
