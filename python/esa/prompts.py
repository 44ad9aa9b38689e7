# SPDX-License-Identifier: Apache-2.0
"""The built-in prompts, those of the `esa` command (cli/prompts.c; a test holds the two lists together)."""
from __future__ import annotations

# What wan-tiny has learned to draw.
TINY = (
    "a red ball rolls to the right over a blue floor",
    "a large yellow star spins in place over a purple background",
    "a white square moves to the left over a green striped background",
    "a small orange triangle moves up over a black background",
    "a large green ring grows over a white checkered background",
    "a large blue cross moves to the right over a yellow floor",
    "a purple ball moves in a circle over an orange gradient background",
    "a large black square shrinks over a red dotted background",
    "a small white ball rolls to the left behind a large red triangle over a blue background",
    "a red star falls down and a small blue ring spins over a white background",
    "a yellow triangle swings from side to side over a black striped background",
    "a green cross moves to the right in front of a large orange ball over a purple floor",
)
LARGE = (
    "A fishing boat leaves a small harbour at dawn, gulls circling above its wake, camera rising slowly",
    "A street musician plays the cello under an arcade while passers-by blur past in the rain",
    "Close-up of a hummingbird hovering at a red flower, wings a blur, morning light behind it",
    "An old steam train crosses a stone viaduct in autumn, smoke drifting over coloured trees",
    "A potter shapes a bowl on a turning wheel, wet clay glistening between her hands",
    "Waves break against black cliffs at sunset, spray lit from behind, slow motion",
    "A child runs through a field of tall grass with a paper kite, seen from a low angle",
    "A night market with lanterns and steaming food stalls, the camera walking through the crowd",
    "A snow leopard crosses a ridge in falling snow and looks into the camera",
    "Time lapse of clouds rolling over a desert canyon, shadows sliding across red rock",
    "A glass of water falls from a table and shatters on a wooden floor, slow motion",
    "A small robot waters plants on a balcony above a busy city, cartoon style",
)
BUILT_IN = len(LARGE)


def built_in(number: int, *, tiny: bool = False) -> list[str]:
    """The first so many prompts.

    >>> built_in(1, tiny=True)
    ['a red ball rolls to the right over a blue floor']
    """
    if not 1 <= number <= BUILT_IN:
        raise ValueError(f"there are {BUILT_IN} built-in prompts, {number} were asked for")
    return list((TINY if tiny else LARGE)[:number])
